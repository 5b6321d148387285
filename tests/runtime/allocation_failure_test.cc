// Lets one allocation after the other fail, on the threads of a store and on that of its caller,
// while a prompt is put, ingested, attached and stepped over: the call that is hit fails with
// resource_exhausted, no thread ends, nobody waits for ever, and afterwards everything works.
#include <fcntl.h>

#include <algorithm>
#include <random>

#include "base/every_page.h"
#include "storage/io/file.h"
#include "storage/io/io_engine.h"
#include "tests/runtime/runtime_fixture.h"
#include "tests/support/failing_new.h"

namespace prefixd::testing {
namespace {

class AllocationFailureTest : public RuntimeTest {
 protected:
  AllocationFailureTest() {
    options_.host_tier_bytes = 0;  // every read comes from the disk
    options_.clusters = 4;
    options_.estimators = *ParseVariants("none, moment, centroid");
    policy_.k = 25;
    policy_.selector = "exact";
  }

  // Returns the status of a call; one that throws for want of memory is refused like any other.
  template <typename Call>
  static Status Try(const Call& call) {
    try {
      return call();
    } catch (const std::bad_alloc&) {
      return Error{Code::kResourceExhausted, "out of memory"};
    }
  }

  Status PutOnce() {
    PREFIXD_ASSIGN(auto put, store_->BeginPut({spec_.name, "", prompt_.tokens, "test"}));
    for (uint32_t l = 0; put->missing().size() > 0 && l < spec_.geometry.n_layers; ++l) {
      const uint32_t n = prompt_.n_tokens;
      PREFIXD_TRY(put->Write(l, 0, n, prompt_.K(l, 0, n), prompt_.V(l, 0, n)));
      if (queries_) PREFIXD_TRY(put->WriteQueries(l, 0, n, prompt_.Q(l, 0, n)));
    }
    PREFIXD_ASSIGN(const PutResult result, put->Commit());
    prefix_ = result.prefix;
    return {};
  }

  Status AttachAndStep() {
    PREFIXD_ASSIGN(const auto match,
                   store_->Match({.model = spec_.name, .tokens = prompt_.tokens}));
    if (match.n_tokens == 0) return Error{Code::kNotFound, "nothing matches"};
    PREFIXD_ASSIGN(const auto session,
                   store_->Attach({spec_.name, "", prompt_.tokens, "", 0, policy_}));
    for (uint32_t l = 0; l < spec_.geometry.n_layers; ++l) {
      PREFIXD_TRY(session->Step(l, prompt_.Q(l, prompt_.n_tokens - 1, 1), y_, lse_, nullptr));
    }
    PREFIXD_TRY(ChangePolicy(*session));
    return TakeOwnTokens(*session);
  }

  // The session has the policy that a call answered for.
  Status ChangePolicy(Session& session) {
    StepPolicy other = policy_;
    other.k = *policy_.k - 5;
    other.adaptive = true;
    const Status status = Try([&] { return session.SetPolicy(other); });
    PREFIXD_TRY(Try([&]() -> Status {
      EXPECT_EQ(session.policy().k, status.ok() ? other.k : policy_.k);
      return {};
    }));
    return status;
  }

  // A call that fails has appended nothing, and what there is stays as it was.
  Status TakeOwnTokens(Session& session) {
    std::vector<float> y(y_.size()), lse(lse_.size());
    uint32_t n = 0;
    const auto took = [&](uint32_t more, const Status& status) {
      n += status.ok() ? more : 0;
      return status;
    };
    const auto all = [&]() -> Status {
      PREFIXD_TRY(took(62, session.Append(0, 62, prompt_.K(0, 0, 62), prompt_.V(0, 0, 62))));
      for (uint32_t t = 0; t < 4; ++t) {
        PREFIXD_TRY(took(1, session.StepAppend(0, prompt_.Q(0, t, 1), prompt_.K(0, t, 1),
                                               prompt_.V(0, t, 1), y, lse, nullptr)));
      }
      PREFIXD_ASSIGN(const auto fork, session.Fork());
      return fork->StepAppend(0, prompt_.Q(0, 9, 1), prompt_.K(0, 9, 1), prompt_.V(0, 9, 1), y, lse,
                              nullptr);
    };
    const Status status = Try(all);
    PREFIXD_TRY(Try([&]() -> Status {
      EXPECT_EQ(session.report()->own_tokens, n);
      return {};
    }));
    return status;
  }

  // Puts, ingests, attaches and steps. Returns the first error.
  Status Story() {
    PREFIXD_TRY(Try([&] { return PutOnce(); }));
    PREFIXD_TRY(Try([&] { return store_->WaitReady(prefix_, nullptr); }));
    return Try([&] { return AttachAndStep(); });
  }

  // Sums that were interrupted go on from what is stored of them, so bits may differ.
  void ExpectNear(std::span<const float> want) const {
    for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(y_[i], want[i], 1e-4) << i;
  }

