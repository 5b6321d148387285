#include "decoder/checkpoint/config.h"

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "decoder/model/rope.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::decoder {
namespace {

using nlohmann::json;

json Llama() {
  return {{"model_type", "llama"},    {"vocab_size", 264},
          {"hidden_size", 256},       {"intermediate_size", 704},
          {"num_hidden_layers", 4},   {"num_attention_heads", 4},
          {"num_key_value_heads", 2}, {"max_position_embeddings", 8192}};
}

Result<ModelConfig> Parse(const json& object) { return ParseConfig(object.dump(), "config.json"); }

TEST(Config, ReadsALlamaFileWithDefaults) {
  const auto config = Parse(Llama());
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->family, Family::kLlama);
  EXPECT_EQ(config->head_dim, 64u);  // hidden / heads
  EXPECT_EQ(config->rope.type, RopeType::kDefault);
  EXPECT_EQ(config->rope.theta, 10000.0);
  EXPECT_FALSE(config->tied_embeddings);
  EXPECT_FALSE(config->qk_norm);
  const KvGeometry geometry = GeometryOf(*config, DType::kF16);
  EXPECT_TRUE(geometry.Validate().ok());
  EXPECT_EQ(geometry.n_layers, 4u);
  EXPECT_EQ(geometry.n_kv_heads, 2u);
  EXPECT_EQ(geometry.dtype, DType::kF16);
  EXPECT_FLOAT_EQ(geometry.layers[3].scale, 0.125f);
}

TEST(Config, ReadsAQwen3File) {
  json file = Llama();
  file["model_type"] = "qwen3";
  file["num_key_value_heads"] = nullptr;  // absent and null mean the same
  file["sliding_window"] = 4096;          // switched off:
  file["use_sliding_window"] = false;
  file["layer_types"] = {"full_attention", "full_attention"};
  file["eos_token_id"] = {3, 4};
  file["dtype"] = "float32";
  const auto config = Parse(file);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_TRUE(config->qk_norm);
  EXPECT_EQ(config->head_dim, 128u);  // this family's default, independent of hidden / heads
  EXPECT_EQ(config->n_kv_heads, 4u);
  EXPECT_EQ(config->eos, (std::vector<uint32_t>{3, 4}));
  EXPECT_EQ(config->dtype, DType::kF32);
}

TEST(Config, ReadsRopeInBothForms) {
  json old_form = Llama();
  old_form["rope_theta"] = 500000.0;
  old_form["rope_scaling"] = {{"type", "linear"}, {"factor", 2.0}};
  auto config = Parse(old_form);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->rope.type, RopeType::kLinear);
  EXPECT_EQ(config->rope.theta, 500000.0);
  EXPECT_EQ(config->rope.factor, 2.0);

  json new_form = Llama();
  new_form["rope_parameters"] = {
      {"rope_type", "llama3"},   {"rope_theta", 500000.0},
      {"factor", 8.0},           {"low_freq_factor", 1.0},
      {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 8192}};
  config = Parse(new_form);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->rope.type, RopeType::kLlama3);
  EXPECT_EQ(config->rope.theta, 500000.0);
  EXPECT_EQ(config->rope.original_max_positions, 8192u);
}

// The scaled frequencies must follow the published rule in its three regimes.
TEST(Config, RopeFrequencies) {
  RopeConfig config;
  config.theta = 10000;
  EXPECT_FLOAT_EQ(Rope(config, 8).inverse_frequencies()[0], 1.0f);
  EXPECT_FLOAT_EQ(Rope(config, 8).inverse_frequencies()[2], 0.01f);
  config.type = RopeType::kLinear;
  config.factor = 4;
  EXPECT_FLOAT_EQ(Rope(config, 8).inverse_frequencies()[2], 0.0025f);
  config.type = RopeType::kLlama3;
  config.original_max_positions = 100;
  const Rope rope(config, 8);
  EXPECT_FLOAT_EQ(rope.inverse_frequencies()[0], 1.0f);           // wavelength 6: kept
  EXPECT_FLOAT_EQ(rope.inverse_frequencies()[3], 0.001f / 4.0f);  // 6283: slowed by the factor
  const double wavelength = 2 * M_PI / 0.1, smooth = (100 / wavelength - 1) / 3;  // 62.8: blended
  EXPECT_NEAR(rope.inverse_frequencies()[1], (1 - smooth) * 0.1 / 4 + smooth * 0.1, 1e-7);
}

