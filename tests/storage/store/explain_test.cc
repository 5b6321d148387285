// Tests that the store says why a prompt does not match: one test for each reason, and for the
// bounds of the history of what is gone.
#include "storage/catalog/gone_history.h"
#include "storage/core/store_core.h"
#include "storage/store/open_store.h"
#include "tests/storage/open_store.h"
#include "tests/storage/prompts.h"

namespace prefixd::storage {
namespace {

constexpr int64_t kPast = 1;

class ExplainTest : public OpenStoreTest {
 protected:
  ExplainTest() { Open(); }

  SegmentId Stored(const Tokens& tokens, const PutOptions& options = {}) {
    const auto id = TryPut(tokens, options);
    EXPECT_TRUE(id.ok()) << id.error().ToString();
    return id.ok() ? *id : SegmentId{};
  }
  Result<SegmentId> TryPut(const Tokens& tokens, const PutOptions& options = {}) {
    PREFIXD_ASSIGN(auto writer, store_->BeginPut(model_.name, "t", tokens, "", options));
    PREFIXD_TRY(WriteAll(*writer, model_.geometry, tokens, 64, true));
    return writer->Commit();
  }
  MatchExplanation Why(const Tokens& tokens, const std::string& tenant = "t") {
    auto why = store_->ExplainMatch(model_.name, tenant, tokens);
    EXPECT_TRUE(why.ok()) << why.error().ToString();
    return why.ok() ? *std::move(why) : MatchExplanation{};
  }
  void ExpectGone(const Tokens& tokens, GoneReason reason, uint32_t n_tokens) {
    const MatchExplanation why = Why(tokens);
    ASSERT_TRUE(why.gone.has_value());
    EXPECT_EQ(why.gone->reason, reason);
    EXPECT_EQ(why.gone_tokens, n_tokens);
    EXPECT_GT(why.gone->unix_ms, 1'600'000'000'000);
  }
};

TEST_F(ExplainTest, WhereItDivergesAndEnds) {
  const Tokens prompt = Prompt(1);
  Stored(prompt);
  EXPECT_EQ(Why(prompt).match.n_tokens, 200u);
  EXPECT_FALSE(Why(prompt).gone.has_value());
  Tokens other = prompt;
  other[123] = 7;
  const MatchExplanation diverges = Why(other);
  EXPECT_EQ(diverges.match.n_tokens, 123u);
  EXPECT_EQ(diverges.stored_token, prompt[123]);
  // Behind a segment that continues another.
  Tokens longer = Join(prompt, Prompt(2, 50));
  Stored(longer);
  longer[230] = 7;
  EXPECT_EQ(Why(longer).match.n_tokens, 230u);
  EXPECT_EQ(Why(longer).stored_token, Prompt(2)[30]);
  const MatchExplanation ends = Why(Join(Join(prompt, Prompt(2, 50)), Prompt(3)));
  EXPECT_EQ(ends.match.n_tokens, 250u);
  EXPECT_FALSE(ends.stored_token.has_value());
  EXPECT_EQ(Why(Prompt(9)).match.n_tokens, 0u);
}

TEST_F(ExplainTest, RemovedByACall) {
  const Tokens prompt = Prompt(1);
  ASSERT_OK(store_->Remove(Stored(prompt)));
  ExpectGone(prompt, GoneReason::kRemoved, 192);
  Open();  // the history lasts
  ExpectGone(prompt, GoneReason::kRemoved, 192);
  // Prompts that share a part are answered by that part.
  ExpectGone(Join(Prompt(1, 100), Prompt(2)), GoneReason::kRemoved, 96);
  // Other tenants learn nothing.
  EXPECT_FALSE(Why(prompt, "u").gone.has_value());
  // What is stored again is no miss.
  Stored(prompt);
  EXPECT_FALSE(Why(prompt).gone.has_value());
}

TEST_F(ExplainTest, LongPromptsKeepSomeOfTheirBlocks) {
  const Tokens prompt = Prompt(1, 5000);
  ASSERT_OK(store_->Remove(Stored(prompt)));
  ExpectGone(prompt, GoneReason::kRemoved, 5000 / 16 * 16);
  const MatchExplanation part = Why(Prompt(1, 2500));
  ASSERT_TRUE(part.gone.has_value());
  EXPECT_GT(part.gone_tokens, 2500u - 5000u / kGoneBlocks - 32u);
  EXPECT_LE(part.gone_tokens, 2500u);
}

TEST_F(ExplainTest, ExpiredBeforeAndAfterTheSweep) {
  const Tokens prompt = Prompt(1);
  const SegmentId id = Stored(prompt);
  ASSERT_OK(store_->SetLifetime(id, {{}, kPast}));
  const MatchExplanation why = Why(prompt);
  ASSERT_EQ(why.unusable.size(), 1u);
  EXPECT_EQ(why.unusable[0].id, id);
  EXPECT_EQ(why.unusable[0].quarantine, "");
  EXPECT_EQ(why.unusable[0].expires_unix_ms, kPast);
  EXPECT_EQ(why.unusable[0].n_tokens, 192u);
  ASSERT_OK(store_->Maintain());
  EXPECT_TRUE(Why(prompt).unusable.empty());
  ExpectGone(prompt, GoneReason::kExpired, 192);
}

TEST_F(ExplainTest, QuarantinedAndThenEvicted) {
  const Tokens prompt = Prompt(1);
  const SegmentId id = Stored(prompt);
  const uint64_t bytes = store_->GetPrefix(id)->own_bytes;
  store_.reset();
  FlipByte(FileOf(id), 4096 * 2 + 100);
  Open();
  EXPECT_FALSE(store_->Verify(nullptr, nullptr)->damaged.empty());
  const MatchExplanation why = Why(prompt);
  ASSERT_EQ(why.unusable.size(), 1u);
  EXPECT_NE(why.unusable[0].quarantine, "");
  options_.quota_bytes = bytes + bytes / 2;
  Open();
  Stored(Prompt(2));
  ExpectGone(prompt, GoneReason::kDamaged, 192);
  EXPECT_NE(Why(prompt).gone->why, "");
}

TEST_F(ExplainTest, EvictedForTheStoreAndForTheTenant) {
  const SegmentId id = Stored(Prompt(1));
  const uint64_t bytes = store_->GetPrefix(id)->own_bytes;
  options_.quota_bytes = bytes + bytes / 2;
  Open();
  Stored(Prompt(2));
  ExpectGone(Prompt(1), GoneReason::kEvicted, 192);
  EXPECT_EQ(Why(Prompt(1)).gone->why, "to make room for a put");
  options_.quota_bytes = 0;
  options_.tenant_quota_bytes = bytes + bytes / 2;
  Open();
  Stored(Prompt(3));
  ExpectGone(Prompt(2), GoneReason::kEvictedQuota, 192);
}

TEST_F(ExplainTest, PutsThatFoundNoRoom) {
  options_.tenant_quota_bytes = 1 << 16;
  Open();
  const Tokens prompt = Prompt(1, 3000);
  for (int i = 0; i < 3; ++i) EXPECT_CODE(TryPut(prompt), Code::kResourceExhausted);
  ExpectGone(prompt, GoneReason::kRefused, 3000 / 16 * 16);
  EXPECT_NE(Why(prompt).gone->why.find("quota"), std::string::npos) << Why(prompt).gone->why;
}

TEST_F(ExplainTest, DerivedRowsNotAskedFor) {
  const Tokens prompt = Prompt(1), answered = Join(prompt, Prompt(2, 64));
  Stored(prompt);
  PutOptions derived;
  derived.derived = true;
  Stored(answered, derived);
  EXPECT_EQ(Why(answered).match.n_tokens, 200u);
  EXPECT_EQ(Why(answered).derived_tokens, 264u);
  EXPECT_EQ(Why(prompt).derived_tokens, 0u);
}

TEST_F(ExplainTest, RemovedModels) {
  EXPECT_FALSE(store_->ModelRemovedAt(model_.name)->has_value());
  ASSERT_OK(store_->RemoveModel(model_.name));
  EXPECT_TRUE(store_->ModelRemovedAt(model_.name)->has_value());
  EXPECT_FALSE(store_->ModelRemovedAt("another")->has_value());
}

TEST(GoneHistory, IsBoundedInAllAndByTenant) {
  TempDir dir;
  BlockHash first{};
  const auto record = [](const std::string& tenant, uint32_t n) {
    GoneRecord r;
    r.tenant = tenant;
    r.tokens = {0, 16};
    r.unix_ms = n;
    BlockHash block{};
    std::memcpy(block.data(), &n, sizeof(n));
    r.blocks = {block};
    return r;
  };
  const auto meta = CatalogMeta{kStoreFormatVersion, 16, {}};
  {
    const auto catalog = Catalog::Open(dir.path() / "catalog", meta);
    ASSERT_OK(catalog);
    ASSERT_OK((*catalog)->NoteGone(record("quiet", 1'000'000)));
    for (uint32_t n = 0; n < kMaxGoneOfTenant + 10; ++n) {
      ASSERT_OK((*catalog)->NoteGone(record("loud", n)));
    }
  }
  const auto catalog = Catalog::Open(dir.path() / "catalog", meta);
  ASSERT_OK(catalog);
  const auto has = [&](const std::string& tenant, uint32_t n) {
    const auto found = (*catalog)->FindGone(tenant, record(tenant, n).blocks[0]);
    EXPECT_TRUE(found.ok());
    return found.ok() && found->has_value() && **found == record(tenant, n);
  };
  EXPECT_TRUE(has("quiet", 1'000'000));
  EXPECT_FALSE(has("loud", 9));
  EXPECT_TRUE(has("loud", 10));
  EXPECT_TRUE(has("loud", kMaxGoneOfTenant + 9));
  EXPECT_FALSE(has("quiet", 10));
  ASSERT_OK((*catalog)->NoteGone(record("loud", 5'000'000)));
  EXPECT_FALSE(has("loud", 10));
  EXPECT_TRUE(has("loud", 11));
  for (size_t n = 0; n < kMaxGone / kMaxGoneOfTenant; ++n) {
    for (uint32_t i = 0; i < kMaxGoneOfTenant; ++i) {
      ASSERT_OK((*catalog)->NoteGone(record("t" + std::to_string(n), i)));
    }
  }
  EXPECT_FALSE(has("quiet", 1'000'000));  // the oldest gave way
  EXPECT_FALSE((*catalog)->FindGone("quiet", first)->has_value());
}

}  // namespace
}  // namespace prefixd::storage
