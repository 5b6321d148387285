#include "decoder/model/generate.h"

#include <cmath>

#include "decoder/attention/local_attention.h"
#include "decoder/checkpoint/tokenizer.h"
#include "tests/decoder/tiny_model.h"
#include "tests/support/test.h"

namespace prefixd::decoder {
namespace {

using testing::TinyModel;

TEST(Generate, ArgmaxAndNll) {
  const std::vector<float> logits = {1, 3, 3, -100};
  EXPECT_EQ(Argmax(logits), 1u);
  const double z = std::exp(1.0) + 2 * std::exp(3.0) + std::exp(-100.0);
  EXPECT_NEAR(NegativeLogLikelihood(logits, 0), -1 + std::log(z), 1e-9);
  EXPECT_NEAR(NegativeLogLikelihood(logits, 3), 100 + std::log(z), 1e-9);
}

class GenerateTest : public ::testing::Test {
 protected:
  GenerateTest() : model_(TinyModel::Random("llama", 11).Load()) {}

  // Holds a prompt's logits, and its keys and values in a fresh backend.
  LocalAttention Prefill(std::vector<float>& logits) const {
    const std::vector<uint32_t> prompt = {256, 72, 101, 108, 108, 111};
    LocalAttention attention(model_.Geometry(DType::kBf16));
    logits.resize(264);
    EXPECT_TRUE(model_.Forward(prompt, 0, attention, 1, logits).ok());
    return attention;
  }

  Model model_;
};

// Scoring must find the tokens of greedy decoding the likeliest at each place, and the likelihoods
// must not depend on how many tokens go through together.
TEST_F(GenerateTest, GreedyAndScoringAgree) {
  std::vector<float> logits;
  LocalAttention attention = Prefill(logits);
  GreedyOptions options;
  options.max_tokens = 20;
  const auto text = GreedyDecode(model_, attention, logits, 6, options);
  ASSERT_TRUE(text.ok()) << text.error().message;
  ASSERT_EQ(text->size(), 20u);
  EXPECT_EQ((*text)[0], Argmax(logits));
  EXPECT_EQ(attention.position(), 6u + 19);

  LocalAttention block = Prefill(logits), single = Prefill(logits);
  const auto a = ContinuationNll(model_, block, logits, 6, *text, 7);
  const auto b = ContinuationNll(model_, single, logits, 6, *text, 1);
  ASSERT_TRUE(a.ok() && b.ok());
  ASSERT_EQ(a->size(), 20u);
  for (size_t i = 0; i < a->size(); ++i) EXPECT_NEAR((*a)[i], (*b)[i], 1e-3);
  // A token that was not chosen is less likely.
  std::vector<uint32_t> other(text->begin(), text->end());
  other.back() = (other.back() + 1) % 264;
  LocalAttention third = Prefill(logits);
  const auto c = ContinuationNll(model_, third, logits, 6, other, 7);
  ASSERT_TRUE(c.ok());
  EXPECT_GT(c->back(), a->back());
  EXPECT_EQ(c->front(), a->front());
}

TEST_F(GenerateTest, StopsWhereTold) {
  std::vector<float> logits;
  LocalAttention attention = Prefill(logits);
  GreedyOptions options;
  options.max_tokens = 8;
  const auto text = GreedyDecode(model_, attention, logits, 6, options);
  ASSERT_TRUE(text.ok());
  // Decoding stops at the token that would come third (or at its first occurrence).
  options.stop = {(*text)[2]};
  const auto first = std::find(text->begin(), text->end(), (*text)[2]);
  LocalAttention again = Prefill(logits);
  const auto cut = GreedyDecode(model_, again, logits, 6, options);
  ASSERT_TRUE(cut.ok());
  EXPECT_EQ(*cut, std::vector<uint32_t>(text->begin(), first));
  options.stop = {};
  options.on_token = [](uint32_t) { return false; };
  LocalAttention once = Prefill(logits);
  EXPECT_EQ(GreedyDecode(model_, once, logits, 6, options).value().size(), 1u);
}

TEST_F(GenerateTest, RefusesBadInput) {
  std::vector<float> logits;
  LocalAttention attention = Prefill(logits);
  const std::vector<uint32_t> outside = {264};
  EXPECT_FALSE(ContinuationNll(model_, attention, logits, 6, outside).ok());
  EXPECT_FALSE(ContinuationNll(model_, attention, {}, 6, outside).ok());
  EXPECT_FALSE(GreedyDecode(model_, attention, {}, 6, {}).ok());
}

TEST(Tokenizer, BytesThereAndBack) {
  ModelConfig config;
  config.vocab_size = 264;
  config.bos = 256;
  config.eos = {257};
  const auto tokenizer = ByteTokenizer::For(config);
  ASSERT_TRUE(tokenizer.ok());
  std::string text;
  for (int c = 0; c < 256; ++c) text += static_cast<char>(c);
  std::vector<uint32_t> ids = tokenizer->Encode(text, true);
  ASSERT_EQ(ids.size(), 257u);
  EXPECT_EQ(ids[0], 256u);
  EXPECT_EQ(ids[1 + 0xe9], 0xe9u);
  ids.push_back(257);
  EXPECT_EQ(tokenizer->Decode(ids), text);
  EXPECT_EQ(tokenizer->Encode("a", false), (std::vector<uint32_t>{97}));

  config.vocab_size = 256;
  config.bos.reset();
  config.eos.clear();
  const auto bare = ByteTokenizer::For(config);
  ASSERT_TRUE(bare.ok());
  EXPECT_EQ(bare->Encode("a", true), (std::vector<uint32_t>{97}));  // the vocabulary has no BOS
  config.vocab_size = 255;
  EXPECT_FALSE(ByteTokenizer::For(config).ok());
  config.vocab_size = 32000;
  config.bos = 1;
  EXPECT_FALSE(ByteTokenizer::For(config).ok());
}

}  // namespace
}  // namespace prefixd::decoder
