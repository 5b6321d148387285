// Holds the disk under one part of a put, and checks that the calls of the other parts end by their
// deadlines and may be repeated.
#include <future>

#include "base/call_scope.h"
#include "storage/segment/segment_file_writer.h"
#include "storage/store/open_store.h"
#include "storage/store/prefix_store.h"
#include "tests/runtime/runtime_fixture.h"
#include "tests/runtime/wait_checked.h"
#include "tests/storage/io/faulty_engine.h"
#include "tests/support/ends.h"

namespace prefixd::testing {
namespace {

constexpr HeadRange kFirst{0, 1}, kSecond{1, 1};

class PartWaits : public RuntimeTest {
 protected:
  PartWaits() {
    spec_.geometry = SmallGeometry(1, 2, 2, 128);
    options_.recluster = false;
    options_.scrub_bytes_per_second = 0;
  }
  void TearDown() override { Release(); }

  // Opens a store over a disk that the test holds, whose puts have small write buffers by default.
  void OpenCold(uint64_t max_inflight_bytes = 1u << 20) {
    store_.reset();
    auto opened = LocalStore::Open(options_, [this,
                                              max_inflight_bytes](const storage::StoreOptions& at) {
      storage::StoreOptions own = at;
      own.max_inflight_bytes = max_inflight_bytes;
      return storage::OpenStoreWithEngine(own, [this](std::unique_ptr<storage::IoEngine> inner) {
        auto engine = std::make_unique<storage::FaultyEngine>(std::move(inner), plan_);
        engine_ = engine.get();
        return engine;
      });
    });
    ASSERT_OK(opened);
    store_ = *std::move(opened);
    prefixd::testing::WaitChecked(*store_);
  }
  void HoldDisk(bool reads) {
    plan_->reads_only = reads;
    plan_->Arm(storage::Fault::kHang, 1, true);
  }
  void Release() {
    plan_->Disarm();
    if (engine_ != nullptr) engine_->Release();
  }
  bool EndsWhileHeld(const std::function<void()>& call) {
    return Ends(call, [this] { Release(); });
  }

  Result<std::unique_ptr<PutStream>> Begin(HeadRange heads, const std::vector<uint32_t>& tokens,
                                           uint32_t wait_ms = 0) {
    PutSpec spec{spec_.name, "", tokens, "parts"};
    spec.heads = heads;
    spec.wait_ms = wait_ms;
    return store_->BeginPut(spec);
  }
  // Writes zeros for `n` tokens of a part of one head.
  Status Write(PutStream& put, size_t n) const {
    const std::vector<std::byte> rows(n * spec_.geometry.row(0).key_bytes());
    return put.Write(0, 0, static_cast<uint32_t>(n), rows, rows);
  }
  static std::vector<uint32_t> Numbered(size_t n) {
    std::vector<uint32_t> tokens(n);
    for (size_t i = 0; i < n; ++i) tokens[i] = 70000 + static_cast<uint32_t>(i);
    return tokens;
  }
  static CallLimits Soon() { return CallLimits::Of(200, nullptr); }

  std::shared_ptr<storage::FaultPlan> plan_ = std::make_shared<storage::FaultPlan>();
  storage::FaultyEngine* engine_ = nullptr;  // owned by the store
};

TEST_F(PartWaits, OnesSlowBeginningHoldsNobodyBeyondItsDeadline) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 200, Seed("PartWaits"));
  PutReady(prompt);
  OpenCold();
  auto longer = prompt.tokens;
  longer.insert(longer.end(), 50, 9);
  HoldDisk(/*reads=*/true);  // the ids of what is stored
  auto first = std::async(std::launch::async, [&] { return Begin(kFirst, longer); });
  plan_->AwaitInjected();
  EXPECT_TRUE(EndsWhileHeld([&] {
    const CallScope scope(Soon());
    EXPECT_CODE(Begin(kSecond, longer), Code::kDeadlineExceeded);
  }));
  Release();
  const auto a = first.get();
  ASSERT_OK(a);
  const auto b = Begin(kSecond, longer);
  ASSERT_OK(b);
  EXPECT_EQ((*b)->missing(), (*a)->missing());
}

