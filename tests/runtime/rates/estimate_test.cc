// Estimates of a store on a slow disk: what is known of them, where it comes from, and what they
// advise. The times themselves are the machine's; what is compared follows from them.
#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "storage/store/open_store.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

constexpr std::chrono::milliseconds kReadDelay{4};
constexpr uint32_t kReadTokens = 300;

// Each batch of reads begins late.
class LateReads final : public storage::IoEngine {
 public:
  explicit LateReads(std::unique_ptr<storage::IoEngine> inner) : inner_(std::move(inner)) {}
  std::string_view name() const override { return inner_->name(); }
  void Submit(std::span<storage::IoOp> ops, storage::IoBatch& batch) override {
    if (!ops.empty() && ops.front().kind == storage::IoKind::kRead) {
      std::this_thread::sleep_for(kReadDelay);
    }
    inner_->Submit(ops, batch);
  }
  void Cancel(storage::IoBatch& batch, int error) override { inner_->Cancel(batch, error); }

 private:
  const std::unique_ptr<storage::IoEngine> inner_;
};

class EstimateTest : public RuntimeTest {
 protected:
  EstimateTest() {
    options_.recluster = false;
    options_.host_tier_bytes = 0;
    options_.scrub_bytes_per_second = 0;
  }

  // Opens the store anew: nothing of what it holds is in memory.
  void OpenCold() {
    store_.reset();
    auto opened = LocalStore::Open(options_, [](const storage::StoreOptions& at) {
      return storage::OpenStoreWithEngine(at, [](std::unique_ptr<storage::IoEngine> inner) {
        return std::make_unique<LateReads>(std::move(inner));
      });
    });
    ASSERT_OK(opened);
    store_ = *std::move(opened);
  }

  void PutAndOpenCold(const char* test) {
    Open();
    prompt_ = MakePrompt(spec_.geometry, kReadTokens, Seed(test));
    prefix_ = PutReady(prompt_);
    OpenCold();
  }

  ReuseEstimate Match(const EngineSpeed& engine = {}, const std::string& tenant = "") {
    MatchSpec spec;
    spec.model = spec_.name;
    spec.tenant = tenant;
    spec.tokens = prompt_.tokens;
    spec.engine = engine;
    const auto match = store_->Match(spec);
    EXPECT_TRUE(match.ok()) << match.error().ToString();
    return match.ok() ? match->estimate : ReuseEstimate{};
  }

  std::shared_ptr<Session> AttachFull(const EngineSpeed& engine = {}) {
    AttachSpec spec;
    spec.model = spec_.name;
    spec.prefix = prefix_;
    spec.policy.mode = StepMode::kFull;
    spec.engine = engine;
    auto session = store_->Attach(spec);
    EXPECT_TRUE(session.ok()) << session.error().ToString();
    return session.ok() ? *session : nullptr;
  }

  // Reads rows as a restore does.
  void RestoreLayers(uint32_t layers) {
    const auto session = AttachFull();
    ASSERT_NE(session, nullptr);
    for (uint32_t layer = 0; layer < layers; ++layer) {
      const size_t bytes = prompt_.K(layer, 0, kReadTokens).size();
      std::vector<std::byte> k(bytes), v(bytes);
      LayerSlice slice;
      slice.layer = layer;
      slice.tokens = {0, kReadTokens};
      slice.order = KvOrder::kTokenMajor;
      ASSERT_OK(session->ReadLayer(slice, k, v));
    }
  }
  void Restore() { RestoreLayers(spec_.geometry.n_layers); }

  // Puts a prompt layer by layer, as a prefill has it.
  void PutStreaming(std::optional<uint32_t> prefill_from, const std::string& tenant) {
    PutSpec spec{spec_.name, tenant, prompt_.tokens};
    spec.prefill_from = prefill_from;
    auto put = store_->BeginPut(spec);
    ASSERT_OK(put);
    for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
      ASSERT_OK((*put)->Write(layer, 0, kReadTokens, prompt_.K(layer, 0, kReadTokens),
                              prompt_.V(layer, 0, kReadTokens)));
    }
    ASSERT_OK((*put)->Commit());
  }

  uint64_t AllBytes() const {
    const KvGeometry& g = spec_.geometry;
    return uint64_t{kReadTokens} * g.n_layers * g.n_kv_heads * g.row(0).bytes();
  }

  SyntheticPrompt prompt_;
  std::string prefix_;
};

TEST_F(EstimateTest, UnknownStaysUnknown) {
  PutAndOpenCold("UnknownStaysUnknown");
  ReuseEstimate e = Match();
  EXPECT_EQ(e.tokens, kReadTokens);
  EXPECT_EQ(e.memory_bytes, 0u);
  EXPECT_EQ(e.disk_bytes, AllBytes());
  EXPECT_EQ(e.restore, TimeEstimate());
  EXPECT_EQ(e.retrieve, TimeEstimate());
  EXPECT_EQ(e.recompute, TimeEstimate());
  EXPECT_EQ(e.prefill_tokens_per_second, 0);
  EXPECT_EQ(e.advice, ReuseAdvice::kUnknown);
  // What is given alone is compared with nothing, however fast.
  e = Match({1e12});
  EXPECT_EQ(e.recompute, (TimeEstimate{kReadTokens / 1e12, EstimateSource::kGiven}));
  EXPECT_EQ(e.advice, ReuseAdvice::kUnknown);
  // Nor is a match of nothing.
  prompt_.tokens[0] += 1;
  EXPECT_EQ(Match({1e12}), ReuseEstimate());
}

