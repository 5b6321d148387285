#include "decoder/checkpoint/checkpoint.h"

#include "decoder/attention/local_attention.h"
#include "decoder/model/model.h"
#include "tests/decoder/tiny_model.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::decoder {
namespace {

using prefixd::testing::ReadFile;
using prefixd::testing::TempDir;
using prefixd::testing::WriteFile;
using testing::TinyModel;

void ExpectLoadError(const TempDir& dir, Code code, std::string_view reason) {
  const auto model = Model::Load(dir.path(), {});
  ASSERT_FALSE(model.ok()) << reason;
  EXPECT_EQ(model.error().code, code) << model.error().message;
  EXPECT_NE(model.error().message.find(reason), std::string::npos) << model.error().message;
  EXPECT_EQ(model.error().message.find('\n'), std::string::npos);
}

std::vector<float> LastLogits(const Model& model) {
  const std::vector<uint32_t> tokens = {256, 1, 2, 3, 200, 100, 7};
  LocalAttention attention(model.Geometry(DType::kF32));
  std::vector<float> logits(model.config().vocab_size);
  const Status status = model.Forward(tokens, 0, attention, 1, logits);
  EXPECT_TRUE(status.ok());
  return logits;
}

TEST(Checkpoint, ShardsAreTheSameModel) {
  const TinyModel tiny = TinyModel::Random("qwen3", 1);
  TempDir whole, shards;
  tiny.Write(whole.path());
  tiny.Write(shards.path(), 3);
  const auto a = Model::Load(whole.path(), {}), b = Model::Load(shards.path(), {});
  ASSERT_TRUE(a.ok()) << a.error().message;
  ASSERT_TRUE(b.ok()) << b.error().message;
  EXPECT_EQ(LastLogits(*a), LastLogits(*b));
}

TEST(Checkpoint, SaysWhatIsWrong) {
  const TinyModel good = TinyModel::Random("llama", 2);
  {
    TempDir dir;
    ExpectLoadError(dir, Code::kNotFound, "config.json");
    WriteFile(dir / "config.json", "{nonsense");
    ExpectLoadError(dir, Code::kInvalidArgument, "is not JSON");
    WriteFile(dir / "config.json", good.config.dump());
    ExpectLoadError(dir, Code::kNotFound, "has neither model.safetensors nor");
  }
  {
    TempDir dir;
    TinyModel bad = good;
    bad.tensors.erase("model.layers.1.mlp.up_proj.weight");
    bad.Write(dir.path());
    ExpectLoadError(dir, Code::kInvalidArgument,
                    "has no tensor 'model.layers.1.mlp.up_proj.weight'");
  }
  {
    TempDir dir;
    TinyModel bad = good;
    bad.config["intermediate_size"] = 96;
    bad.Write(dir.path());
    ExpectLoadError(dir, Code::kInvalidArgument, "has shape [80, 48] but [96, 48] is expected");
  }
  {
    TempDir dir;
    TinyModel bad = good;
    bad.config["tie_word_embeddings"] = false;
    bad.Write(dir.path());
    ExpectLoadError(dir, Code::kInvalidArgument, "has no tensor 'lm_head.weight'");
  }
  {
    TempDir dir;
    good.Write(dir.path());
    const std::string bytes = ReadFile(dir / "model.safetensors");
    WriteFile(dir / "model.safetensors", std::string_view(bytes).substr(0, bytes.size() / 2));
    ExpectLoadError(dir, Code::kCorrupt, "is truncated");
  }
  {
    TempDir dir;
    good.Write(dir.path(), 2);
    std::filesystem::remove(dir / "shard-1.safetensors");
    ExpectLoadError(dir, Code::kNotFound, "shard-1.safetensors");
    WriteFile(dir / "model.safetensors.index.json",
              R"({"weight_map": {"a": "../elsewhere.safetensors"}})");
    ExpectLoadError(dir, Code::kInvalidArgument, "is not a file name");
    WriteFile(dir / "model.safetensors.index.json", R"({"weight_map": {}})");
    ExpectLoadError(dir, Code::kInvalidArgument, "has no weight_map");
  }
}

TEST(Checkpoint, IdentityFollowsWeightsAndRope) {
  TinyModel tiny = TinyModel::Random("llama", 3);
  const auto identity = [&] {
    TempDir dir;
    tiny.Write(dir.path());
    const auto config = LoadConfig(dir.path());
    EXPECT_TRUE(config.ok());
    auto result = ModelIdentity(dir.path(), *config);
    EXPECT_TRUE(result.ok());
    return std::move(result).value();
  };
  const auto first = identity();
  EXPECT_EQ(first, identity());
  tiny.config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}};
  const auto stretched = identity();
  EXPECT_NE(first, stretched);
  EXPECT_EQ(first[0], stretched[0]);  // the weights are the same
  tiny.tensors.at("model.norm.weight").second[0] += 1;
  EXPECT_NE(stretched[0], identity()[0]);
}

}  // namespace
}  // namespace prefixd::decoder
