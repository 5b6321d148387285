#include "tensors/feature_map_file.h"

#include <sodium.h>

#include <array>
#include <charconv>
#include <cmath>
#include <utility>
#include <vector>

namespace prefixd {
namespace {

constexpr uint32_t kMaxDim = 4096;  // bounds every count and width for sanity; no tuning knob

Error Refuse(const SafetensorsFile& file, const std::string& what) {
  return InvalidArgument(file.path().string() + ": " + what);
}

Result<std::string> MetadataText(const SafetensorsFile& file, const std::string& key) {
  const auto it = file.metadata().find(key);
  if (it == file.metadata().end()) {
    return Refuse(file, "has no metadata '" + key + "'; export the feature maps again");
  }
  return it->second;
}

template <typename T>
Result<T> MetadataNumber(const SafetensorsFile& file, const std::string& key, T low, T high) {
  PREFIXD_ASSIGN(const std::string text, MetadataText(file, key));
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= low) ||
      !(value <= high)) {
    return Refuse(file, "metadata '" + key + "' is " + QuoteName(text) +
                            ", which is no possible value; export the feature maps again");
  }
  return value;
}

Result<std::string> Digest(const SafetensorsFile& file) {
  if (sodium_init() < 0) return Error{Code::kInternal, "libsodium does not initialise"};
  std::array<unsigned char, 16> hash{};
  const auto bytes = file.file_bytes();
  crypto_generichash_state state;
  crypto_generichash_init(&state, nullptr, 0, hash.size());
  crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(bytes.data()),
                            bytes.size());
  crypto_generichash_update(&state,
                            reinterpret_cast<const unsigned char*>(kFeatureMapKernel.data()),
                            kFeatureMapKernel.size());
  crypto_generichash_final(&state, hash.data(), hash.size());
  std::string hex(2 * hash.size() + 1, '\0');
  sodium_bin2hex(hex.data(), hex.size(), hash.data(), hash.size());
  hex.pop_back();
  return hex;
}

// Reads the nine stacked tensors under `prefix` and appends one FeatureMap per head.
Status AppendHeads(const SafetensorsFile& file, const FeatureMapHeader& header,
                   const std::string& prefix, uint32_t n_heads, std::vector<FeatureMap>& maps) {
  const uint64_t h = n_heads, dh = header.head_dim, e = header.d_emb, f = header.d_phi;
  struct Part {
    const char* name;
    std::vector<uint64_t> shape;
    std::vector<float> FeatureMap::*member;
  };
  const std::array<Part, 8> parts = {{
      {"W_in", {h, e, dh}, &FeatureMap::w_in},
      {"b_in", {h, e}, &FeatureMap::b_in},
      {"W1", {h, e, e}, &FeatureMap::w1},
      {"b1", {h, e}, &FeatureMap::b1},
      {"W2", {h, e, e}, &FeatureMap::w2},
      {"b2", {h, e}, &FeatureMap::b2},
      {"W_out", {h, f, e}, &FeatureMap::w_out},
      {"b_out", {h, f}, &FeatureMap::b_out},
  }};
  const size_t first = maps.size();
  FeatureMap empty;
  empty.in_dim = header.head_dim;
  empty.d_emb = header.d_emb;
  empty.d_phi = header.d_phi;
  maps.resize(first + n_heads, empty);
  for (const Part& part : parts) {
    PREFIXD_ASSIGN(const std::vector<float> all, file.ReadFloats(prefix + part.name, part.shape));
    const size_t per_head = all.size() / n_heads;
    for (uint32_t i = 0; i < n_heads; ++i) {
      const auto begin = all.begin() + static_cast<ptrdiff_t>(i * per_head);
      (maps[first + i].*part.member).assign(begin, begin + static_cast<ptrdiff_t>(per_head));
    }
  }
  const std::array<uint64_t, 1> alpha_shape = {h};
  PREFIXD_ASSIGN(const std::vector<float> alpha, file.ReadFloats(prefix + "alpha", alpha_shape));
  for (uint32_t i = 0; i < n_heads; ++i) {
    maps[first + i].alpha = alpha[i];
    if (Status valid = maps[first + i].Validate(); !valid.ok()) {
      return Refuse(file, prefix + "* of head " + std::to_string(i) + ": " + valid.error().message);
    }
  }
  return {};
}

}  // namespace

Result<FeatureMapHeader> ReadFeatureMapHeader(const SafetensorsFile& file) {
  const auto format = file.metadata().find("format");
  if (format == file.metadata().end() || format->second != kFeatureMapFormat) {
    return Refuse(file, "is not a feature-map file (metadata format must be '" +
                            std::string(kFeatureMapFormat) + "')");
  }
  FeatureMapHeader header;
  PREFIXD_ASSIGN(header.length, MetadataNumber<uint32_t>(file, "length", 1, UINT32_MAX));
  PREFIXD_ASSIGN(header.d_emb, MetadataNumber<uint32_t>(file, "d_emb", 1, kMaxDim));
  PREFIXD_ASSIGN(header.d_phi, MetadataNumber<uint32_t>(file, "d_phi", 1, kMaxDim));
  PREFIXD_ASSIGN(header.n_layers, MetadataNumber<uint32_t>(file, "n_layers", 1, kMaxDim));
  PREFIXD_ASSIGN(header.n_q_heads, MetadataNumber<uint32_t>(file, "n_q_heads", 1, kMaxDim));
  PREFIXD_ASSIGN(header.n_kv_heads, MetadataNumber<uint32_t>(file, "n_kv_heads", 1, kMaxDim));
  PREFIXD_ASSIGN(header.head_dim, MetadataNumber<uint32_t>(file, "head_dim", 1, kMaxDim));
  PREFIXD_ASSIGN(header.scale, MetadataNumber<double>(file, "scale", 1e-9, 1e9));
  if (const auto weights = file.metadata().find("weights"); weights != file.metadata().end()) {
    header.weights = weights->second;
  }
  if (const auto it = file.metadata().find("symmetric"); it != file.metadata().end()) {
    if (it->second != "true" && it->second != "false") {
      return Refuse(file, "metadata 'symmetric' is neither true nor false");
    }
    header.symmetric = it->second == "true";
  }
  if (header.n_q_heads % header.n_kv_heads != 0) {
    return Refuse(file, "n_kv_heads " + std::to_string(header.n_kv_heads) +
                            " does not divide n_q_heads " + std::to_string(header.n_q_heads) +
                            "; export the feature maps again");
  }
  return header;
}

Result<FeatureMapSet> LoadFeatureMaps(const SafetensorsFile& file) {
  PREFIXD_ASSIGN(const FeatureMapHeader header, ReadFeatureMapHeader(file));
  FeatureMapSet set;
  set.length = header.length;
  set.d_phi = header.d_phi;
  for (uint32_t layer = 0; layer < header.n_layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".phi_";
    if (!header.symmetric) {
      PREFIXD_TRY(AppendHeads(file, header, prefix + "q.", header.n_q_heads, set.phi_q));
    }
    PREFIXD_TRY(AppendHeads(file, header, prefix + "k.", header.n_kv_heads, set.phi_k));
  }
  PREFIXD_ASSIGN(set.digest, Digest(file));
  return set;
}

Result<FeatureMapSet> LoadFeatureMaps(const std::filesystem::path& path) {
  PREFIXD_ASSIGN(const SafetensorsFile file, SafetensorsFile::Open(path));
  return LoadFeatureMaps(file);
}

}  // namespace prefixd
