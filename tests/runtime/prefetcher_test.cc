// Tests prefetched rows: steps find them, they are verified and counted apart, and they change no
// answer.
#include "runtime/prefix/prefetcher.h"

#include <filesystem>
#include <set>

#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint32_t kTokens = 1200, kRowsPerPage = 8;  // rows of 512 bytes

TEST(PrefetchBytes, AreEqualPartsOfAPageAtLeast) {
  constexpr uint64_t kMib = 1 << 20;
  const StepPolicy::Prefetch prefetch{4, 0, 4};
  EXPECT_EQ(PrefetchBytes(8, prefetch, 20 * kMib).value(), 2 * kMib / 8);   // a tenth of the tier
  EXPECT_EQ(PrefetchBytes(8, prefetch, 200 * kMib).value(), 4 * kMib / 8);  // max_mib
  EXPECT_EQ(PrefetchBytes(0, prefetch, 0).value(), 0u);
  const auto refused = [&](uint64_t heads, uint64_t mib, Code code, const std::string& what) {
    const auto bytes = PrefetchBytes(heads, prefetch, mib * kMib);
    EXPECT_CODE(bytes, code);
    if (bytes.ok()) return;
    EXPECT_NE(bytes.error().message.find(what), std::string::npos) << bytes.error().message;
  };
  EXPECT_TRUE(PrefetchBytes(1024, prefetch, 40 * kMib).ok());
  refused(1024, 39, Code::kFailedPrecondition, "store.host_tier_mib of 40 or more");
  refused(1025, 1000, Code::kInvalidArgument, "rows are prefetched with 5 or more");
}

TEST(NeighboursAt, AreThoseOfTheDistanceThatLieInside) {
  Random random(Seed("NeighboursAt"));
  for (int round = 0; round < 300; ++round) {
    const uint32_t begin = random.Int(0, 5);
    const TokenRange within{begin, begin + random.Int(0, 60)};
    std::set<uint32_t> ids;
    for (int i = 0; i < 10 && within.size() > 0; ++i) {
      ids.insert(random.Int(within.begin, within.end - 1));
    }
    const StepPolicy::Prefetch reach{random.Int(0, 6), random.Int(0, 6)};
    const uint32_t distance = random.Int(1, 6);
    std::set<uint32_t> want;
    for (uint32_t t = within.begin; t < within.end; ++t) {
      const bool behind = distance <= reach.forward && t >= distance && ids.contains(t - distance);
      const bool before = distance <= reach.back && ids.contains(t + distance);
      if ((behind || before) && !ids.contains(t)) want.insert(t);
    }
    const std::vector<uint32_t> sorted(ids.begin(), ids.end());
    EXPECT_EQ(NeighboursAt(sorted, distance, reach, within),
              std::vector<uint32_t>(want.begin(), want.end()));
  }
}

class PrefetcherTest : public RuntimeTest {
 protected:
  PrefetcherTest() {
    spec_.geometry = SmallGeometry(2, 4, 2, 128);
    options_.recluster = false;
    options_.compact_max_tokens = 0;
    options_.scrub_bytes_per_second = 0;
    prompt_ = MakePrompt(spec_.geometry, kTokens, 17);
  }

  // Stores the prompt and reopens the store, so that memory holds none of its rows.
  void PutCold() {
    Open();
    id_ = PutReady(prompt_);
    ASSERT_OK(store_->WaitRewritten(nullptr));
    Open();
    ASSERT_OK(store_->WaitReady(id_, nullptr));
  }

  // Returns queries that find token t of a layer: the token's own key, for each query head.
  std::vector<float> Looking(uint32_t layer, uint32_t t) const {
    const KvGeometry& g = spec_.geometry;
    std::vector<float> q;
    for (uint32_t h = 0; h < g.n_q_heads; ++h) {
      const auto key =
          prompt_.K(layer, t, 1)
              .subspan(h / g.group_size(0) * g.row(0).key_bytes(), g.row(0).key_bytes());
      std::vector<float> values(g.key_dim);
      ToFloat(g.dtype, key.data(), values);
      q.insert(q.end(), values.begin(), values.end());
    }
    return q;
  }

  void WaitPrefetched() const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    while (store_->Stats().value().prefetch_queue > 0) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << "reading ahead does not come to an end";
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  static StepPolicy Policy(uint32_t k, StepPolicy::Prefetch prefetch) {
    StepPolicy policy;
    policy.k = k;
    policy.selector = "exact";
    policy.estimator = EstimatorKind::kNone;
    policy.prefetch = prefetch;
    return policy;
  }

