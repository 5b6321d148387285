// Tests a catalog whose records contradict one another or the files, and commits and removals that
// fail in the catalog: which segments that costs, and which it must not.
#include <algorithm>
#include <functional>

#include "storage/core/store_core.h"
#include "storage/segment/unix_time.h"
#include "storage/store/open_store.h"
#include "storage/store/store_put.h"
#include "tests/storage/failing_catalog.h"
#include "tests/storage/io/faulty_engine.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

std::vector<uint32_t> Prompt(uint32_t n, uint32_t from) {
  std::vector<uint32_t> out(n);
  for (uint32_t i = 0; i < n; ++i) out[i] = from + i;
  return out;
}

class RelationsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    options_ = TestOptions(dir_.path(), IoBackend::kThreads);
    Open();
    ASSERT_OK(store_->PutModel(model_));
    // The tree is root <- child <- grandchild, and an unrelated segment.
    tokens_ = Prompt(300, 0);
    const auto put = [&](std::span<const uint32_t> tokens) {
      const auto id = Put(*store_, model_, tokens);
      EXPECT_TRUE(id.ok());
      return id.ok() ? *id : SegmentId{};
    };
    root_ = put(std::span(tokens_).first(100));
    child_ = put(std::span(tokens_).first(200));
    grandchild_ = put(tokens_);
    other_tokens_ = Prompt(80, 7000);
    other_ = put(other_tokens_);
  }

  void Open() {
    store_.reset();
    auto opened = PrefixStore::Open(options_);
    ASSERT_OK(opened);
    store_ = std::move(*opened);
  }

  // Changes the stored record of `id` without the store's knowledge.
  void Change(const SegmentId& id, const std::function<void(SegmentRecord&)>& change) {
    store_.reset();
    auto catalog = Catalog::Open(options_.dir / "catalog", {kStoreFormatVersion, 0, {}});
    ASSERT_OK(catalog);
    const auto segments = (*catalog)->LoadSegments();
    ASSERT_OK(segments);
    for (const CatalogSegment& segment : *segments) {
      if (segment.record.id != id) continue;
      SegmentRecord record = segment.record;
      change(record);
      CatalogChange stored;
      stored.put.push_back({record, std::nullopt});
      ASSERT_OK((*catalog)->Apply(stored));
    }
  }

  void ChangeModel(const std::function<void(ModelRecord&)>& change) {
    store_.reset();
    auto catalog = Catalog::Open(options_.dir / "catalog", {kStoreFormatVersion, 0, {}});
    ASSERT_OK(catalog);
    ModelRecord model = model_;
    change(model);
    ASSERT_OK((*catalog)->PutModel(model));
  }

  // Checks that these are lost, with `sentence`, and that everything else is served as before, also
  // after a second open; a verification does not bring them back.
  void ExpectLost(const std::vector<SegmentId>& lost, const std::string& sentence) {
    for (int round = 0; round < 2; ++round) {
      Open();
      Check(lost, sentence);
      const auto report = store_->Verify(nullptr, {});
      ASSERT_OK(report);
      EXPECT_GE(report->damaged.size(), 1u);
      Check(lost, sentence);
    }
  }

  void Check(const std::vector<SegmentId>& lost, const std::string& sentence) {
    const std::pair<SegmentId, std::span<const uint32_t>> all[] = {
        {root_, std::span(tokens_).first(100)},
        {child_, std::span(tokens_).first(200)},
        {grandchild_, tokens_},
        {other_, other_tokens_}};
    uint32_t matched = 0;
    for (const auto& [id, tokens] : all) {
      const bool is_lost = std::find(lost.begin(), lost.end(), id) != lost.end();
      const auto info = store_->GetPrefix(id);
      ASSERT_OK(info);
      EXPECT_EQ(info->quarantined, is_lost) << id.ToString();
      EXPECT_TRUE(std::filesystem::exists(SegmentPath(options_.dir, id.bytes)));
      const auto prefix = store_->OpenPrefix(id, 0);
      if (is_lost) {
        EXPECT_CODE(prefix, Code::kCorrupt);
        if (id == lost.front() && !prefix.ok()) {
          EXPECT_NE(prefix.error().message.find(sentence), std::string::npos)
              << prefix.error().message;
        }
        continue;
      }
      ASSERT_OK(prefix);
      const auto difference = Compare(**prefix, tokens);
      ASSERT_OK(difference);
      EXPECT_EQ(*difference, "");
      if (id != other_) matched = std::max(matched, info->n_tokens);
    }
    const auto match = store_->LongestMatch("m", "t", tokens_);
    ASSERT_OK(match);
    EXPECT_EQ(match->n_tokens, matched);
  }

  TempDir dir_;
  StoreOptions options_;
  ModelRecord model_ = TestModel();
  std::unique_ptr<PrefixStore> store_;
  std::vector<uint32_t> tokens_, other_tokens_;
  SegmentId root_, child_, grandchild_, other_;
};