TEST_F(PartWaits, OnesSlowWriteHoldsNobodyBeyondItsDeadline) {
  Open();
  OpenCold();
  const auto tokens = Numbered(16384);  // 8 MiB a part, more than the writer's buffers
  auto a = Begin(kFirst, tokens), b = Begin(kSecond, tokens);
  ASSERT_OK(a);
  ASSERT_OK(b);
  HoldDisk(/*reads=*/false);
  auto first = std::async(std::launch::async, [&] { return Write(**a, tokens.size()); });
  plan_->AwaitInjected();
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(EndsWhileHeld([&] {
      const CallScope scope(Soon());
      EXPECT_CODE(Write(**b, tokens.size()), Code::kDeadlineExceeded);
    }));
  }
  Release();
  EXPECT_OK(first.get());
  EXPECT_OK(Write(**b, tokens.size()));
  EXPECT_EQ((*a)->Commit().error().code, Code::kFailedPrecondition);
  EXPECT_OK((*b)->Commit());
  EXPECT_OK((*a)->Commit());
}

// Buffers that there is no memory for are no room: the put waits for the disk, and its call ends.
TEST_F(PartWaits, AWriteWithoutMemoryForBuffersEndsByItsDeadline) {
  Open();
  OpenCold(64u << 20);
  const auto tokens = Numbered(24576);  // 24 MiB
  const auto put = Begin({}, tokens);
  ASSERT_OK(put);
  const size_t token = spec_.geometry.n_kv_heads * spec_.geometry.row(0).key_bytes();
  const std::vector<std::byte> rows(tokens.size() * token);
  const auto write = [&] {
    return (*put)->Write(0, 0, static_cast<uint32_t>(tokens.size()), rows, rows);
  };
  // There is memory for what the call itself takes, 16 MiB, and for no buffer behind it.
  const auto& budget = store_->memory();
  const uint64_t left = (16u << 20) + storage::kSlabBytes / 2;
  const MemoryCharge rest =
      budget->Shared().Charge(MemoryKind::kPuts, budget->capacity() - budget->used() - left);
  HoldDisk(/*reads=*/false);
  EXPECT_TRUE(EndsWhileHeld([&] {
    const CallScope scope(Soon());
    EXPECT_CODE(write(), Code::kDeadlineExceeded);
  }));
  Release();
  EXPECT_OK(write());
  EXPECT_OK((*put)->Commit());
}

TEST_F(PartWaits, TheLastOnesSlowCommitHoldsNobodyWhoIsCancelledOrLate) {
  Open();
  OpenCold();
  const auto tokens = Numbered(300);
  auto a = Begin(kFirst, tokens, 600'000), b = Begin(kSecond, tokens);
  ASSERT_OK(a);
  ASSERT_OK(b);
  ASSERT_OK(Write(**a, tokens.size()));
  ASSERT_OK(Write(**b, tokens.size()));
  {
    const CallScope scope(CallLimits::Of(2000, nullptr));
    EXPECT_CODE((*a)->Commit(), Code::kDeadlineExceeded);  // from here on b is the last
  }
  HoldDisk(/*reads=*/false);
  CallCanceller canceller;
  auto waiting = std::async(std::launch::async, [&] {
    const CallScope scope(CallLimits::Of(0, &canceller));
    return (*a)->Commit();
  });
  auto last = std::async(std::launch::async, [&] { return (*b)->Commit(); });
  plan_->AwaitInjected();
  EXPECT_TRUE(EndsWhileHeld([&] {
    // What is cancelled before its call began is not; again until it has.
    do {
      canceller.Cancel();
    } while (waiting.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready);
    EXPECT_CODE(waiting.get(), Code::kCancelled);
  }));
  EXPECT_TRUE(EndsWhileHeld([&] {
    const CallScope scope(Soon());
    EXPECT_CODE((*a)->Commit(), Code::kDeadlineExceeded);
  }));
  Release();
  const auto stored = last.get();
  ASSERT_OK(stored);
  const auto found = (*a)->Commit();
  ASSERT_OK(found);
  EXPECT_EQ(found->prefix, stored->prefix);
}

}  // namespace
}  // namespace prefixd::testing
