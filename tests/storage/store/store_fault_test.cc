// Fails the N-th operation, for every N, once and for good. Then a put fails cleanly or a read
// gives an error; no wrong bytes are served, no acknowledged data is lost, and the store works on.
#include <new>

#include "storage/io/crash_point.h"
#include "storage/store/open_store.h"
#include "tests/storage/io/faulty_engine.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {
namespace {

// Between the catalog's write and the place in the tree nobody can say what the next start finds,
// so that the file must stay.
TEST_F(OpenStoreTest, ACommitThatFailsBehindTheCatalogKeepsItsFile) {
  Open();
  crash_point_hook = [](const char* name) {
    if (std::string_view(name) == "put.committed") throw std::bad_alloc();
  };
  const auto put = Put(*store_, model_, Iota(150));
  crash_point_hook = nullptr;
  EXPECT_CODE(put, Code::kResourceExhausted);
  Open();
  const auto match = store_->LongestMatch(model_.name, "t", Iota(150));
  ASSERT_OK(match);
  ASSERT_EQ(match->n_tokens, 150u);
  ExpectWhole(match->id, Iota(150));
}

struct Param {
  Fault fault;
  bool sticky;
  const char* name;
  IoBackend io = IoBackend::kAuto;
};

class FaultTest : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    options_ = TestOptions(dir_.path());
    options_.host_tier_bytes = 0;  // every read goes to the disk
    options_.io = GetParam().io;
    Open();
    if (!store_ && options_.io == IoBackend::kUring) GTEST_SKIP() << "io_uring does not work here";
    ASSERT_TRUE(store_);
    ASSERT_OK(store_->PutModel(model_));
  }

  void Open() {
    store_.reset();
    auto opened = OpenStoreWithEngine(options_, [this](std::unique_ptr<IoEngine> inner) {
      auto engine = std::make_unique<FaultyEngine>(std::move(inner), plan_);
      engine_ = engine.get();
      return engine;
    });
    if (!opened.ok() && opened.error().code == Code::kUnavailable) return;
    ASSERT_OK(opened);
    store_ = std::move(*opened);
  }

  // Acknowledged prompts are there and right, or (while faults last) reading them gives an error.
  void CheckAcknowledged(bool faults) {
    for (const auto& [id, tokens] : acknowledged_) {
      const auto prefix = store_->OpenPrefix(id, static_cast<uint32_t>(tokens.size()));
      if (!prefix.ok() && faults) continue;
      ASSERT_OK(prefix);
      const auto difference = Compare(**prefix, tokens);
      if (!difference.ok() && faults) continue;
      ASSERT_OK(difference);
      ASSERT_EQ(*difference, "");
    }
  }

  // The story is one put, one blob, one read, under faults.
  void Story(uint32_t n) {
    const std::vector<uint32_t> tokens = Iota(150, n * 1000);
    const auto id = Put(*store_, model_, tokens, "t", 40, n % 2 == 0);
    if (id.ok()) {
      acknowledged_[*id] = tokens;
      const std::vector<std::byte> blob(5000, std::byte(n));
      const bool stored = store_->PutBlob(*id, "b", "p", blob).ok();
      const auto back = store_->GetBlob(*id, "b", "p");
      if (back.ok()) {
        EXPECT_EQ(*back, blob);
      } else if (stored) {
        EXPECT_TRUE(back.error().code == Code::kIo || back.error().code == Code::kCorrupt);
      }
    } else {
      EXPECT_TRUE(id.error().code == Code::kIo || id.error().code == Code::kResourceExhausted ||
                  id.error().code == Code::kCorrupt)
          << id.error().ToString();
      if (plan_->fault == Fault::kEnospc && id.error().message.find("writing") == 0) {
        EXPECT_EQ(CodeName(id.error().code), CodeName(Code::kResourceExhausted));
      }
    }
    CheckAcknowledged(true);
  }

  TempDir dir_;
  StoreOptions options_;
  ModelRecord model_ = TestModel();
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  FaultyEngine* engine_ = nullptr;  // owned by the store
  std::unique_ptr<PrefixStore> store_;
  std::map<SegmentId, std::vector<uint32_t>> acknowledged_;
};