TEST_F(RelationsTest, AMissingParentCostsWhatHangsBelow) {
  Change(child_, [](SegmentRecord& r) { r.parent.bytes.fill(0xab); });
  ExpectLost({child_, grandchild_}, "is not stored");
}

TEST_F(RelationsTest, ASegmentBeyondItsParentsEnd) {
  Change(child_, [](SegmentRecord& r) { r.tokens.begin = 101; });
  ExpectLost({child_, grandchild_}, "begins at token 101");
}

TEST_F(RelationsTest, ASegmentBeforeItsParentsBegin) {
  Change(grandchild_, [](SegmentRecord& r) { r.tokens.begin = 99; });
  ExpectLost({grandchild_}, "begins at token 99");
}

TEST_F(RelationsTest, AParentOfAnotherTenant) {
  Change(child_, [](SegmentRecord& r) { r.tenant = "somebody else"; });
  ExpectLost({child_, grandchild_}, "is of another model or tenant");
}

TEST_F(RelationsTest, ChainsThatRunInCircles) {
  Change(child_, [this](SegmentRecord& r) { r.parent = grandchild_; });
  ExpectLost({child_, grandchild_}, "it begins at token 100");
  Change(other_, [this](SegmentRecord& r) {
    r.parent = r.id;
    r.tokens.begin = 1;
    r.lead.clear();
  });
  ExpectLost({other_, child_, grandchild_}, "it begins at token 1,");
}

TEST_F(RelationsTest, AnUnknownModel) {
  Change(other_, [](SegmentRecord& r) { r.model = "forgotten"; });
  ExpectLost({other_}, "does not know its model 'forgotten'");
}

TEST_F(RelationsTest, ARecordThatDoesNotDecode) {
  Change(other_, [](SegmentRecord& r) { r.tokens.end = r.tokens.begin; });
  ExpectLost({other_}, "its catalog record is damaged");
  // The segment can still be removed, like any other.
  ASSERT_OK(store_->Remove(other_));
  EXPECT_FALSE(std::filesystem::exists(SegmentPath(options_.dir, other_.bytes)));
}

TEST_F(RelationsTest, AModelOfAnotherGeometry) {
  ChangeModel([](ModelRecord& m) { m.geometry.value_dim += 1; });
  Open();
  for (const SegmentId& id : {root_, other_}) {
    const auto opened = store_->OpenPrefix(id, 0);
    ASSERT_FALSE(opened.ok());
    EXPECT_EQ(opened.error().code, Code::kCorrupt);
    EXPECT_NE(opened.error().message.find("not of the model 'm'"), std::string::npos)
        << opened.error().message;
  }
  ChangeModel([](ModelRecord&) {});
  Open();
  ASSERT_OK(store_->Verify(nullptr, {}));  // right again: released
  EXPECT_TRUE(store_->OpenPrefix(grandchild_, 0).ok());
}

TEST_F(RelationsTest, AModelOfAnotherFingerprint) {
  ChangeModel([](ModelRecord& m) { m.fingerprint.bytes[0] ^= 1; });
  Open();
  EXPECT_CODE(store_->OpenPrefix(root_, 0), Code::kCorrupt);
  const auto match = store_->LongestMatch("m", "t", tokens_);
  ASSERT_OK(match);
  EXPECT_EQ(match->n_tokens, 0u);
}

TEST_F(RelationsTest, AFailedRemovalChangesNothing) {
  store_.reset();
  FailingCatalog* catalog = nullptr;
  auto core = OpenStoreCore(options_, nullptr, Failing(&catalog));
  ASSERT_OK(core);
  // Its ancestor is quarantined; the segment itself is sound and must stay so.
  (*core)->segments->Quarantine(root_, "a test");
  catalog->fail_remove = true;
  EXPECT_CODE((*core)->names->Remove(grandchild_), Code::kIo);
  EXPECT_CODE((*core)->names->Remove(other_), Code::kIo);
  EXPECT_TRUE((*core)->tree.Usable(other_, NowUnixMs()));
  EXPECT_FALSE((*core)->tree.Usable(grandchild_, NowUnixMs()));
  (*core)->segments->LiftQuarantine(root_);
  EXPECT_TRUE((*core)->tree.Usable(grandchild_, NowUnixMs()));
  // A segment that was quarantined for a reason of its own still is, for the same reason.
  (*core)->segments->Quarantine(grandchild_, "its own fault");
  EXPECT_CODE((*core)->names->Remove(grandchild_), Code::kIo);
  const auto pin = (*core)->tree.Pin(grandchild_);
  ASSERT_FALSE(pin.ok());
  EXPECT_NE(pin.error().message.find("its own fault"), std::string::npos) << pin.error().message;
  catalog->fail_remove = false;
  ASSERT_OK((*core)->names->Remove(grandchild_));
  ASSERT_OK((*core)->names->Remove(other_));
}

