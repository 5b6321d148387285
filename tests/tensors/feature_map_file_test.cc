#include "tensors/feature_map_file.h"

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/support/files.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using nlohmann::json;
using testing::TempDir;

// Holds the tensors and metadata of a small feature-map file, which tests write whole or damaged.
struct MapFile {
  static constexpr uint32_t kLayers = 2, kQ = 4, kKv = 2, kDh = 6, kEmb = 5, kPhi = 7;

  std::map<std::string, std::pair<std::vector<uint64_t>, std::vector<float>>> tensors;
  std::map<std::string, std::string> metadata = {{"format", "prefixd-phi-v1"},
                                                 {"length", "512"},
                                                 {"d_emb", "5"},
                                                 {"d_phi", "7"},
                                                 {"n_layers", "2"},
                                                 {"n_q_heads", "4"},
                                                 {"n_kv_heads", "2"},
                                                 {"head_dim", "6"},
                                                 {"scale", "0.408248290"},
                                                 {"weights", "unit"}};

  explicit MapFile(uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0.0f, 0.5f);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (const auto& [side, heads] : std::map<std::string, uint64_t>{{"q", kQ}, {"k", kKv}}) {
        const std::map<std::string, std::vector<uint64_t>> shapes = {{"W_in", {heads, kEmb, kDh}},
                                                                     {"b_in", {heads, kEmb}},
                                                                     {"W1", {heads, kEmb, kEmb}},
                                                                     {"b1", {heads, kEmb}},
                                                                     {"W2", {heads, kEmb, kEmb}},
                                                                     {"b2", {heads, kEmb}},
                                                                     {"W_out", {heads, kPhi, kEmb}},
                                                                     {"b_out", {heads, kPhi}},
                                                                     {"alpha", {heads}}};
        for (const auto& [name, shape] : shapes) {
          uint64_t elements = 1;
          for (const uint64_t dim : shape) elements *= dim;
          std::vector<float> values(elements);
          for (float& v : values) v = normal(random);
          tensors["layers." + std::to_string(layer) + ".phi_" + side + "." + name] = {shape,
                                                                                      values};
        }
      }
    }
  }

  void Write(const std::filesystem::path& path) const {
    std::vector<TensorToWrite> list;
    for (const auto& [name, entry] : tensors) {
      list.push_back({name, TensorType::kF32, entry.first, std::as_bytes(std::span(entry.second))});
    }
    const Status status = WriteSafetensors(path, list, metadata);
    ASSERT_TRUE(status.ok()) << status.error().message;
  }
};

// Computes log phi(x) in float64 from the formula, for head h of stacked tensors.
std::vector<double> ReferenceLogPhi(const MapFile& file, const std::string& prefix, uint32_t h,
                                    std::span<const float> x) {
  const auto value = [&](const char* name, size_t i) {
    const auto& all = file.tensors.at(prefix + name).second;
    const auto& shape = file.tensors.at(prefix + name).first;
    return double{all[h * (all.size() / shape[0]) + i]};
  };
  const auto affine = [&](const char* w, const char* b, const std::vector<double>& in,
                          uint32_t rows) {
    std::vector<double> out(rows);
    for (uint32_t r = 0; r < rows; ++r) {
      out[r] = value(b, r);
      for (size_t c = 0; c < in.size(); ++c) out[r] += value(w, r * in.size() + c) * in[c];
    }
    return out;
  };
  const std::vector<double> in(x.begin(), x.end());
  std::vector<double> g0 = affine("W_in", "b_in", in, MapFile::kEmb);
  std::vector<double> h1 = affine("W1", "b1", g0, MapFile::kEmb);
  for (double& v : h1) v = 0.5 * v * (1 + std::erf(v / std::sqrt(2.0)));
  const std::vector<double> h2 = affine("W2", "b2", h1, MapFile::kEmb);
  for (size_t i = 0; i < g0.size(); ++i) g0[i] += value("alpha", 0) * h2[i];
  return affine("W_out", "b_out", g0, MapFile::kPhi);
}

TEST(FeatureMapFile, EveryHeadIsReadIntoItsPlace) {
  TempDir dir;
  const uint64_t seed = testing::Seed("EveryHeadIsReadIntoItsPlace");
  const MapFile file(seed);
  file.Write(dir / "phi.safetensors");
  const auto set = LoadFeatureMaps(dir / "phi.safetensors");
  ASSERT_TRUE(set.ok()) << set.error().message;
  EXPECT_EQ(set->length, 512u);
  EXPECT_EQ(set->d_phi, MapFile::kPhi);
  ASSERT_EQ(set->phi_q.size(), MapFile::kLayers * MapFile::kQ);
  ASSERT_EQ(set->phi_k.size(), MapFile::kLayers * MapFile::kKv);
  EXPECT_EQ(set->digest.size(), 32u);

  std::mt19937_64 random(seed + 1);
  std::normal_distribution<float> normal;
  const auto check = [&](const FeatureMap& map, const std::string& prefix, uint32_t head) {
    std::vector<float> x(MapFile::kDh), out(MapFile::kPhi);
    for (float& v : x) v = normal(random);
    map.LogPhi(x, 1, out);
    const std::vector<double> truth = ReferenceLogPhi(file, prefix, head, x);
    for (size_t f = 0; f < out.size(); ++f) {
      EXPECT_NEAR(out[f], truth[f], 1e-5) << prefix << head << " seed " << seed;
    }
  };
  for (uint32_t layer = 0; layer < MapFile::kLayers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".phi_";
    for (uint32_t h = 0; h < MapFile::kQ; ++h) {
      check(set->phi_q[layer * MapFile::kQ + h], prefix + "q.", h);
    }
    for (uint32_t h = 0; h < MapFile::kKv; ++h) {
      check(set->phi_k[layer * MapFile::kKv + h], prefix + "k.", h);
    }
  }
}