TEST_P(FaultTest, EveryOperationInTurn) {
  const Param param = GetParam();
  uint32_t n = 1, faults = 0;
  for (;; ++n) {
    ASSERT_LT(n, 500u) << "the story never ends";
    plan_->Arm(param.fault, n, param.sticky);
    Story(n);
    const bool injected = plan_->injected > 0;
    plan_->Disarm();
    if (HasFatalFailure()) return;
    if (!injected) break;
    ++faults;
    // A read that failed twice has condemned its segment; the bytes are sound, and verifying shows
    // that.
    const auto report = store_->Verify(nullptr, nullptr);
    ASSERT_OK(report);
    ASSERT_EQ(report->damaged, std::vector<std::string>{}) << "fault at operation " << n;
    CheckAcknowledged(false);
    if (HasFatalFailure()) return;
    // Removals keep the story short, and show that removal works after a fault.
    while (acknowledged_.size() > 2) {
      ASSERT_OK(store_->Remove(acknowledged_.begin()->first));
      acknowledged_.erase(acknowledged_.begin());
    }
  }
  EXPECT_GT(faults, param.fault == Fault::kSync ? 1u : 15u);
  Open();
  EXPECT_EQ(store_->ListPrefixes().size(), acknowledged_.size());
  CheckAcknowledged(false);
  std::vector<uint32_t> tokens{1, 2, 3};
  ASSERT_OK(Put(*store_, model_, tokens));
}

INSTANTIATE_TEST_SUITE_P(
    Faults, FaultTest,
    ::testing::Values(
        Param{Fault::kEio, false, "EioOnce"}, Param{Fault::kEio, true, "EioForGood"},
        Param{Fault::kEnospc, false, "EnospcOnce"}, Param{Fault::kEnospc, true, "EnospcForGood"},
        Param{Fault::kShort, false, "ShortOnce"}, Param{Fault::kShort, true, "ShortForGood"},
        Param{Fault::kFlip, false, "FlipOnce"}, Param{Fault::kFlip, true, "FlipForGood"},
        Param{Fault::kEintr, false, "EintrOnce"}, Param{Fault::kEintr, true, "EintrForGood"},
        Param{Fault::kSync, false, "SyncOnce"}, Param{Fault::kSync, true, "SyncForGood"},
        Param{Fault::kEio, true, "EioForGoodOnThreads", IoBackend::kThreads},
        Param{Fault::kShort, false, "ShortOnceOnThreads", IoBackend::kThreads}),
    [](const auto& param) { return param.param.name; });

using OneFaultTest = FaultTest;

// Reads wait this long for a silent disk: a working disk is never so slow, however busy.
constexpr uint32_t kPatienceMs = 2000;

TEST_P(OneFaultTest, ASilentDiskIsUnavailableAndCondemnsNothing) {
  options_.read_deadline_ms = kPatienceMs;
  Open();
  const std::vector<uint32_t> tokens = Iota(150);
  const auto id = Put(*store_, model_, tokens, "t", 40, false);
  ASSERT_OK(id);
  auto prefix = store_->OpenPrefix(*id, 0);
  ASSERT_OK(prefix);
  plan_->Arm(Fault::kHang, 1, true);
  for (int i = 0; i < 3; ++i) {
    const auto difference = Compare(**prefix, tokens);
    EXPECT_CODE(difference, Code::kUnavailable);
    EXPECT_NE(difference.error().message.find("did not answer within 2000 ms"), std::string::npos);
  }
  EXPECT_GE(engine_->held(), 3u);
  plan_->Disarm();
  // Other prefixes are read while the first reads still hang.
  auto difference = Compare(**prefix, tokens);
  ASSERT_OK(difference);
  EXPECT_EQ(*difference, "");
  const auto info = store_->GetPrefix(*id);
  ASSERT_OK(info);
  EXPECT_FALSE(info->quarantined);
  EXPECT_EQ(store_->stats().checksum_failures, 0u);
  // The disk answers at last, for some reads after all callers have given up.
  engine_->Release();
  plan_->Arm(Fault::kHang, 1, true);
  EXPECT_CODE(Compare(**prefix, tokens), Code::kUnavailable);
  plan_->Disarm();
  prefix->reset();
  Open();
  prefix = store_->OpenPrefix(*id, 0);
  ASSERT_OK(prefix);
  difference = Compare(**prefix, tokens);
  ASSERT_OK(difference);
  EXPECT_EQ(*difference, "");
}