  // Indexes and choices bring JSON, so only larger allocations fail with them.
  void UseIndexes(bool choices) {
    queries_ = choices;
    options_.build_codes = true;
    options_.codes_min_tokens = 1000;
    options_.recall_target = 0.5;
    policy_.selector = "codes";
    least_bytes_ = 1024;
  }

  void Sweep(Victims victims) {
    Open();
    const KvGeometry& g = spec_.geometry;
    y_.resize(g.n_q_heads * g.value_dim);
    lse_.resize(g.n_q_heads);
    prompt_ = MakePrompt(g, 1100, Seed("AllocationFailure"));
    ASSERT_OK(Story());
    const std::vector<float> want = y_;
    ASSERT_OK(store_->Remove(prefix_));
    std::mt19937_64 rng(Seed("AllocationFailure") + 1);
    int64_t n = 1;
    uint32_t hits = 0;
    for (;; n += n < 64 ? 1 : 1 + static_cast<int64_t>(rng() % static_cast<uint64_t>(n / 4))) {
      SCOPED_TRACE("allocation " + std::to_string(n));
      FailingNew::Arm(victims, n, least_bytes_);
      const Status ended = Story();
      const bool failed = FailingNew::Disarm();
      if (!ended.ok()) EXPECT_CODE(ended, Code::kResourceExhausted);
      if (!failed) {
        ASSERT_OK(ended);
        break;
      }
      ++hits;
      // The same again, from the beginning: the store is as before.
      ASSERT_OK(Story());
      ExpectNear(want);
      ASSERT_OK(store_->WaitRewritten(nullptr));
      ASSERT_EQ(store_->Stats()->sessions, 0u);  // none that nobody has takes a place
      ASSERT_OK(store_->Remove(prefix_));
      ASSERT_TRUE(EveryPrefix(*store_)->empty());
      if (HasFailure()) return;
    }
    EXPECT_GT(hits, 20u);
    std::printf("%u allocations failed, the last of about %ld\n", hits, static_cast<long>(n));
    // What is on the disk is whole.
    ASSERT_OK(Story());
    Open();
    const auto report = store_->Verify("", nullptr);
    ASSERT_OK(report);
    EXPECT_TRUE(report->damaged.empty());
    ASSERT_OK(AttachAndStep());
    ExpectNear(want);
  }

  SyntheticPrompt prompt_;
  StepPolicy policy_;
  std::string prefix_;
  std::vector<float> y_, lse_;
  bool queries_ = false;
  std::size_t least_bytes_ = 1;
};

// Each operation of a batch ends, also one that there was no memory to queue.
TEST(AllocationFailure, OfAnOperationThatCannotBeQueued) {
  using namespace storage;
  constexpr size_t kOps = 100, kBytes = 4096;
  const TempDir dir;
  const auto fd = OpenFile(dir.path() / "file", O_RDWR | O_CREAT);
  ASSERT_OK(fd);
  ASSERT_EQ(::ftruncate(fd->get(), kOps * kBytes), 0);
  std::vector<std::byte> buffer(kOps * kBytes);
  for (const IoBackend backend : {IoBackend::kThreads, IoBackend::kAuto}) {
    const auto engine = NewEngine(backend, {.max_inflight_ops = 4}, fd->get());
    ASSERT_OK(engine);
    int64_t n = 0;
    int hits = 0;
    for (bool failed = true; failed;) {
      std::vector<IoOp> ops;
      for (size_t i = 0; i < kOps; ++i) {
        ops.push_back({IoKind::kRead,
                       IoPriority::kStepRead,
                       fd->get(),
                       i * kBytes,
                       {{buffer.data() + i * kBytes, kBytes}},
                       0});
      }
      IoBatch batch;
      FailingNew::Arm(Victims::kCaller, ++n);
      (*engine)->Submit(ops, batch);
      failed = FailingNew::Disarm();
      batch.Wait();
      const auto refused = std::ranges::count(ops, -ENOMEM, &IoOp::result);
      EXPECT_EQ(std::ranges::count(ops, int64_t{kBytes}, &IoOp::result) + refused, int64_t{kOps});
      EXPECT_LE(refused, 1);
      hits += refused > 0;
    }
    EXPECT_GT(hits, 0);
  }
}

TEST_F(AllocationFailureTest, OnTheThreadsOfTheStore) { Sweep(Victims::kOthers); }

TEST_F(AllocationFailureTest, OnTheThreadsOfTheStoreWithIndexes) {
  UseIndexes(/*choices=*/true);
  Sweep(Victims::kOthers);
}

TEST_F(AllocationFailureTest, OnTheCallersThread) {
  UseIndexes(/*choices=*/false);  // a put that fails behind its commit has lost its queries
  Sweep(Victims::kCaller);
}

}  // namespace
}  // namespace prefixd::testing
