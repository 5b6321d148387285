// Tests a store's limits as its users see them: quotas, eviction, lifetime.
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <map>
#include <numeric>
#include <thread>

#include "storage/catalog/store_dir.h"
#include "storage/io/file.h"
#include "storage/segment/segment_format.h"
#include "tests/storage/open_store.h"
#include "tests/storage/prompts.h"

namespace prefixd::storage {
namespace {

constexpr int64_t kPast = 1;  // Unix ms: a name that expires then has expired
constexpr int64_t kFuture = 1ll << 52;

class LimitsTest : public OpenStoreTest {
 protected:
  LimitsTest() { Open(); }

  SegmentId Stored(const Tokens& tokens, const std::string& tenant = "t",
                   const PutOptions& options = {}) {
    const auto id = TryPut(tokens, tenant, options);
    EXPECT_TRUE(id.ok()) << id.error().ToString();
    return id.ok() ? *id : SegmentId{};
  }
  Result<SegmentId> TryPut(const Tokens& tokens, const std::string& tenant = "t",
                           const PutOptions& options = {}) {
    PREFIXD_ASSIGN(auto writer, store_->BeginPut(model_.name, tenant, tokens, "", options));
    PREFIXD_TRY(WriteAll(*writer, model_.geometry, tokens, 64, true));
    return writer->Commit();
  }
  uint32_t Matched(const Tokens& tokens, const std::string& tenant = "t") {
    const auto match = store_->LongestMatch(model_.name, tenant, tokens);
    EXPECT_TRUE(match.ok());
    return match.ok() ? match->n_tokens : 0;
  }
  bool There(const Tokens& tokens, const std::string& tenant = "t") {
    return Matched(tokens, tenant) == tokens.size();
  }
  void Use(const SegmentId& id, int times) {
    for (int i = 0; i < times; ++i) store_->NoteUse(id);
  }
  // Returns the physical bytes of one prompt of 200 tokens.
  uint64_t PromptBytes() {
    const SegmentId id = Stored(Prompt(999));
    const uint64_t bytes = store_->GetPrefix(id)->own_bytes;
    EXPECT_TRUE(store_->Remove(id).ok());
    return bytes;
  }