  // Walks over the prompt, step by step of all layers; returns each step's answer.
  std::vector<Output> Walk(Session& session, uint32_t from, uint32_t stride, uint32_t steps,
                           bool wait) {
    std::vector<Output> out;
    for (uint32_t s = 0; s < steps; ++s) {
      for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
        out.push_back(Step(session, layer, Looking(layer, from + s * stride)));
      }
      if (wait) WaitPrefetched();
    }
    return out;
  }

  SyntheticPrompt prompt_;
  std::string id_;
};

TEST_F(PrefetcherTest, TheNextStepFindsThem) {
  PutCold();
  constexpr uint32_t kSteps = 12;
  constexpr auto kSsd = static_cast<size_t>(Tier::kSsd), kHost = static_cast<size_t>(Tier::kHost);
  const auto walk = [&](StepPolicy::Prefetch prefetch) {
    const auto session = Attach(prompt_, Policy(1, prefetch));
    const auto out = Walk(*session, 100, kRowsPerPage, kSteps, true);
    EXPECT_TRUE(session->Detach().ok());
    return out;
  };
  const auto plain = walk({});
  ASSERT_NO_FATAL_FAILURE(Open());  // cold again
  const auto ahead = walk({kRowsPerPage});
  ExpectSame(plain, ahead);
  // Each step but the first two (of a layer each) needs one more page of both heads.
  for (size_t i = spec_.geometry.n_layers; i < plain.size(); ++i) {
    const Ledger &a = plain[i].info.ledger, &b = ahead[i].info.ledger;
    EXPECT_EQ(a.physical_bytes[kSsd], 2 * kPage) << i;
    EXPECT_EQ(a.prefetched_bytes + a.prefetch_used_bytes, 0u);
    EXPECT_EQ(b.physical_bytes[kSsd], 0u) << i;
    EXPECT_GT(b.physical_bytes[kHost], 0u) << i;
    EXPECT_EQ(b.prefetched_bytes, 2 * kPage) << i;
    EXPECT_EQ(b.prefetch_used_bytes, 2 * kPage) << i;
    EXPECT_EQ(a.logical_bytes, b.logical_bytes);
    EXPECT_EQ(a.retrieved_tokens, b.retrieved_tokens);
  }
  const RuntimeStats stats = store_->Stats().value();
  EXPECT_EQ(stats.prefetched_bytes, kSteps * 4 * kPage);
  EXPECT_EQ(stats.prefetch_used_bytes, (kSteps - 1) * 4 * kPage);
  EXPECT_EQ(stats.prefetch_wasted_bytes, 0u);  // they may be used yet
}

TEST_F(PrefetcherTest, LayoutsEncodingsAndKeysOnDiskAllServe) {
  struct Case {
    bool recluster;
    const char* encoding;
    uint64_t selector_memory;
    uint32_t dim;
  };
  for (const Case& c : {Case{true, "as_given", 1 << 30, 128}, Case{true, "as_given", 0, 128},
                        Case{false, "int8", 1 << 30, 128}, Case{true, "int8", 1 << 30, 128},
                        Case{false, "as_given", 1 << 30, 1024}}) {
    SCOPED_TRACE(std::string(c.encoding) + (c.recluster ? " reclustered " : " ") +
                 std::to_string(c.dim));
    store_.reset();
    std::filesystem::remove_all(options_.dir);
    options_.recluster = c.recluster;
    options_.recluster_min_tokens = 500;
    options_.encoding = c.encoding;
    options_.selector_memory_bytes = c.selector_memory;
    // The last case's rows are larger than a page.
    spec_.geometry = SmallGeometry(2, 4, 2, c.dim, c.dim > 1000 ? DType::kF32 : DType::kBf16);
    prompt_ = MakePrompt(spec_.geometry, c.dim > 1000 ? 150 : kTokens, 18);
    ASSERT_NO_FATAL_FAILURE(PutCold());
    const auto want = Walk(*Attach(prompt_, Policy(2, {})), 30, 1, 20, false);
    ASSERT_NO_FATAL_FAILURE(Open());
    const auto session = Attach(prompt_, Policy(2, {2, 1}));
    ExpectSame(want, Walk(*session, 30, 1, 20, true));
    const auto report = session->Detach();
    ASSERT_OK(report);
    EXPECT_GT(report->total.prefetch_used_bytes, 0u);
    EXPECT_EQ(report->total.prefetched_bytes, store_->Stats().value().prefetched_bytes);
    EXPECT_EQ(report->total.prefetch_used_bytes, store_->Stats().value().prefetch_used_bytes);
  }
}