TEST_F(RelationsTest, ACommitOfUnknownOutcomeStillCountsAgainstTheQuota) {
  const uint64_t stored = store_->stats().bytes_on_disk;
  const auto tokens = Prompt(400, 20000);
  const uint64_t before = store_->stats().bytes_on_disk;
  const auto measured = Put(*store_, model_, tokens);
  ASSERT_OK(measured);
  const uint64_t bytes = store_->stats().bytes_on_disk - before;
  ASSERT_OK(store_->Remove(*measured));
  store_.reset();

  options_.quota_bytes = stored + bytes + bytes / 2;  // room for one, not for two
  options_.eviction = Eviction::kNever;
  {
    FailingCatalog* catalog = nullptr;
    auto core = OpenStoreCore(options_, nullptr, Failing(&catalog));
    ASSERT_OK(core);
    catalog->fail_commit = true;
    {
      auto writer = BeginPut(*core, "m", "t", tokens, "", {});
      ASSERT_OK(writer);
      ASSERT_OK(WriteAll(**writer, model_.geometry, tokens, 50, true));
      EXPECT_CODE((*writer)->Commit(), Code::kIo);
    }
    EXPECT_EQ(FilesIn(options_.dir / "segments"), 5u);  // its outcome is unknown: the file stays
    EXPECT_CODE(BeginPut(*core, "m", "t", Prompt(400, 30000), "", {}), Code::kResourceExhausted);
  }
  Open();  // it was sealed and is whole, so it is committed now
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 5u);
  EXPECT_EQ(store_->LongestMatch("m", "t", tokens)->n_tokens, tokens.size());
}

TEST_F(RelationsTest, ACommitThatIsRefusedBeforehandLeavesNothing) {
  store_.reset();
  FailingCatalog* catalog = nullptr;
  auto core = OpenStoreCore(options_, nullptr, Failing(&catalog));
  ASSERT_OK(core);
  const auto tokens = Prompt(400, 20000);
  auto writer = BeginPut(*core, "m", "t", tokens, "", {});
  ASSERT_OK(writer);
  ASSERT_OK(WriteAll(**writer, model_.geometry, tokens, 50, true));
  catalog->refuse = true;
  EXPECT_CODE((*writer)->Commit(), Code::kResourceExhausted);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 4u);
  for (const TenantUsage& tenant : (*core)->room->Tenants()) EXPECT_EQ(tenant.reserved_bytes, 0u);
  catalog->refuse = false;
  writer->reset();
  auto again = BeginPut(*core, "m", "t", tokens, "", {});
  ASSERT_OK(again);
  ASSERT_OK(WriteAll(**again, model_.geometry, tokens, 50, true));
  ASSERT_OK((*again)->Commit());
}

TEST_F(RelationsTest, APutBehindWhatIsDamagedMeanwhileIsRefused) {
  store_.reset();
  auto core = OpenStoreCore(options_);
  ASSERT_OK(core);
  auto tokens = tokens_;
  tokens.resize(400, 12345);
  const auto put = [&]() -> Result<SegmentId> {
    PREFIXD_ASSIGN(auto writer, BeginPut(*core, "m", "t", tokens, "", {}));
    PREFIXD_TRY(WriteAll(*writer, model_.geometry, tokens, 50, true));
    (*core)->segments->Quarantine(child_, "a test");
    return writer->Commit();
  };
  EXPECT_CODE(put(), Code::kCorrupt);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 4u);
  ASSERT_OK(put());  // it continues what is sound
}

TEST_F(RelationsTest, WhatCannotBeEvictedStandsInNobodysWay) {
  const uint64_t stored = store_->stats().bytes_on_disk;
  store_.reset();
  options_.quota_bytes = stored + stored / 8;
  FailingCatalog* catalog = nullptr;
  auto core = OpenStoreCore(options_, nullptr, Failing(&catalog));
  ASSERT_OK(core);
  (*core)->segments->Touch(grandchild_);
  catalog->cannot_remove = other_;  // the first to go
  ASSERT_OK(BeginPut(*core, "m", "t", Prompt(60, 40000), "", {}));
  EXPECT_TRUE((*core)->tree.Record(other_).ok());
  EXPECT_FALSE((*core)->tree.Record(grandchild_).ok());
  const auto refused = BeginPut(*core, "m", "t", Prompt(2000, 50000), "", {});
  EXPECT_CODE(refused, Code::kResourceExhausted);
  // A catalog that takes no removals at all is another matter.
  catalog->fail_remove = true;
  EXPECT_CODE(BeginPut(*core, "m", "t", Prompt(300, 50000), "", {}), Code::kIo);
}