TEST_F(EstimateTest, ImpossibleRatesAreRefused) {
  PutAndOpenCold("ImpossibleRatesAreRefused");
  MatchSpec match{spec_.name, "", prompt_.tokens};
  match.engine.prefill_tokens_per_second = -1;
  EXPECT_CODE(store_->Match(match), Code::kInvalidArgument);
  EXPECT_CODE(store_->Explain({match, {}}), Code::kInvalidArgument);
  AttachSpec attach{spec_.name, "", prompt_.tokens};
  attach.engine = match.engine;
  EXPECT_CODE(store_->Attach(attach), Code::kInvalidArgument);
}

TEST_F(EstimateTest, TheAdviceFlipsWhereTheArithmeticSays) {
  PutAndOpenCold("TheAdviceFlips");
  Restore();
  const ReuseEstimate alone = Match();
  ASSERT_EQ(alone.restore.source, EstimateSource::kMeasured);
  // Each layer waited for the disk once, at least.
  const std::chrono::duration<double> waited = kReadDelay * spec_.geometry.n_layers;
  EXPECT_GE(alone.restore.seconds, waited.count());
  EXPECT_EQ(alone.advice, ReuseAdvice::kUnknown);
  const double even = kReadTokens / alone.restore.seconds;
  EXPECT_EQ(Match({even * 1.01}).advice, ReuseAdvice::kRecompute);
  EXPECT_EQ(Match({even * 0.99}).advice, ReuseAdvice::kRestore);
  const auto stats = store_->Stats();
  ASSERT_OK(stats);
  EXPECT_EQ(stats->advised_recompute, 1u);
  EXPECT_EQ(stats->advised_restore, 1u);
  EXPECT_EQ(stats->advised_attach, 0u);

  // What the engine has already is neither restored nor computed.
  const ReuseEstimate rest = Match({even, 200, 0});
  EXPECT_EQ(rest.tokens, 100u);
  EXPECT_EQ(rest.disk_bytes, AllBytes() / 3);
  EXPECT_DOUBLE_EQ(rest.recompute.seconds, 100 / even);
  EXPECT_LT(rest.restore.seconds, alone.restore.seconds);
  EXPECT_EQ(Match({even, kReadTokens + 5, 0}), ReuseEstimate());

  // An attach says the same, without the time that opening takes.
  ReuseEstimate attached = AttachFull()->info().estimate;
  ASSERT_EQ(attached.restore.source, EstimateSource::kMeasured);
  EXPECT_LT(attached.restore.seconds, alone.restore.seconds);
  const double even_attached = kReadTokens / attached.restore.seconds;
  EXPECT_EQ(AttachFull({even_attached * 1.01})->info().estimate.advice, ReuseAdvice::kRecompute);
  EXPECT_EQ(AttachFull({even_attached * 0.99})->info().estimate.advice, ReuseAdvice::kRestore);
  // So does an explanation.
  const auto why = store_->Explain({{spec_.name, "", prompt_.tokens, false, "", {1e12}}, {}});
  ASSERT_OK(why);
  EXPECT_EQ(why->match.estimate.advice, ReuseAdvice::kRecompute);
}

TEST_F(EstimateTest, KnowsWhatLiesInMemory) {
  options_.host_tier_bytes = 8 << 20;
  PutAndOpenCold("KnowsWhatLiesInMemory");
  EXPECT_EQ(Match().memory_bytes, 0u);
  EXPECT_EQ(Match().disk_bytes, AllBytes());
  RestoreLayers(1);
  EXPECT_EQ(Match().memory_bytes, AllBytes() / 2);
  EXPECT_EQ(Match().disk_bytes, AllBytes() / 2);
  RestoreLayers(2);
  ReuseEstimate e = Match();
  EXPECT_EQ(e.memory_bytes, AllBytes());
  EXPECT_EQ(e.disk_bytes, 0u);
  EXPECT_EQ(e.restore.source, EstimateSource::kMeasured);  // the second time read one from memory
  OpenCold();
  EXPECT_EQ(Match().memory_bytes, 0u);
}

TEST_F(EstimateTest, BeginsWithWhatTheLastProcessMeasured) {
  PutAndOpenCold("BeginsWithWhatTheLastProcessMeasured");
  Restore();
  OpenCold();
  EXPECT_EQ(Match().restore.source, EstimateSource::kEarlier);
  Restore();
  EXPECT_EQ(Match().restore.source, EstimateSource::kMeasured);
  store_.reset();
  std::ofstream(options_.dir / "rates") << "{\"version\":1,\"disk_bytes_per_second\":";
  OpenCold();
  EXPECT_EQ(Match().restore, TimeEstimate());
}

