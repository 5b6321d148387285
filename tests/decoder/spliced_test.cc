// Tests the splice: a prompt that is stored in an embedded store and attended to by
// SplicedAttention gives what LocalAttention gives with everything in memory.
#include <cmath>
#include <memory>
#include <random>

#include "decoder/attention/local_attention.h"
#include "decoder/attention/put_attention.h"
#include "decoder/attention/spliced_attention.h"
#include "decoder/model/generate.h"
#include "tests/decoder/max_difference.h"
#include "tests/decoder/tiny_model.h"
#include "tests/support/files.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::decoder {
namespace {

using prefixd::testing::TempDir;
using testing::MaxDifference;
using testing::TinyModel;

constexpr uint32_t kVocab = 264, kPrompt = 230;

template <typename T>
T Take(Result<T> result) {
  EXPECT_TRUE(result.ok()) << (result.ok() ? "" : result.error().message);
  return std::move(result).value();
}

// Holds a model, a prompt, a question, and a store that contains the prompt.
class SplicedTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    std::mt19937_64 random(seed_);
    model_.emplace(TinyModel::Random(GetParam(), random()).Load());
    for (uint32_t i = 0; i < kPrompt; ++i) prompt_.push_back(uint32_t(random() % kVocab));
    for (uint32_t i = 0; i < 11; ++i) question_.push_back(uint32_t(random() % kVocab));
    // The cache is f32, so that rounding makes no difference between the two ways of summing.
    geometry_ = model_->Geometry(DType::kF32);
    RuntimeOptions options;
    options.dir = dir_ / "store";
    options.threads = 2;
    options.compute = "cpu";
    client_ = Take(Open(options));
    const Status registered = client_->RegisterModel({.name = "tiny",
                                                      .geometry = geometry_,
                                                      .identity = {{"weights", "t"}},
                                                      .feature_maps = {}});
    ASSERT_TRUE(registered.ok()) << registered.error().message;

    auto put = Take(
        client_->BeginPut({.model = "tiny", .tenant = "", .tokens = prompt_, .label = "prompt"}));
    LocalAttention local(geometry_);
    PutAttention attention(local, *put, geometry_);
    const Status prefilled = model_->Forward(prompt_, 0, attention, 0, {});
    ASSERT_TRUE(prefilled.ok()) << prefilled.error().message;
    const PutResult stored = Take(put->Commit());
    EXPECT_EQ(stored.n_tokens, kPrompt);
    const Status ready = client_->WaitReady(stored.prefix, nullptr);
    ASSERT_TRUE(ready.ok()) << ready.error().message;
  }

  std::shared_ptr<Session> Attach(const StepPolicy& policy) {
    AttachSpec spec;
    spec.model = "tiny";
    spec.tokens = prompt_;
    spec.policy = policy;
    return Take(client_->Attach(spec));
  }

  static StepPolicy Policy(StepMode mode) {
    StepPolicy policy;
    policy.mode = mode;
    policy.estimator = EstimatorKind::kNone;
    return policy;
  }

  // Returns the logits of the question's tokens.
  std::vector<float> Ask(AttentionBackend& attention) const {
    std::vector<float> logits(question_.size() * kVocab);
    const auto n = static_cast<uint32_t>(question_.size());
    const Status status = model_->Forward(question_, kPrompt, attention, n, logits);
    EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
    return logits;
  }

  LocalAttention PrefilledLocal() const {
    LocalAttention local(geometry_);
    EXPECT_TRUE(model_->Forward(prompt_, 0, local, 0, {}).ok());
    return local;
  }

  const uint64_t seed_ = prefixd::testing::Seed("Spliced");
  TempDir dir_;
  std::optional<Model> model_;
  KvGeometry geometry_;
  std::vector<uint32_t> prompt_, question_;
  std::unique_ptr<Store> client_;
};

TEST_P(SplicedTest, FullAttentionIsTheSame) {
  LocalAttention local = PrefilledLocal();
  const std::vector<float> truth = Ask(local);
  for (const BlockMode mode : {BlockMode::kExact, BlockMode::kStep}) {
    SplicedAttention spliced(Attach(Policy(StepMode::kFull)), mode);
    EXPECT_EQ(spliced.position(), kPrompt);
    EXPECT_LT(MaxDifference(Ask(spliced), truth), 1e-3);
    EXPECT_EQ(spliced.step_ledger().steps > 0, mode == BlockMode::kStep);
  }
}