TEST(FeatureMapFile, DigestFollowsTheBytes) {
  TempDir dir;
  MapFile file(7);
  file.Write(dir / "a");
  file.Write(dir / "b");
  file.tensors.at("layers.1.phi_k.alpha").second[1] += 0.25f;
  file.Write(dir / "c");
  const auto a = LoadFeatureMaps(dir / "a"), b = LoadFeatureMaps(dir / "b"),
             c = LoadFeatureMaps(dir / "c");
  ASSERT_TRUE(a.ok() && b.ok() && c.ok());
  EXPECT_EQ(a->digest, b->digest);
  EXPECT_NE(a->digest, c->digest);
}

TEST(FeatureMapFile, SaysWhatIsWrong) {
  TempDir dir;
  const auto expect = [&](const MapFile& file, std::string_view reason) {
    file.Write(dir / "phi");
    const auto set = LoadFeatureMaps(dir / "phi");
    ASSERT_FALSE(set.ok()) << reason;
    EXPECT_EQ(set.error().code, Code::kInvalidArgument);
    EXPECT_NE(set.error().message.find(reason), std::string::npos) << set.error().message;
    EXPECT_EQ(set.error().message.find('\n'), std::string::npos);
  };
  const auto with_metadata = [](const char* key, const char* value) {
    MapFile file(7);
    file.metadata[key] = value;
    return file;
  };
  expect(with_metadata("format", "pt"), "is not a feature-map file");
  expect(with_metadata("d_phi", "0"), "metadata 'd_phi' is '0'");
  expect(with_metadata("d_phi", "7x"), "metadata 'd_phi' is '7x'");
  expect(with_metadata("n_layers", "-1"), "metadata 'n_layers' is '-1'");
  expect(with_metadata("scale", "nan"), "metadata 'scale' is 'nan'");
  expect(with_metadata("n_kv_heads", "3"), "does not divide");
  expect(with_metadata("n_layers", "3"), "has no tensor 'layers.2.phi_q.W_in'");
  expect(with_metadata("head_dim", "8"), "has shape [4, 5, 6] but [4, 5, 8] is expected");
  MapFile file(7);
  file.metadata.erase("length");
  expect(file, "has no metadata 'length'");
  file = MapFile(7);
  file.tensors.erase("layers.1.phi_k.W2");
  expect(file, "has no tensor 'layers.1.phi_k.W2'");
  file = MapFile(7);
  file.tensors.at("layers.0.phi_q.b1").second[3] = NAN;
  expect(file, "layers.0.phi_q.* of head 0");
  const auto missing = LoadFeatureMaps(dir / "nothing");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code, Code::kNotFound);
}

// These are log phi of the model in models/ in float64, which python -m prefixd.golden made once.
TEST(FeatureMapFile, AgreesWithTheGoldenMaps) {
  const std::filesystem::path source(PREFIXD_SOURCE_DIR);
  const json golden =
      json::parse(testing::ReadFile(source / "tests/data/phi-golden.json"), nullptr, false);
  ASSERT_TRUE(golden.is_object()) << "tests/data/phi-golden.json is missing";
  const auto path = source / "models/prefixd-tiny" / golden.at("phi_file").get<std::string>();
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.error().message;
  const auto header = ReadFeatureMapHeader(*file);
  ASSERT_TRUE(header.ok()) << header.error().message;
  const auto set = LoadFeatureMaps(*file);
  ASSERT_TRUE(set.ok()) << set.error().message;
  double largest = 0;
  int compared = 0;
  for (const json& entry : golden.at("cases")) {
    const uint32_t layer = entry.at("layer"), head = entry.at("head");
    const bool query = entry.at("map") == "phi_q";
    const FeatureMap& map = query ? set->phi_q.at(layer * header->n_q_heads + head)
                                  : set->phi_k.at(layer * header->n_kv_heads + head);
    const auto inputs = entry.at("x").get<std::vector<std::vector<float>>>();
    const auto truth = entry.at("log_phi").get<std::vector<std::vector<double>>>();
    ASSERT_EQ(inputs.size(), truth.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      std::vector<float> out(set->d_phi);
      ASSERT_EQ(truth[i].size(), out.size());
      map.LogPhi(inputs[i], 1, out);
      for (size_t f = 0; f < out.size(); ++f) {
        largest = std::max(largest, std::abs(out[f] - truth[i][f]));
        ++compared;
      }
    }
  }
  std::printf("largest difference of log phi: %.2g over %d\n", largest, compared);
  EXPECT_GT(compared, 0);
  EXPECT_LT(largest, 1e-3);
}

}  // namespace
}  // namespace prefixd