// With a tier that holds little and steps that never wait, answers and sums stay right.
TEST_F(PrefetcherTest, LedgersAddUpHoweverLateTheyCome) {
  options_.host_tier_bytes = 64 * kPage;
  PutCold();
  const auto plain = Walk(*Attach(prompt_, Policy(16, {})), 60, 3, 60, false);
  ASSERT_NO_FATAL_FAILURE(Open());
  Ledger total;
  for (const bool wait : {false, true}) {
    const auto session = Attach(prompt_, Policy(16, {6, 2}));
    const auto steps = Walk(*session, 60, 3, 60, wait);
    ExpectSame(plain, steps);
    Ledger of_steps;
    for (const Output& step : steps) of_steps += step.info.ledger;
    const auto report = session->Detach();
    ASSERT_OK(report);
    EXPECT_GE(report->total.prefetched_bytes, of_steps.prefetched_bytes);
    EXPECT_EQ(report->total.prefetch_used_bytes, of_steps.prefetch_used_bytes);
    total += report->total;
  }
  const RuntimeStats stats = store_->Stats().value();
  EXPECT_GT(stats.prefetch_used_bytes, 0u);
  EXPECT_GT(stats.prefetch_wasted_bytes, 0u);
  EXPECT_EQ(stats.prefetched_bytes, total.prefetched_bytes);
  EXPECT_EQ(stats.prefetch_used_bytes, total.prefetch_used_bytes);
  EXPECT_LE(stats.prefetch_used_bytes + stats.prefetch_wasted_bytes, stats.prefetched_bytes);
  EXPECT_LE(stats.host_tier_bytes, options_.host_tier_bytes);
}

TEST_F(PrefetcherTest, NothingIsReadForASessionThatIsGone) {
  PutCold();
  uint64_t read = 0;  // until the last session ended
  for (int round = 0; round < 24; ++round) {
    EXPECT_EQ(store_->Stats().value().prefetched_bytes, read);
    auto session = Attach(prompt_, Policy(32, {64, 64}));
    Walk(*session, 50 + 40 * round, 2, 2, false);
    switch (round % 4) {
      case 0:
        ASSERT_OK(session->Detach());
        break;
      case 1:
        ASSERT_OK(session->SetPolicy(Policy(32, {})));
        break;
      case 2:
        EXPECT_CODE(store_->Remove(id_), Code::kFailedPrecondition);
        session.reset();
        break;
      case 3:
        store_.reset();  // the session continues
        Walk(*session, 50, 2, 2, false);
        session.reset();
        ASSERT_NO_FATAL_FAILURE(Open());
        break;
    }
    const RuntimeStats stats = store_->Stats().value();
    EXPECT_EQ(stats.prefetch_queue, 0u);
    read = stats.prefetched_bytes;
  }
  ASSERT_OK(store_->Remove(id_));
}

TEST_F(PrefetcherTest, APrefixThatExpiredIsReadOn) {
  PutCold();
  const auto plain = Walk(*Attach(prompt_, Policy(4, {})), 80, 1, 10, false);
  const auto session = Attach(prompt_, Policy(4, {4}));
  ASSERT_OK(store_->SetLifetime(id_, {std::nullopt, 1}));
  do {
    ExpectSame(plain, Walk(*session, 80, 1, 10, true));
  } while (store_->Match({.model = spec_.name, .tokens = prompt_.tokens})->n_tokens > 0);
  ExpectSame(plain, Walk(*session, 80, 1, 10, true));
  ASSERT_OK(session->Detach());
}

TEST_F(PrefetcherTest, DamageIsMetByTheStepThatNeedsIt) {
  PutCold();
  const auto session = Attach(prompt_, Policy(1, {kRowsPerPage}));
  ASSERT_TRUE(session);
  // The search reads all keys before the damage; later steps read values.
  Step(*session, 0, Looking(0, 500));
  Step(*session, 1, Looking(1, 500));
  WaitPrefetched();
  // Tokens 104 to 111 of layer 0, KV head 0.
  FlipByte(options_.dir / "segments" / (id_ + ".seg"), (1 + 104 / kRowsPerPage) * kPage + 300);
  Step(*session, 0, Looking(0, 100));
  WaitPrefetched();
  const uint64_t failures = store_->Stats().value().checksum_failures;
  EXPECT_GT(failures, 0u);
  Step(*session, 0, Looking(0, 300));
  Step(*session, 0, Looking(0, 100));
  WaitPrefetched();
  EXPECT_EQ(store_->Stats().value().checksum_failures, failures);  // damage is read once, not again
  Step(*session, 1, Looking(1, 108));
  const KvGeometry& g = spec_.geometry;
  std::vector<float> y(g.n_q_heads * g.value_dim), lse(g.n_q_heads);
  EXPECT_CODE(session->Step(0, Looking(0, 108), y, lse, nullptr), Code::kCorrupt);
  Step(*session, 0, Looking(0, 308));
  ASSERT_OK(session->Detach());
}

