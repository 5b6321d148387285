// Tests the comparison with full attention: its metrics, and that what is read in one pass is what
// decoding token by token reads.
#include "demo/compare.h"

#include <cmath>
#include <random>

#include "decoder/attention/local_attention.h"
#include "decoder/attention/put_attention.h"
#include "decoder/model/generate.h"
#include "prefixd/client.h"
#include "tests/decoder/tiny_model.h"
#include "tests/support/files.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::demo {
namespace {

using decoder::testing::TinyModel;
using prefixd::testing::TempDir;

constexpr uint32_t kVocab = 264, kPrompt = 200;

template <typename T>
T Take(Result<T> result) {
  EXPECT_TRUE(result.ok()) << (result.ok() ? "" : result.error().message);
  return std::move(result).value();
}

TEST(CompareLogitsTest, IsTheDivergenceInNats) {
  // Probabilities 1/2, 1/4, 1/4 and 1/4, 1/2, 1/4, each with a shift of its own.
  const std::vector<float> full = {7 + std::log(2.0f), 7, 7}, other = {-3, -3 + std::log(2.0f), -3};
  const TokenDifference found = CompareLogits(full, other, 0);
  EXPECT_NEAR(found.kl, 0.25 * std::log(2.0), 1e-6);
  EXPECT_NEAR(found.nll, std::log(4.0), 1e-6);
  EXPECT_FALSE(found.same);
  const TokenDifference none = CompareLogits(full, full, 2);
  EXPECT_EQ(none.kl, 0);
  EXPECT_TRUE(none.same);
}

class ComparisonTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::mt19937_64 random(prefixd::testing::Seed("Comparison"));
    model_.emplace(TinyModel::Random("llama", random()).Load());
    std::vector<uint32_t> prompt;
    for (uint32_t i = 0; i < kPrompt; ++i) prompt.push_back(uint32_t(random() % kVocab));
    for (uint32_t i = 0; i < 40; ++i) follow_.push_back(uint32_t(random() % kVocab));
    RuntimeOptions options;
    options.dir = dir_ / "store";
    options.threads = 2;
    options.compute = "cpu";
    store_ = Take(Open(options));
    const KvGeometry geometry = model_->Geometry(DType::kF32);
    ASSERT_TRUE(
        store_->RegisterModel({.name = "tiny", .geometry = geometry, .identity = {{"w", "t"}}})
            .ok());
    auto put = Take(store_->BeginPut({.model = "tiny", .tokens = prompt}));
    decoder::LocalAttention local(geometry);
    decoder::PutAttention storing(local, *put, geometry);
    ASSERT_TRUE(model_->Forward(prompt, 0, storing, 0, {}).ok());
    const PutResult stored = Take(put->Commit());
    ASSERT_TRUE(store_->WaitReady(stored.prefix, nullptr).ok());
    session_ = Take(store_->Attach(
        {.model = "tiny", .prefix = stored.prefix, .policy = {.mode = StepMode::kFull}}));
  }

  // Decodes `targets` one by one after the first 6 tokens of follow_, which attend exactly.
  std::vector<double> DecodedOneByOne(const StepPolicy& policy,
                                      const std::vector<uint32_t>& targets) {
    decoder::SplicedAttention attention(session_);
    const std::span<const uint32_t> exact(follow_.data(), 6);
    EXPECT_TRUE(model_->Forward(exact, kPrompt, attention, 0, {}).ok());
    EXPECT_TRUE(session_->SetPolicy(policy).ok());
    std::vector<float> logits(kVocab);
    EXPECT_TRUE(model_->Forward({&follow_[6], 1}, kPrompt + 6, attention, 1, logits).ok());
    return Take(decoder::ContinuationNll(*model_, attention, logits, kPrompt + 7, targets, 1));
  }

  TempDir dir_;
  std::optional<decoder::Model> model_;
  std::vector<uint32_t> follow_;
  std::unique_ptr<Store> store_;
  std::shared_ptr<Session> session_;
};

TEST_F(ComparisonTest, ForcedTokensReadAsDecodingDoes) {
  Passage passage;
  passage.exact.assign(follow_.begin(), follow_.begin() + 6);
  passage.read.assign(follow_.begin() + 6, follow_.end() - 1);
  passage.targets.assign(follow_.begin() + 7, follow_.end());
  const std::vector<Passage> passages = {passage};
  Comparison comparison(*model_, session_, passages, 8, false);
  const ReadingResult full = Take(comparison.Full());
  const StepPolicy few{.estimator = EstimatorKind::kNone, .k = 5, .selector = "exact"};
  for (const StepPolicy& policy : {StepPolicy{.mode = StepMode::kFull}, few}) {
    const ReadingResult read = Take(comparison.Read(policy));
    const std::vector<double> expected = DecodedOneByOne(policy, passage.targets);
    double difference = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(read.passages[0].tokens[i].nll, expected[i], 1e-4);
      difference += read.passages[0].tokens[i].kl;
    }
    const bool everything = policy.mode == StepMode::kFull;
    EXPECT_EQ(difference < 1e-6, everything) << difference;
    EXPECT_EQ(read.errors.size(), full.errors.size() + 12);  // 3 layers of 4 heads
    EXPECT_EQ(*std::max_element(read.errors.begin(), read.errors.end()) < 1e-4, everything);
  }
  EXPECT_EQ(Take(comparison.Entropy()).size(), 12u);
}

TEST_F(ComparisonTest, WrittenTextsAreThoseOfGreedyDecoding) {
  Passage passage;
  passage.exact.assign(follow_.begin(), follow_.begin() + 6);
  passage.read = {follow_[6]};
  passage.generate = 30;
  const std::vector<Passage> passages = {passage};
  Comparison comparison(*model_, session_, passages, 0, false);
  const ReadingResult full = Take(comparison.Full());
  EXPECT_EQ(full.passages[0].text.size(), 30u);
  const StepPolicy anchors{.mode = StepMode::kAnchors};
  const std::vector<uint32_t> written = Take(comparison.Read(anchors)).passages[0].text;
  // Greedy decoding chooses the most likely token each time: no other text is as likely, token by
  // token.
  ASSERT_EQ(written.size(), 30u);
  decoder::SplicedAttention attention(session_);
  ASSERT_TRUE(model_->Forward(passage.exact, kPrompt, attention, 0, {}).ok());
  ASSERT_TRUE(session_->SetPolicy(anchors).ok());
  std::vector<float> logits(kVocab);
  ASSERT_TRUE(model_->Forward(passage.read, kPrompt + 6, attention, 1, logits).ok());
  EXPECT_EQ(written, Take(decoder::GreedyDecode(*model_, attention, logits, kPrompt + 7,
                                                {.max_tokens = 30})));
  EXPECT_EQ(Take(comparison.Read({.mode = StepMode::kFull})).passages[0].text,
            full.passages[0].text);
}

TEST_F(ComparisonTest, BudgetsThatCannotBeKeptAreSaid) {
  const std::vector<Passage> passages = {{.read = {1, 2}, .targets = {2, 3}}};
  Comparison comparison(*model_, session_, passages, 0, false);
  Take(comparison.Full());
  const ReadingResult read = Take(comparison.Read({.budget = 0.001}));
  ASSERT_TRUE(read.infeasible.has_value());
  EXPECT_NE(read.infeasible->find("cannot pay"), std::string::npos);
  EXPECT_TRUE(read.passages.empty());
}

}  // namespace
}  // namespace prefixd::demo