TEST_F(RelationsTest, AHostTierBeyondMemoryIsRefused) {
  store_.reset();
  StoreOptions options = options_;
  options.host_tier_bytes = uint64_t{1} << 60;
  const auto opened = PrefixStore::Open(options);
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().code, Code::kInvalidArgument);
  EXPECT_NE(opened.error().message.find("make it smaller"), std::string::npos)
      << opened.error().message;
}

class ShortMatchTest : public ::testing::Test {
 protected:
  void Open() {
    store_.reset();
    auto opened = OpenStoreWithEngine(options_, [&](std::unique_ptr<IoEngine> inner) {
      return std::make_unique<FaultyEngine>(std::move(inner), plan_);
    });
    ASSERT_OK(opened);
    store_ = std::move(*opened);
    ASSERT_OK(store_->PutModel(model_));
  }

  TempDir dir_;
  StoreOptions options_ = TestOptions(dir_.path(), IoBackend::kThreads);
  ModelRecord model_ = TestModel("m", TestGeometry(1, 1, 4));
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  std::unique_ptr<PrefixStore> store_;
};

TEST_F(ShortMatchTest, ThousandsOfPromptsThatShareBosCostOneOpen) {
  Open();
  constexpr uint32_t kPrompts = 100;
  for (uint32_t i = 0; i < kPrompts; ++i) {
    std::vector<uint32_t> tokens = Prompt(20, 1000 + 100 * i);
    tokens[0] = 1;
    ASSERT_OK(Put(*store_, model_, tokens));
  }
  const std::vector<std::vector<uint32_t>> prompts = {
      {1}, {1, 2, 3}, {1, 1000 + 100 * 70 + 1, 5}, {1, 1000 + 100 * 70 + 1, 7000 + 1002, 6}};
  const uint32_t expected[] = {1, 1, 2, 3};
  for (size_t i = 0; i < prompts.size(); ++i) {
    Open();
    plan_->counted = 0;
    const auto match = store_->LongestMatch("m", "t", prompts[i]);
    ASSERT_OK(match);
    EXPECT_EQ(match->n_tokens, expected[i]);
    EXPECT_LE(plan_->counted.load(), 8u);  // one open: header, footer, table, token ids
  }
  // When the best match is damaged, the next best is used.
  const auto best = store_->LongestMatch("m", "t", prompts[2]);
  ASSERT_OK(best);
  Open();
  const auto path = SegmentPath(options_.dir, best->id.bytes);
  FlipByte(path, std::filesystem::file_size(path) - 4 * kPageBytes + 8);  // its token ids
  const auto next = store_->LongestMatch("m", "t", prompts[2]);
  ASSERT_OK(next);
  EXPECT_EQ(next->n_tokens, 1u);
}

TEST_F(ShortMatchTest, FindsWhatAComparisonOfAllFinds) {
  std::mt19937_64 rng(Seed("ShortMatchTest.FindsWhatAComparisonOfAllFinds"));
  Open();
  std::vector<std::vector<uint32_t>> stored;
  const auto expect_best = [&](const std::vector<uint32_t>& prompt) {
    uint32_t best = 0;
    for (const auto& tokens : stored) {
      const size_t n = std::min(tokens.size(), prompt.size());
      const auto at =
          std::mismatch(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(n), tokens.begin());
      best = std::max(best, static_cast<uint32_t>(at.first - prompt.begin()));
    }
    const auto match = store_->LongestMatch("m", "t", prompt);
    ASSERT_OK(match);
    EXPECT_EQ(match->n_tokens, best);
  };
  for (int i = 0; i < 100; ++i) {
    // Prompts have lengths around the block of 16, over two ids: much is shared, much branches
    // early.
    auto tokens = RandomTokens(rng, 1 + rng() % 40, 2);
    std::fill(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(rng() % tokens.size()), 0);
    ASSERT_OK(Put(*store_, model_, tokens));
    stored.push_back(tokens);
    if (i % 25 == 24) Open();
    for (int k = 0; k < 5; ++k) {
      auto prompt = RandomTokens(rng, 1 + rng() % 24, 2);
      std::fill(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(rng() % prompt.size()), 0);
      expect_best(prompt);
    }
  }
}

}  // namespace
}  // namespace prefixd::storage
