// Tests shapes of models: the known ones, config.json files, the arithmetic of a prefill, and what
// is refused.
#include "measure/models/model_shape.h"

#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

TEST(ModelShapeTest, KnownModelsAreFoundInAnyCase) {
  const auto m = ModelShapeOf("llama-3.2-1b");
  ASSERT_TRUE(m.ok());
  EXPECT_EQ(m->token_bytes(), 32768u);  // 16 layers, 8 KV heads, key and value of 64 in bf16
  for (const ModelShape& known : KnownModels()) {
    EXPECT_TRUE(known.Geometry().Validate().ok()) << known.name;
  }
}

TEST(ModelShapeTest, ReadsConfigJson) {
  testing::TempDir dir;
  testing::WriteFile(dir / "config.json", R"({"model_type": "mistral", "num_hidden_layers": 40,
    "hidden_size": 5120, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "float16"})");
  for (const auto& path : {dir.path(), dir / "config.json"}) {
    const auto m = ModelShapeOf(path.string());
    ASSERT_TRUE(m.ok()) << m.error().message;
    EXPECT_EQ(m->n_layers, 40u);
    EXPECT_EQ(m->head_dim, 128u);
    EXPECT_EQ(m->dtype, DType::kF16);
  }
  // head_dim is hidden / heads where it is absent, and heads of their own where none are shared.
  const auto plain = ParseModelShape(
      R"({"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4})", "plain");
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->head_dim, 64u);
  EXPECT_EQ(plain->n_kv_heads, 4u);
}

TEST(ModelShapeTest, RefusesWhatIsNoModel) {
  EXPECT_EQ(ModelShapeOf("no-such-model").error().code, Code::kNotFound);
  EXPECT_NE(ModelShapeOf("no-such-model").error().message.find("Llama-3.1-8B"), std::string::npos);
  for (const auto& [text, named] : {std::pair{"{", "JSON"},
                                    {"[]", "JSON"},
                                    {R"({"hidden_size": 64})", "num_hidden_layers"},
                                    {R"({"num_hidden_layers": 0})", "num_hidden_layers"},
                                    {R"({"num_hidden_layers": "2"})", "num_hidden_layers"},
                                    {R"({"num_hidden_layers": 2, "hidden_size": 64,
                                        "num_attention_heads": 4, "num_key_value_heads": 3})",
                                     "head"},
                                    {R"({"num_hidden_layers": 2, "hidden_size": 64,
                                        "num_attention_heads": 4, "dtype": "int4"})",
                                     "int4"}}) {
    const auto m = ParseModelShape(text, "the file");
    ASSERT_FALSE(m.ok()) << text;
    EXPECT_EQ(m.error().code, Code::kInvalidArgument);
    EXPECT_NE(m.error().message.find("the file"), std::string::npos);
    EXPECT_NE(m.error().message.find(named), std::string::npos) << m.error().message;
  }
}

// Each is a whole config.json but for what is tested.
std::string With(const std::string& more) {
  return R"({"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512,
             "num_attention_heads": 8, )" +
         more + "}";
}

TEST(ModelShapeTest, RefusesWhatKeepsNoKeysAndValues) {
  for (const auto& [more, named] :
       {std::pair{R"("kv_lora_rank": 512)", "MLA"},
        {R"("layer_types": ["full_attention", "linear_attention"])", "linear_attention"},
        {R"("layers_block_type": ["mamba", "attention"])", "recurrent"},
        {R"("attn_layer_period": 8)", "recurrent"}}) {
    const auto m = ParseModelShape(With(more), "the file");
    ASSERT_FALSE(m.ok()) << more;
    EXPECT_EQ(m.error().code, Code::kInvalidArgument);
    EXPECT_NE(m.error().message.find(named), std::string::npos) << m.error().message;
  }
}

TEST(ModelShapeTest, SlidingLayersAreCountedAndSaid) {
  for (const auto& [more, sliding] :
       {std::pair{R"("layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
                                     "full_attention"])",
                  "3 of 4 layers"},
        {R"("sliding_window": 4096)", "4 of 4 layers"},
        {R"("sliding_window": 4096, "use_sliding_window": false)", ""},
        {R"("sliding_window": null, "kv_lora_rank": null)", ""}}) {
    const auto m = ParseModelShape(With(more), "the file");
    ASSERT_TRUE(m.ok()) << m.error().message;
    ASSERT_EQ(m->notes.empty(), std::string(sliding).empty()) << more;
    if (!m->notes.empty()) {
      EXPECT_NE(m->notes[0].find(sliding), std::string::npos) << m->notes[0];
    }
  }
}

TEST(ModelShapeTest, ReadsSharedHeadsAndExperts) {
  const auto heads = [](const char* more) { return ParseModelShape(With(more), "f")->n_kv_heads; };
  EXPECT_EQ(heads(R"("multi_query": true)"), 1u);
  EXPECT_EQ(heads(R"("multi_query": true, "new_decoder_architecture": true, "num_kv_heads": 2)"),
            2u);
  EXPECT_EQ(heads(R"("multi_query_attention": true, "multi_query_group_num": 4)"), 4u);
  EXPECT_EQ(heads(R"("multi_query": false)"), 8u);
  const auto width = [](const char* more) { return ParseModelShape(With(more), "f")->ffn; };
  EXPECT_EQ(width(R"("num_local_experts": 8, "num_experts_per_tok": 2)"), 2u * 512);
  EXPECT_EQ(width(R"("num_experts_per_tok": 8, "moe_intermediate_size": 96)"), 8u * 96);
  EXPECT_EQ(width(R"("num_experts_per_tok": 4, "moe_intermediate_size": 96,
                     "shared_expert_intermediate_size": 384)"),
            4u * 96 + 384);
}

TEST(ModelShapeTest, PrefillIsTwiceTheWeightsAndAttention) {
  const ModelShape m = *ModelShapeOf("Llama-3.1-8B");
  const double weights = 32.0 * (4096.0 * 4096 * 2 + 4096.0 * 1024 * 2 + 3 * 4096.0 * 14336);
  EXPECT_NEAR(weights / 6.98e9, 1, 0.01);  // what 8B models have outside of their vocabulary
  EXPECT_NEAR(m.PrefillFlops(1), 2 * weights + 32 * 4 * 4096.0, 1);
  const double n = 16384;
  EXPECT_NEAR(m.PrefillFlops(16384) / (2 * weights * n + 32 * 4 * 4096.0 * n * (n + 1) / 2), 1,
              1e-9);
}

}  // namespace
}  // namespace prefixd::bench