TEST_F(EstimateTest, PrefillIsLearntOfPutsThatStreamIt) {
  Open();
  prompt_ = MakePrompt(spec_.geometry, kReadTokens, Seed("PrefillIsLearntOfPutsThatStreamIt"));
  PutStreaming({}, "buffered");
  PutStreaming(0, "streaming");
  PutStreaming(kReadTokens, "cached");  // the engine had all rows already
  EXPECT_EQ(Match({}, "buffered").recompute, TimeEstimate());
  EXPECT_EQ(Match({}, "cached").recompute, TimeEstimate());
  const ReuseEstimate learnt = Match({}, "streaming");
  EXPECT_EQ(learnt.recompute.source, EstimateSource::kLearnt);
  EXPECT_GT(learnt.recompute.seconds, 0);
  EXPECT_DOUBLE_EQ(learnt.recompute.seconds, kReadTokens / learnt.prefill_tokens_per_second);
  EXPECT_EQ(Match({5}, "streaming").recompute, (TimeEstimate{60, EstimateSource::kGiven}));
}

// Own tokens in memory take their time, too, and are no part of the prefix that others attach to.
TEST_F(EstimateTest, RetrievingIsNotLearntOfStepsOverManyOwnTokens) {
  PutAndOpenCold("RetrievingIsNotLearntOfStepsOverManyOwnTokens");
  StepPolicy policy;
  policy.k = 25;
  policy.selector = "exact";
  const auto session = Attach(prompt_, policy);
  ASSERT_NE(session, nullptr);
  const LayerShape shape = spec_.geometry.layer(0);
  std::vector<float> y(shape.n_q_heads * shape.value_dim), lse(shape.n_q_heads);
  constexpr uint32_t kMany = 100;
  ASSERT_OK(session->Append(0, kMany, prompt_.K(0, 0, kMany), prompt_.V(0, 0, kMany)));
  const auto step = [&] {
    return session->StepAppend(0, prompt_.Q(0, kReadTokens - 1, 1),
                               prompt_.K(0, kReadTokens - 1, 1), prompt_.V(0, kReadTokens - 1, 1),
                               y, lse, nullptr);
  };
  ASSERT_OK(step());
  EXPECT_EQ(Match().retrieve, TimeEstimate());
  // A few are nothing beside the prefix, and engines that append with each step have them always.
  ASSERT_OK(session->Truncate(0));
  ASSERT_OK(step());
  EXPECT_EQ(Match().retrieve.source, EstimateSource::kMeasured);
}

// The second move reads what the first one moved, in the background.
TEST_F(EstimateTest, RestoringIsNotLearntOfWhatMovesRead) {
  PutAndOpenCold("RestoringIsNotLearntOfWhatMovesRead");
  AttachSpec spec;
  spec.model = spec_.name;
  spec.prefix = prefix_;
  spec.policy.mode = StepMode::kFull;
  spec.own_memory_tokens = kMinOwnMemoryTokens;
  const auto session = store_->Attach(spec);
  ASSERT_OK(session);
  for (uint64_t moves = 1; moves <= 2; ++moves) {
    for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
      ASSERT_OK((*session)->Append(layer, kReadTokens, prompt_.K(layer, 0, kReadTokens),
                                   prompt_.V(layer, 0, kReadTokens)));
    }
    for (int i = 0; i < 20'000 && store_->Stats()->own_moves < moves; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  EXPECT_EQ(store_->Stats()->own_moves, 2u);
  EXPECT_EQ(Match().restore, TimeEstimate());
  Restore();
  EXPECT_EQ(Match().restore.source, EstimateSource::kMeasured);
}

TEST_F(EstimateTest, RetrievingIsLearntOfTheTenantsSteps) {
  PutAndOpenCold("RetrievingIsLearntOfTheTenantsSteps");
  Restore();
  StepPolicy policy;
  policy.k = 25;
  policy.selector = "exact";
  const auto session = Attach(prompt_, policy);
  ASSERT_NE(session, nullptr);
  EXPECT_EQ(session->info().estimate.retrieve, TimeEstimate());
  for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
    Step(*session, layer, prompt_.Q(layer, kReadTokens - 1, 1));
  }
  const ReuseEstimate known = Match();
  ASSERT_EQ(known.retrieve.source, EstimateSource::kMeasured);
  EXPECT_EQ(known.advice, ReuseAdvice::kUnknown);  // for how many tokens?
  const auto many = static_cast<uint32_t>(known.restore.seconds / known.retrieve.seconds) + 2;
  EXPECT_EQ(Match({0, 0, many}).advice, ReuseAdvice::kRestore);
  EXPECT_EQ(Match({1e-9, 0, many}).advice, ReuseAdvice::kRestore);
  EXPECT_EQ(Match({1e12, 0, many}).advice, ReuseAdvice::kRecompute);
  // The same prompt of another tenant has steps of its own.
  PutStreaming({}, "other");
  EXPECT_EQ(Match({}, "other").retrieve, TimeEstimate());
}

}  // namespace
}  // namespace prefixd::testing