TEST_P(SplicedTest, DecodesTheSameText) {
  LocalAttention local = PrefilledLocal();
  SplicedAttention spliced(Attach(Policy(StepMode::kFull)));
  const std::vector<float> a = Ask(local), b = Ask(spliced);
  const auto last = [](const std::vector<float>& logits) { return std::span(logits).last(kVocab); };
  GreedyOptions options;
  options.max_tokens = 24;
  const uint32_t position = kPrompt + static_cast<uint32_t>(question_.size());
  const auto text = Take(GreedyDecode(*model_, local, last(a), position, options));
  // Teacher forcing keeps a near tie from sending the two apart.
  local.TruncateTo(position);
  const auto truth = Take(ContinuationNll(*model_, local, last(a), position, text, 1));
  const auto nll = Take(ContinuationNll(*model_, spliced, last(b), position, text, 1));
  for (size_t i = 0; i < truth.size(); ++i) EXPECT_NEAR(nll[i], truth[i], 1e-3);
  EXPECT_EQ(spliced.position(), position + text.size() - 1);
  EXPECT_GT(spliced.step_ledger().logical_bytes, 0u);
}

TEST_P(SplicedTest, RetrievingEverythingIsFullAndAnchorsAreNot) {
  LocalAttention local = PrefilledLocal();
  const std::vector<float> truth = Ask(local);
  StepPolicy everything = Policy(StepMode::kRetrieve);
  everything.k = kPrompt;
  SplicedAttention all(Attach(everything), BlockMode::kStep);
  EXPECT_LT(MaxDifference(Ask(all), truth), 1e-3);
  SplicedAttention anchors(Attach(Policy(StepMode::kAnchors)), BlockMode::kStep);
  EXPECT_GT(MaxDifference(Ask(anchors), truth), 1e-2);
}

TEST_P(SplicedTest, PuttingACacheStoresTheSameRows) {
  LocalAttention local = PrefilledLocal();
  auto put =
      Take(client_->BeginPut({.model = "tiny", .tenant = "other", .tokens = prompt_, .label = ""}));
  const TokenRange missing = put->missing();
  EXPECT_EQ(missing, (TokenRange{0, kPrompt}));  // tenants share nothing
  const Status written = PutCache(local.cache(), missing.begin, missing.size(), *put);
  ASSERT_TRUE(written.ok()) << written.error().message;
  const PutResult stored = Take(put->Commit());
  AttachSpec spec;
  spec.model = "tiny";
  spec.tenant = "other";
  spec.tokens = prompt_;
  spec.policy = Policy(StepMode::kFull);
  ASSERT_TRUE(client_->WaitReady(stored.prefix, nullptr).ok());
  const auto b = Take(client_->Attach(spec)), a = Attach(Policy(StepMode::kFull));
  for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
    for (uint32_t head = 0; head < geometry_.n_kv_heads; ++head) {
      std::vector<std::byte> rows_a(kPrompt * geometry_.row(0).bytes()), rows_b(rows_a.size());
      ASSERT_TRUE(a->ReadRange(layer, head, {0, kPrompt}, rows_a).ok());
      ASSERT_TRUE(b->ReadRange(layer, head, {0, kPrompt}, rows_b).ok());
      EXPECT_EQ(rows_a, rows_b) << "layer " << layer << " head " << head;
    }
  }
}

TEST_P(SplicedTest, AnotherQuestionOnTheSameSession) {
  SplicedAttention spliced(Attach(Policy(StepMode::kFull)));
  const std::vector<float> first = Ask(spliced);
  spliced.TruncateTo(kPrompt);
  EXPECT_EQ(Ask(spliced), first);
  // A detached session returns an error.
  ASSERT_TRUE(spliced.session().Detach().ok());
  spliced.TruncateTo(kPrompt);
  std::vector<float> logits(kVocab);
  const Status status = model_->Forward(question_, kPrompt, spliced, 1, logits);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, Code::kFailedPrecondition);
}

INSTANTIATE_TEST_SUITE_P(Families, SplicedTest, ::testing::Values("llama", "qwen3"));

}  // namespace
}  // namespace prefixd::decoder