TEST_F(PrefetcherTest, ManySessionsAtOnce) {
  options_.host_tier_bytes = 200 * kPage;
  PutCold();
  const auto want = Walk(*Attach(prompt_, Policy(8, {})), 40, 2, 30, false);
  ASSERT_NO_FATAL_FAILURE(Open());
  std::vector<std::vector<Output>> got(4);
  std::vector<std::shared_ptr<Session>> sessions;
  for (uint32_t i = 0; i < got.size(); ++i) {
    sessions.push_back(Attach(prompt_, Policy(8, {i, 3})));
  }
  std::vector<std::thread> threads;
  for (size_t i = 0; i < got.size(); ++i) {
    threads.emplace_back([&, i] {
      for (uint32_t part = 0; part < 3; ++part) {
        const auto out = Walk(*sessions[i], 40 + 20 * part, 2, 10, false);
        got[i].insert(got[i].end(), out.begin(), out.end());
        EXPECT_TRUE(sessions[i]->SetPolicy(Policy(8, {part * 5, 1})).ok());
        EXPECT_TRUE(sessions[i]->report().ok());
        store_->Stats().value();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  uint64_t ahead = 0, used = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    ExpectSame(want, got[i]);
    const auto report = sessions[i]->Detach();
    ASSERT_OK(report);
    ahead += report->total.prefetched_bytes, used += report->total.prefetch_used_bytes;
  }
  EXPECT_EQ(store_->Stats().value().prefetched_bytes, ahead);
  EXPECT_EQ(store_->Stats().value().prefetch_used_bytes, used);
}

TEST_F(PrefetcherTest, AStepReadsAheadNoMoreThanItMay) {
  spec_.geometry = SmallGeometry(1, 1, 1, 512);  // a row of 2 KiB, two to a page
  prompt_ = MakePrompt(spec_.geometry, 4000, 19);
  PutCold();
  // Both bounds, a tenth of the tier and max_mib, are far smaller than the neighbourhood of the
  // set.
  for (const uint64_t tier : {uint64_t{8} << 20, uint64_t{80} << 20}) {
    options_.host_tier_bytes = tier;
    ASSERT_NO_FATAL_FAILURE(Open());
    const auto session = Attach(prompt_, Policy(500, {64, 0, 4}));
    Step(*session, 0, Looking(0, 2000));
    WaitPrefetched();
    const uint64_t most = std::min<uint64_t>(tier / 10, 4 << 20);
    EXPECT_EQ(store_->Stats().value().prefetched_bytes, most / kPage * kPage);
  }
}

TEST_F(PrefetcherTest, WhatCannotBeIsRefused) {
  PutCold();
  const auto refused = [&](auto change, const std::string& why, Code code) {
    StepPolicy policy = Policy(4, {4});
    change(policy);
    const auto session = store_->Attach({spec_.name, "", prompt_.tokens, "", 0, policy});
    EXPECT_CODE(session, code);
    if (session.ok()) return;
    EXPECT_NE(session.error().message.find(why), std::string::npos) << session.error().message;
  };
  const Code invalid = Code::kInvalidArgument;
  refused([](StepPolicy& p) { p.prefetch.forward = 65; }, "prefetch.forward", invalid);
  refused([](StepPolicy& p) { p.prefetch.back = 65; }, "prefetch.back", invalid);
  refused([](StepPolicy& p) { p.prefetch.max_mib = 0; }, "prefetch.max_mib", invalid);
  refused([](StepPolicy& p) { p.prefetch.max_mib = 1 << 20; }, "prefetch.max_mib", invalid);
  refused([](StepPolicy& p) { p.mode = StepMode::kFull; }, "mode 'full'", invalid);
  EXPECT_TRUE(Attach(prompt_, Policy(4, {0, 0, 0})));  // off
  options_.host_tier_bytes = 32 * kPage;
  Open();
  refused([](StepPolicy&) {}, "store.host_tier_mib of 1 or more", Code::kFailedPrecondition);
  options_.host_tier_bytes = 0;
  Open();
  refused([](StepPolicy&) {}, "store.host_tier_mib", Code::kFailedPrecondition);
}

}  // namespace
}  // namespace prefixd::testing
