// Tests the choice of estimators per head on a real model: on queries that were not used for the
// choice, sessions that use it are not clearly worse than with the best single estimator, under
// each selector.
#include <filesystem>
#include <fstream>
#include <iterator>

#include "attention/reference/diagnostics.h"
#include "decoder/attention/local_attention.h"
#include "decoder/attention/put_attention.h"
#include "decoder/checkpoint/checkpoint.h"
#include "decoder/checkpoint/tokenizer.h"
#include "decoder/model/model.h"
#include "runtime/ingest/choice.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::decoder {
namespace {

constexpr uint32_t kPrompt = 6000;
constexpr uint32_t kHeldOut = 96, kSpacing = 4;  // every fourth query of the text that follows
constexpr double kBudget = 0.05;

class ModelChoiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::filesystem::path checkpoint =
        std::filesystem::path(PREFIXD_SOURCE_DIR) / "models/prefixd-tiny";
    auto model = Model::Load(checkpoint, {});
    ASSERT_OK(model);
    geometry_ = model->Geometry(DType::kBf16);
    std::ifstream file("/usr/share/common-licenses/GPL-3");
    std::string text{std::istreambuf_iterator<char>(file), {}};
    ASSERT_GT(text.size(), kPrompt + kHeldOut);
    text.resize(kPrompt + kHeldOut);
    const auto tokenizer = ByteTokenizer::For(model->config());
    ASSERT_OK(tokenizer);
    const std::vector<uint32_t> tokens = tokenizer->Encode(text, /*with_bos=*/false);
    prompt_.assign(tokens.begin(), tokens.begin() + kPrompt);

    RuntimeOptions options;
    options.dir = dir_.path() / "store";
    options.threads = 2;
    options.compute = "cpu";
    options.recluster = false;
    options.choice_budgets = {kBudget};
    auto store = LocalStore::Open(options);
    ASSERT_OK(store);
    store_ = std::move(store).value();
    ModelSpec spec{
        .name = "model",
        .geometry = geometry_,
        .identity = {{"weights", "w"}},
        .feature_maps = {checkpoint / "phi-2048.safetensors", checkpoint / "phi-8192.safetensors"}};
    ASSERT_OK(store_->RegisterModel(spec));
    auto put = store_->BeginPut({"model", "", prompt_, "text"});
    ASSERT_OK(put);
    LocalAttention local(geometry_);
    ObservedAttention prefill(
        local, [&](uint32_t layer, uint32_t first, uint32_t count, std::span<const float> q) {
          ASSERT_OK((*put)->WriteQueries(layer, first, count, q));
        });
    ASSERT_OK(model->Forward(prompt_, 0, prefill, 0, {}));
    ASSERT_OK(PutCache(local.cache(), 0, kPrompt, **put));
    const auto stored = (*put)->Commit();
    ASSERT_OK(stored);
    ASSERT_OK(store_->WaitReady(stored->prefix, nullptr));

    queries_.resize(geometry_.n_layers);
    ObservedAttention decode(
        local, [&](uint32_t layer, uint32_t first, uint32_t, std::span<const float> q) {
          if (first % kSpacing == 0) queries_[layer].emplace_back(q.begin(), q.end());
        });
    for (uint32_t i = kPrompt; i < tokens.size(); ++i) {
      ASSERT_OK(model->Forward({&tokens[i], 1}, i, decode, 0, {}));
    }
    StepPolicy full;
    full.mode = StepMode::kFull;
    truth_ = Outputs(full);
  }

  // [layer][query]: y of all heads; empty where the budget does not pay.
  std::vector<std::vector<std::vector<float>>> Outputs(const StepPolicy& policy) {
    auto session = store_->Attach({"model", "", prompt_, "", 0, policy});
    if (!session.ok()) {
      EXPECT_EQ(session.error().code, Code::kInfeasible) << session.error().ToString();
      return {};
    }
    std::vector<std::vector<std::vector<float>>> outputs(geometry_.n_layers);
    std::vector<float> lse(geometry_.n_q_heads);
    for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
      for (const auto& q : queries_[layer]) {
        auto& y = outputs[layer].emplace_back(size_t{geometry_.n_q_heads} * geometry_.value_dim);
        EXPECT_TRUE((*session)->Step(layer, q, y, lse, nullptr).ok());
      }
    }
    return outputs;
  }

  // Returns the mean relative l1 error per query head.
  std::vector<double> Errors(const StepPolicy& policy) {
    const auto outputs = Outputs(policy);
    std::vector<double> errors;
    const size_t dim = geometry_.value_dim;
    for (size_t layer = 0; layer < outputs.size(); ++layer) {
      const size_t count = outputs[layer].size();
      for (size_t h = 0; h < geometry_.n_q_heads; ++h) {
        double sum = 0;
        for (size_t i = 0; i < count; ++i) {
          sum += RelativeL1(std::span(outputs[layer][i]).subspan(h * dim, dim),
                            std::span(truth_[layer][i]).subspan(h * dim, dim));
        }
        errors.push_back(sum / static_cast<double>(count));
      }
    }
    return errors;
  }

  prefixd::testing::TempDir dir_;
  KvGeometry geometry_;
  std::vector<uint32_t> prompt_;
  std::unique_ptr<LocalStore> store_;
  std::vector<std::vector<std::vector<float>>> queries_, truth_;  // [layer][query]
};

double Mean(std::span<const double> x) {
  double sum = 0;
  for (double v : x) sum += v;
  return sum / static_cast<double>(x.size());
}

TEST_F(ModelChoiceTest, IsNeverClearlyWorseThanTheBestFixedEstimator) {
  for (const std::string selector : {"codes", "exact"}) {
    StepPolicy policy;
    policy.selector = selector;
    policy.budget = kBudget;
    const std::vector<double> chosen = Errors(policy);
    ASSERT_EQ(chosen.size(), size_t{geometry_.n_layers} * geometry_.n_q_heads);
    size_t compared = 0;
    for (const EstimatorVariant& estimator : DefaultEstimators()) {
      policy.estimator = estimator;
      const std::vector<double> fixed = Errors(policy);
      if (fixed.empty()) continue;
      ++compared;
      EXPECT_LE(Mean(chosen), 1.05 * Mean(fixed) + kErrorResolution)
          << estimator.Name() << ", " << selector;
    }
    EXPECT_GE(compared, 5u);
  }
}

}  // namespace
}  // namespace prefixd::decoder