  // Returns the bytes in segments/, by tenant: every file names its tenant, or a segment that does.
  std::map<std::string, uint64_t> OnDisk() {
    std::map<std::string, uint64_t> out;
    for (const auto& entry : std::filesystem::directory_iterator(options_.dir / "segments")) {
      const auto name = ParseSegmentsEntry(entry.path().filename().string());
      EXPECT_TRUE(name.has_value()) << entry.path();
      if (!name) continue;
      SegmentId id{name->id};
      if (name->blob.empty()) {
        std::vector<std::byte> page(kPageBytes);
        std::ifstream(entry.path()).read(reinterpret_cast<char*>(page.data()), kPageBytes);
        const auto header = SegmentHeader::Decode(ConstPageBytes(page.data(), kPageBytes));
        EXPECT_TRUE(header.ok());
        id.bytes = header->segment;
      }
      const auto info = store_->GetPrefix(id);
      EXPECT_TRUE(info.ok()) << entry.path() << " belongs to nobody";
      if (info.ok()) out[info->tenant] += entry.file_size();
    }
    return out;
  }
  void ExpectAccountIsTrue() {
    const auto files = OnDisk();
    uint64_t total = 0;
    std::map<std::string, uint64_t> counted;
    for (const TenantUsage& t : store_->stats().tenants) {
      EXPECT_EQ(t.reserved_bytes, 0u) << t.tenant;
      if (t.bytes > 0) counted[t.tenant] = t.bytes;
      total += t.bytes;
    }
    EXPECT_EQ(counted, files);
    EXPECT_EQ(store_->stats().bytes_on_disk, total);
  }
};

TEST_F(LimitsTest, ATenantsQuotaIsItsOwnAndSaysSo) {
  const uint64_t one = PromptBytes();
  options_.eviction = Eviction::kNever;
  options_.tenant_quota_bytes = one + 100;
  options_.tenant_quotas = {{"rich", 3 * one}, {"free", 0}};
  Open();
  Stored(Prompt(1), "poor");
  const auto refused = TryPut(Prompt(2), "poor");
  EXPECT_CODE(refused, Code::kResourceExhausted);
  for (const std::string& part : {std::string("tenant 'poor'"), std::to_string(one + 100),
                                  std::to_string(one) + " are taken", std::string("remove")}) {
    EXPECT_NE(refused.error().message.find(part), std::string::npos) << refused.error().message;
  }
  for (uint32_t i = 1; i <= 3; ++i) Stored(Prompt(i), "rich");
  EXPECT_CODE(TryPut(Prompt(4), "rich"), Code::kResourceExhausted);
  for (uint32_t i = 1; i <= 5; ++i) Stored(Prompt(i), "free");
  EXPECT_EQ(store_->stats().evictions, 0u);
  ExpectAccountIsTrue();
}

TEST_F(LimitsTest, UnfinishedPutsCountForTheirTenant) {
  const uint64_t one = PromptBytes();
  options_.tenant_quota_bytes = 2 * one;
  Open();
  auto first = store_->BeginPut("m", "a", Prompt(1), "");
  auto second = store_->BeginPut("m", "a", Prompt(2), "");
  ASSERT_OK(first);
  ASSERT_OK(second);
  EXPECT_CODE(store_->BeginPut("m", "a", Prompt(3), ""), Code::kResourceExhausted);
  EXPECT_TRUE(store_->BeginPut("m", "b", Prompt(3), "").ok());
  first->reset();
  EXPECT_TRUE(store_->BeginPut("m", "a", Prompt(3), "").ok());
}

TEST_F(LimitsTest, WhatIsUsedStaysAndTheLowestScoreGoes) {
  const uint64_t one = PromptBytes();
  options_.quota_bytes = 3 * one;
  Open();
  const SegmentId a = Stored(Prompt(1)), b = Stored(Prompt(2)), c = Stored(Prompt(3));
  Use(a, 3);
  Use(c, 1);
  Stored(Prompt(4));
  EXPECT_FALSE(There(Prompt(2)));
  EXPECT_TRUE(There(Prompt(1)) && There(Prompt(3)) && There(Prompt(4)));
  EXPECT_CODE(store_->GetPrefix(b), Code::kNotFound);
  const auto stats = store_->stats();
  EXPECT_EQ(stats.evictions, 1u);
  EXPECT_EQ(stats.evicted_bytes, one);
  ExpectPrefix(a, Prompt(1));
  ExpectAccountIsTrue();
}

TEST_F(LimitsTest, PinnedOpenAndContinuedPrefixesAreNeverEvicted) {
  const uint64_t one = PromptBytes();
  const SegmentId pinned = Stored(Prompt(1), "t", {true, 0});
  const SegmentId open = Stored(Prompt(2));
  const SegmentId root = Stored(Prompt(3));
  Tokens longer = Prompt(3);
  for (const uint32_t t : Prompt(4)) longer.push_back(t);
  const SegmentId leaf = Stored(longer);
  Use(leaf, 1);
  options_.quota_bytes = store_->stats().bytes_on_disk;
  Open();
  auto reader = store_->OpenPrefix(open, 0);
  ASSERT_OK(reader);
  Stored(Prompt(5));
  EXPECT_TRUE(There(Prompt(1)) && There(Prompt(2)) && There(Prompt(3)));
  EXPECT_FALSE(There(longer));  // the only leaf that may go
  Use(root, 5);
  Stored(Prompt(6));
  EXPECT_FALSE(There(Prompt(5)));
  // Everything that may go is too little: nothing goes.
  const uint64_t before = store_->stats().evictions;
  EXPECT_CODE(TryPut(Prompt(7, 1000)), Code::kResourceExhausted);
  EXPECT_EQ(store_->stats().evictions, before);
  EXPECT_TRUE(There(Prompt(3)) && There(Prompt(6)));
  ASSERT_OK(store_->SetLifetime(pinned, {false, {}}));
  reader->reset();
  options_.quota_bytes = one;
  Open();
  Stored(Prompt(8));
  EXPECT_EQ(store_->ListPrefixes().size(), 1u);
  ExpectAccountIsTrue();
}

TEST_F(LimitsTest, ATenantOverItsQuotaEvictsOnlyItsOwn) {
  const uint64_t one = PromptBytes();
  options_.tenant_quota_bytes = 2 * one;
  Open();
  Stored(Prompt(1), "a");
  Use(Stored(Prompt(2), "b"), 9);
  Use(Stored(Prompt(3), "b"), 8);
  Stored(Prompt(4), "b");
  EXPECT_TRUE(There(Prompt(1), "a"));
  EXPECT_TRUE(There(Prompt(2), "b") && There(Prompt(4), "b"));
  EXPECT_FALSE(There(Prompt(3), "b"));
  for (const TenantUsage& t : store_->stats().tenants) {
    EXPECT_EQ(t.evictions, t.tenant == "b" ? 1u : 0u);
    EXPECT_EQ(t.quota_bytes, 2 * one);
  }
}

TEST_F(LimitsTest, AnExpiredPrefixIsNoMatchAtOnceAndGoesWithTheSweep) {
  const SegmentId id = Stored(Prompt(1), "t", {false, 1'000'000});
  EXPECT_GT(store_->GetPrefix(id)->expires_unix_ms, 0);
  ASSERT_OK(store_->SetLifetime(id, {{}, kFuture}));
  EXPECT_EQ(store_->GetPrefix(id)->expires_unix_ms, kFuture);
  EXPECT_TRUE(There(Prompt(1)));
  auto reader = store_->OpenPrefix(id, 0);
  ASSERT_OK(reader);

  ASSERT_OK(store_->SetLifetime(id, {{}, kPast}));
  EXPECT_EQ(Matched(Prompt(1)), 0u);
  EXPECT_TRUE(store_->ListPrefixes().empty());
  EXPECT_CODE(store_->OpenPrefix(id, 0), Code::kNotFound);
  EXPECT_CODE(store_->SetLifetime(id, {{}, kFuture}), Code::kNotFound);
  ASSERT_OK(store_->Maintain());  // it is open: the read goes on
  const auto difference = Compare(**reader, Prompt(1));
  ASSERT_OK(difference);
  EXPECT_EQ(*difference, "");
  reader->reset();
  ASSERT_OK(store_->Maintain());
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 0u);
  EXPECT_EQ(store_->stats().expired, 1u);
  // The same prompt may come back.
  EXPECT_TRUE(There(Prompt(1)) || Stored(Prompt(1)) != id);
  EXPECT_TRUE(There(Prompt(1)));
}

TEST_F(LimitsTest, ExpiringNeverTakesTokensThatOthersContinue) {
  const SegmentId root = Stored(Prompt(1));
  Tokens longer = Prompt(1);
  for (const uint32_t t : Prompt(2)) longer.push_back(t);
  const SegmentId leaf = Stored(longer);
  ASSERT_OK(store_->SetLifetime(root, {{}, kPast}));
  EXPECT_EQ(store_->ListPrefixes().size(), 1u);
  EXPECT_TRUE(There(longer));
  ASSERT_OK(store_->Maintain());
  ExpectPrefix(leaf, longer);
  // Another put makes it a prefix again, under the new terms.
  EXPECT_EQ(Stored(Prompt(1), "t", {true, 0}), root);
  EXPECT_EQ(store_->ListPrefixes().size(), 2u);
  EXPECT_TRUE(store_->GetPrefix(root)->pinned);
  EXPECT_EQ(store_->GetPrefix(root)->expires_unix_ms, 0);
  ASSERT_OK(store_->Remove(root));
  ASSERT_OK(store_->SetLifetime(leaf, {{}, kPast}));
  EXPECT_EQ(Matched(longer), 0u);  // no name needs any of it now
  Open();                          // the opening store frees it
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 0u);
}

