#include "decoder/model/model.h"

#include <cmath>
#include <random>

#include "decoder/attention/local_attention.h"
#include "tests/decoder/max_difference.h"
#include "tests/decoder/tiny_model.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::decoder {
namespace {

using testing::MaxDifference;
using testing::TinyModel;

std::vector<uint32_t> RandomTokens(std::mt19937_64& random, size_t n) {
  std::vector<uint32_t> tokens(n);
  for (uint32_t& token : tokens) token = uint32_t(random() % 264);
  return tokens;
}

// One call, chunks of several sizes, and token by token must give the same logits.
TEST(Model, AnyWayToPrefillIsTheSame) {
  const uint64_t seed = prefixd::testing::Seed("AnyWayToPrefillIsTheSame");
  for (const char* family : {"llama", "qwen3"}) {
    std::mt19937_64 random(seed);
    const TinyModel tiny = TinyModel::Random(family, random());
    const auto tokens = RandomTokens(random, 150);
    const uint32_t n_logits = 40;
    ModelOptions options;
    options.chunk_tokens = 4096;
    const Model whole = tiny.Load(options);
    // The cache is f32, so that its rounding makes no difference.
    LocalAttention attention(whole.Geometry(DType::kF32));
    std::vector<float> truth(n_logits * size_t{264});
    ASSERT_TRUE(whole.Forward(tokens, 0, attention, n_logits, truth).ok());
    EXPECT_EQ(attention.position(), tokens.size());

    for (const uint32_t chunk : {1u, 7u, 64u, 150u}) {
      options.chunk_tokens = chunk;
      const Model model = tiny.Load(options);
      LocalAttention chunked(model.Geometry(DType::kF32));
      std::vector<float> logits(truth.size());
      ASSERT_TRUE(model.Forward(tokens, 0, chunked, n_logits, logits).ok());
      EXPECT_LT(MaxDifference(logits, truth), 2e-4)
          << family << " chunk " << chunk << " seed " << seed;
    }
    // Several calls use one cache.
    LocalAttention stepped(whole.Geometry(DType::kF32));
    std::vector<float> one(264);
    for (uint32_t i = 0; i < tokens.size(); ++i) {
      ASSERT_TRUE(whole.Forward({&tokens[i], 1}, i, stepped, 1, one).ok());
      if (i + n_logits >= tokens.size()) {
        const size_t row = i + n_logits - tokens.size();
        EXPECT_LT(MaxDifference(one, std::span(truth).subspan(row * 264, 264)), 2e-4);
      }
    }
  }
}

TEST(Model, TruncatingAsksAgain) {
  const Model model = TinyModel::Random("llama", 5).Load();
  std::mt19937_64 random(5);
  const auto prompt = RandomTokens(random, 60), question = RandomTokens(random, 9);
  LocalAttention attention(model.Geometry(DType::kBf16));
  std::vector<float> first(264), again(264);
  ASSERT_TRUE(model.Forward(prompt, 0, attention, 0, {}).ok());
  ASSERT_TRUE(model.Forward(question, 60, attention, 1, first).ok());
  EXPECT_EQ(attention.position(), 69u);
  attention.TruncateTo(60);
  ASSERT_TRUE(model.Forward(question, 60, attention, 1, again).ok());
  EXPECT_EQ(first, again);
}

TEST(Model, RefusesBadCalls) {
  const Model model = TinyModel::Random("llama", 6).Load();
  LocalAttention attention(model.Geometry(DType::kBf16));
  std::vector<float> logits(264);
  const std::vector<uint32_t> fine = {1, 2}, outside = {1, 264};
  const auto code = [&](std::span<const uint32_t> tokens, uint32_t first, uint32_t n_logits) {
    const Status status = model.Forward(tokens, first, attention, n_logits, logits);
    return status.ok() ? "ok" : std::string(CodeName(status.error().code));
  };
  EXPECT_EQ(code({}, 0, 0), "invalid_argument");
  EXPECT_EQ(code(outside, 0, 1), "invalid_argument");
  EXPECT_EQ(code(fine, 0, 2), "invalid_argument");  // the buffer holds one row
  EXPECT_EQ(code(fine, 4095, 1), "invalid_argument");
  EXPECT_EQ(code(fine, 0xffffffffu, 1), "invalid_argument");
  EXPECT_EQ(code(fine, 3, 1), "failed_precondition");  // the cache is at position 0
  EXPECT_EQ(code(fine, 0, 1), "ok");
  ModelOptions options;
  options.chunk_tokens = 0;
  const auto created = Model::Create(model.config(), {}, options);
  ASSERT_FALSE(created.ok());
}

TEST(Model, ProgressIsToldAndCanStop) {
  ModelOptions options;
  options.chunk_tokens = 10;
  const Model model = TinyModel::Random("llama", 7).Load(options);
  std::mt19937_64 random(7);
  const auto tokens = RandomTokens(random, 35);
  std::vector<uint32_t> told;
  LocalAttention attention(model.Geometry(DType::kBf16));
  const Status status =
      model.Forward(tokens, 0, attention, 0, {}, [&](uint32_t done, uint32_t total) {
        EXPECT_EQ(total, 35u);
        told.push_back(done);
        return done < 30;
      });
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, Code::kCancelled);
  EXPECT_EQ(told, (std::vector<uint32_t>{10, 20, 30}));
}

}  // namespace
}  // namespace prefixd::decoder