// Opening a segment, loading its orders and reading a blob wait no longer than reading rows.
TEST_P(OneFaultTest, ASilentDiskIsWaitedForNoLongerElsewhere) {
  options_.read_deadline_ms = kPatienceMs;
  Open();
  const std::vector<uint32_t> tokens = Iota(150);
  const auto id = Put(*store_, model_, tokens, "t", 40, false);
  ASSERT_OK(id);
  const std::vector<std::byte> blob(5000, std::byte{7});
  ASSERT_OK(store_->PutBlob(*id, "note", "test", blob));
  ReclusterOptions recluster;
  recluster.chunk_tokens = 100;
  recluster.order = [](uint32_t, uint32_t, uint32_t, std::span<const std::byte> rows) {
    return Result<std::vector<uint32_t>>(
        Iota(static_cast<uint32_t>(rows.size() / TestModel().geometry.row(0).bytes())));
  };
  ASSERT_OK(store_->Recluster(*id, recluster));
  Open();  // then no segment is open or loaded
  const auto silent = [&](const auto& call) {
    plan_->Arm(Fault::kHang, 1, true);
    const auto result = call();
    EXPECT_CODE(result, Code::kUnavailable);
    EXPECT_NE(result.error().message.find("did not answer within 2000 ms"), std::string::npos)
        << result.error().message;
    plan_->Disarm();
  };
  silent([&] { return store_->OpenPrefix(*id, 0); });
  silent([&] { return store_->GetBlob(*id, "note", "test"); });
  auto prefix = store_->OpenPrefix(*id, 0);
  ASSERT_OK(prefix);
  silent([&] { return Compare(**prefix, tokens); });  // the first read is that of an order
  const auto difference = Compare(**prefix, tokens);
  ASSERT_OK(difference);
  EXPECT_EQ(*difference, "");
  const auto read = store_->GetBlob(*id, "note", "test");
  ASSERT_OK(read);
  EXPECT_EQ(*read, blob);
  EXPECT_FALSE(store_->GetPrefix(*id)->quarantined);
  EXPECT_EQ(store_->stats().checksum_failures, 0u);
  EXPECT_GE(engine_->held(), 3u);
  prefix->reset();
  engine_->Release();  // the disk answers at last, when no caller waits any more
}

TEST_P(OneFaultTest, WhatWasWrittenWrongIsNeverServed) {
  std::vector<uint32_t> tokens(150);
  for (uint32_t n = 1, flipped = 1; flipped > 0; ++n) {
    ASSERT_LT(n, 500u);
    for (uint32_t i = 0; i < tokens.size(); ++i) tokens[i] = n * 1000 + i;
    plan_->Arm(Fault::kFlipWrite, n, false);
    const auto id = Put(*store_, model_, tokens, "t", 40, n % 2 == 0);
    flipped = static_cast<uint32_t>(plan_->injected);
    plan_->Disarm();
    if (!id.ok()) continue;
    const auto prefix = store_->OpenPrefix(*id, 0);
    const auto difference = prefix.ok() ? Compare(**prefix, tokens) : prefix.error();
    if (difference.ok()) {
      EXPECT_EQ(*difference, "");  // the flip hit padding alone
    } else {
      EXPECT_CODE(difference, Code::kCorrupt);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, OneFaultTest,
                         ::testing::Values(Param{Fault::kHang, true, "Uring", IoBackend::kUring},
                                           Param{Fault::kHang, true, "Threads",
                                                 IoBackend::kThreads}),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace prefixd::storage
