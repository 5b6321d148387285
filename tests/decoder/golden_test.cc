// Compares logits with those of Hugging Face transformers (float32), which python -m prefixd.golden
// made once.
#include <cmath>
#include <nlohmann/json.hpp>

#include "decoder/attention/local_attention.h"
#include "decoder/model/model.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::decoder {
namespace {

constexpr double kTolerance = 1e-3;

std::filesystem::path Source(std::string_view path) {
  return std::filesystem::path(PREFIXD_SOURCE_DIR) / path;
}

void CheckGolden(const std::filesystem::path& checkpoint, const std::filesystem::path& golden) {
  const nlohmann::json truth =
      nlohmann::json::parse(prefixd::testing::ReadFile(golden), nullptr, false);
  ASSERT_TRUE(truth.is_object()) << golden;
  const auto prompt = truth.at("prompt").get<std::vector<uint32_t>>();
  const auto expected = truth.at("logits").get<std::vector<std::vector<float>>>();
  ASSERT_FALSE(expected.empty());

  ModelOptions options;
  options.chunk_tokens = 64;  // several chunks even in these short prompts
  const auto model = Model::Load(checkpoint, options);
  ASSERT_TRUE(model.ok()) << model.error().message;
  const size_t vocab = model->config().vocab_size, rows = expected.size();
  // The dtype is f32, because the golden run rounds no keys and values.
  LocalAttention attention(model->Geometry(DType::kF32));
  std::vector<float> logits(rows * vocab);
  const Status status = model->Forward(prompt, 0, attention, static_cast<uint32_t>(rows), logits);
  ASSERT_TRUE(status.ok()) << status.error().message;
  double largest = 0;
  for (size_t i = 0; i < rows; ++i) {
    ASSERT_EQ(expected[i].size(), vocab);
    for (size_t j = 0; j < vocab; ++j) {
      largest = std::max(largest, std::abs(double{logits[i * vocab + j]} - expected[i][j]));
    }
  }
  std::printf("largest difference of a logit: %.2g\n", largest);
  EXPECT_LT(largest, kTolerance);
}

TEST(Golden, LlamaUntied) {
  const auto folder = Source("tests/data/tiny-llama-untied");
  CheckGolden(folder, folder / "golden.json");
}

TEST(Golden, Llama3Rope) {
  const auto folder = Source("tests/data/tiny-llama3-rope");
  CheckGolden(folder, folder / "golden.json");
}

TEST(Golden, Qwen3) {
  const auto folder = Source("tests/data/tiny-qwen3");
  CheckGolden(folder, folder / "golden.json");
}

TEST(Golden, PrefixdTiny) {
  const auto golden = Source("tests/data/prefixd-tiny-golden.json");
  CheckGolden(Source("models/prefixd-tiny"), golden);
}

}  // namespace
}  // namespace prefixd::decoder