TEST_F(LimitsTest, PuttingAgainNeverShortens) {
  const SegmentId id = Stored(Prompt(1), "t", {true, 1'000'000'000});
  const int64_t until = store_->GetPrefix(id)->expires_unix_ms;
  EXPECT_EQ(Stored(Prompt(1), "t", {false, 1000}), id);
  EXPECT_TRUE(store_->GetPrefix(id)->pinned);
  EXPECT_EQ(store_->GetPrefix(id)->expires_unix_ms, until);
  Stored(Prompt(1));
  EXPECT_EQ(store_->GetPrefix(id)->expires_unix_ms, 0);
  EXPECT_CODE(TryPut(Prompt(1), "t", {false, ~0ull}), Code::kInvalidArgument);
  Open();
  EXPECT_TRUE(store_->GetPrefix(id)->pinned);
}

TEST_F(LimitsTest, NamesOfACompactedSegmentKeepTheirOwnTerms) {
  const SegmentId first = Stored(Prompt(1), "t", {true, 0});
  Tokens longer = Prompt(1);
  for (const uint32_t t : Prompt(2)) longer.push_back(t);
  const SegmentId second = Stored(longer, "t", {false, 1'000'000'000});
  const auto compacted = store_->Compact(second, 1000);
  ASSERT_OK(compacted);
  const auto expect_terms = [&] {
    EXPECT_TRUE(store_->GetPrefix(first)->pinned);
    EXPECT_EQ(store_->GetPrefix(first)->expires_unix_ms, 0);
    EXPECT_FALSE(store_->GetPrefix(second)->pinned);
    EXPECT_GT(store_->GetPrefix(second)->expires_unix_ms, 0);
  };
  expect_terms();
  Open();
  expect_terms();
  // One name is pinned: the segment stays.
  options_.quota_bytes = store_->stats().bytes_on_disk;
  Open();
  EXPECT_CODE(TryPut(Prompt(3)), Code::kResourceExhausted);
  ASSERT_OK(store_->SetLifetime(second, {{}, kPast}));
  ASSERT_OK(store_->Maintain());
  EXPECT_CODE(store_->GetPrefix(second), Code::kNotFound);
  ExpectPrefix(first, Prompt(1));
  // Without the pin it goes with its name.
  ASSERT_OK(store_->SetLifetime(first, {false, {}}));
  Stored(Prompt(3));
  EXPECT_CODE(store_->GetPrefix(first), Code::kNotFound);
  Open();
  EXPECT_EQ(store_->ListPrefixes().size(), 1u);
  ExpectAccountIsTrue();
}

TEST_F(LimitsTest, TheSweepKeepsHeadroomForPutsThatCame) {
  const uint64_t one = PromptBytes();
  options_.quota_bytes = 32 * one;
  Open();
  for (uint32_t i = 1; i <= 32; ++i) Stored(Prompt(i));
  EXPECT_EQ(store_->stats().evictions, 0u);
  ASSERT_OK(store_->Maintain());
  EXPECT_EQ(store_->stats().evictions, 1u);
  ASSERT_OK(store_->Maintain());
  EXPECT_EQ(store_->stats().evictions, 1u);
  options_.quota_bytes = 31 * one;  // full again, but no put follows
  Open();
  ASSERT_OK(store_->Maintain());
  EXPECT_EQ(store_->ListPrefixes().size(), 31u);
}

TEST_F(LimitsTest, TheSweepTakesNothingThatIsLargeBesideTheHeadroom) {
  const uint64_t one = PromptBytes();
  options_.quota_bytes = one + one / 100;  // above 31 parts of 32
  Open();
  Stored(Prompt(1));
  ASSERT_OK(store_->Maintain());
  EXPECT_TRUE(There(Prompt(1)));
  Stored(Prompt(2));  // a put makes what room it needs
  EXPECT_FALSE(There(Prompt(1)));
}

TEST_F(LimitsTest, TheSweepLeavesTenantsThatPutNothing) {
  const uint64_t one = PromptBytes();
  options_.tenant_quota_bytes = 32 * one;
  Open();
  for (uint32_t i = 1; i <= 32; ++i) Stored(Prompt(i), "idle");
  Open();
  for (uint32_t i = 1; i <= 32; ++i) Stored(Prompt(i), "busy");
  ASSERT_OK(store_->Maintain());
  for (const TenantUsage& tenant : store_->stats().tenants) {
    EXPECT_EQ(tenant.evictions, tenant.tenant == "busy" ? 1u : 0u) << tenant.tenant;
  }
}

TEST_F(LimitsTest, TheAccountEqualsTheFilesAfterRandomOperations) {
  std::mt19937_64 rng(Seed("LimitsTest.TheAccountEqualsTheFiles"));
  options_.quota_bytes = 20 * PromptBytes();
  options_.tenant_quotas["b"] = options_.quota_bytes / 4;
  Open();
  ReclusterOptions recluster;
  recluster.order = [](uint32_t, uint32_t, uint32_t, std::span<const std::byte> rows) {
    std::vector<uint32_t> order(rows.size() / TestGeometry().row(0).bytes());
    std::iota(order.begin(), order.end(), 0);
    return Result<std::vector<uint32_t>>(std::move(order));
  };
  uint64_t evictions = 0, expired = 0;
  for (int i = 0; i < 300; ++i) {
    const auto listed = store_->ListPrefixes();
    const SegmentId some = listed.empty() ? SegmentId{} : listed[rng() % listed.size()].id;
    switch (rng() % 9) {
      case 0:
        (void)store_->Remove(some);
        break;
      case 1:
        (void)store_->PutBlob(some, "b" + std::to_string(rng() % 3), "p",
                              std::vector<std::byte>(rng() % 9000));
        break;
      case 2:
        (void)store_->Recluster(some, recluster);
        break;
      case 3:
        (void)store_->Compact(some, 400);
        break;
      case 4:
        (void)store_->SetLifetime(some, {rng() % 4 == 0, rng() % 4 == 0 ? kPast : 0});
        break;
      case 5:
        ASSERT_OK(store_->Maintain());
        break;
      default:
        const auto put = TryPut(RandomTokens(rng, 1 + rng() % 300, 2), rng() % 3 == 0 ? "b" : "a");
        if (!put.ok()) {
          EXPECT_CODE(put, Code::kResourceExhausted);
        }
    }
    if (i % 100 == 99) {
      evictions += store_->stats().evictions;
      expired += store_->stats().expired;
      Open();
    }
    if (i % 10 == 9) ExpectAccountIsTrue();
    ASSERT_LE(store_->stats().bytes_on_disk, options_.quota_bytes);
  }
  EXPECT_GT(evictions, 0u);
  // Most of what expired above was evicted before a sweep came: this one is swept for certain.
  const auto last = TryPut(Prompt(1, 10), "b");
  if (last.ok()) {
    ASSERT_OK(store_->SetLifetime(*last, {false, kPast}));
    ASSERT_OK(store_->Maintain());
    expired += store_->stats().expired;
    EXPECT_GT(expired, 0u);
    ExpectAccountIsTrue();
  } else {
    EXPECT_CODE(last, Code::kResourceExhausted);  // everything that is left is pinned
  }
}

TEST_F(LimitsTest, ConcurrentPutsStayWithinTheQuota) {
  const uint64_t quota = options_.quota_bytes = 6 * PromptBytes() + 1000;
  Open();
  std::atomic<uint32_t> done{0}, wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t i = 0; i < 25; ++i) {
        const auto put = TryPut(Prompt(1 + t * 100 + i), t % 2 ? "a" : "b");
        put.ok() ? ++done : wrong += put.error().code != Code::kResourceExhausted;
        if (store_->stats().bytes_on_disk > quota) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(done, 100u);  // four unfinished puts and what they continue always fit
  ExpectAccountIsTrue();
}

}  // namespace
}  // namespace prefixd::storage