TEST(Config, RefusesWhatItCannotDo) {
  const auto expect = [](const std::function<void(json&)>& change, std::string_view reason) {
    json file = Llama();
    change(file);
    const auto config = Parse(file);
    ASSERT_FALSE(config.ok()) << reason;
    EXPECT_EQ(config.error().code, Code::kInvalidArgument);
    EXPECT_NE(config.error().message.find(reason), std::string::npos) << config.error().message;
    EXPECT_EQ(config.error().message.rfind("config.json: ", 0), 0u);
    EXPECT_EQ(config.error().message.find('\n'), std::string::npos);
  };
  expect([](json& c) { c["model_type"] = "gemma3"; }, "model_type 'gemma3' is not supported");
  expect([](json& c) { c.erase("model_type"); }, "model_type '' is not supported");
  expect([](json& c) { c["model_type"] = 3; }, "model_type must be a string");
  expect([](json& c) { c.erase("vocab_size"); }, "has no vocab_size");
  expect([](json& c) { c["vocab_size"] = -1; }, "vocab_size must be a whole number");
  expect([](json& c) { c["hidden_size"] = 1.5; }, "hidden_size must be a whole number");
  expect([](json& c) { c["num_hidden_layers"] = 5000; }, "num_hidden_layers must be");
  expect([](json& c) { c["num_key_value_heads"] = 3; }, "does not divide");
  expect([](json& c) { c["num_attention_heads"] = 3; }, "does not divide hidden_size");
  expect([](json& c) { c["head_dim"] = 7; }, "must be even");
  expect([](json& c) { c["hidden_act"] = "gelu"; }, "hidden_act 'gelu'");
  expect([](json& c) { c["attention_bias"] = true; }, "attention_bias is not supported");
  expect([](json& c) { c["mlp_bias"] = true; }, "mlp_bias is not supported");
  expect([](json& c) { c["sliding_window"] = 128; }, "sliding_window is not supported");
  expect([](json& c) { c["use_sliding_window"] = true; }, "use_sliding_window is not");
  expect([](json& c) { c["layer_types"] = {"sliding_attention"}; }, "layer_types other than");
  expect([](json& c) { c["quantization_config"] = {{"bits", 4}}; }, "quantised weights");
  expect([](json& c) { c["rms_norm_eps"] = 0; }, "rms_norm_eps must be a positive number");
  expect([](json& c) { c["torch_dtype"] = "float8"; }, "dtype 'float8'");
  expect([](json& c) { c["eos_token_id"] = 264; }, "eos_token_id is not a token");
  expect([](json& c) { c["partial_rotary_factor"] = 0.5; }, "partial_rotary_factor");
  expect(
      [](json& c) {
        c["rope_scaling"] = {{"type", "dynamic"}, {"factor", 2}};
      },
      "changes keys with the current length");
  expect(
      [](json& c) {
        c["rope_parameters"] = {{"rope_type", "longrope"}};
      },
      "changes keys with the current length");
  expect(
      [](json& c) {
        c["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 2}};
      },
      "RoPE type 'yarn' is not supported");
  expect([](json& c) { c["rope_scaling"] = {{"rope_type", "linear"}}; }, "has no factor");
  expect([](json& c) { c["rope_scaling"] = "linear"; }, "rope_scaling must be an object");
  expect(
      [](json& c) {
        c["rope_theta"] = 10000.0;
        c["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 500000.0}};
      },
      "rope_theta is given twice");
  expect(
      [](json& c) {
        c["rope_parameters"] = {{"full_attention", {{"rope_theta", 1.0}}}};
      },
      "different RoPE per kind of layer");
}

TEST(Config, RefusesWhatIsNoJson) {
  for (const char* text : {"", "{", "[1]", "not json", "{\"a\": \"\xff\"}"}) {
    const auto config = ParseConfig(text, "config.json");
    ASSERT_FALSE(config.ok()) << text;
    EXPECT_EQ(config.error().code, Code::kInvalidArgument);
  }
  prefixd::testing::TempDir dir;
  const auto missing = LoadConfig(dir.path());
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_NE(missing.error().message.find("config.json"), std::string::npos);
}

}  // namespace
}  // namespace prefixd::decoder
