// Reads the phi feature maps of a model from a safetensors file (attention/estimators/feature_map.h
// describes the architecture).
//
// Tensors, for each layer l, with H the query heads for phi_q and the KV heads for phi_k:
//   layers.{l}.phi_{q,k}.W_in  [H, d_emb, dh]      .b_in  [H, d_emb]
//                       .W1    [H, d_emb, d_emb]   .b1    [H, d_emb]
//                       .W2    [H, d_emb, d_emb]   .b2    [H, d_emb]
//                       .W_out [H, d_phi, d_emb]   .b_out [H, d_phi]     .alpha [H]
// Metadata (strings): format = "prefixd-phi-v1", length, d_emb, d_phi, n_layers, n_q_heads,
// n_kv_heads, head_dim, scale. `weights` may be missing; symmetric = "true" leaves phi_q out. Other
// tensors and keys are ignored.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "attention/estimators/feature_map.h"
#include "prefixd/result.h"
#include "tensors/safetensors.h"

namespace prefixd {

inline constexpr std::string_view kFeatureMapFormat = "prefixd-phi-v1";
// Changes whenever FeatureMap::LogPhi may return other numbers, because stored caches become stale
// then.
inline constexpr std::string_view kFeatureMapKernel = "prefixd-phi-cpu-f32-1";

struct FeatureMapHeader {
  uint32_t length = 0;  // prefix length the maps were trained for, tokens
  uint32_t d_emb = 0, d_phi = 0;
  uint32_t n_layers = 0, n_q_heads = 0, n_kv_heads = 0;
  uint32_t head_dim = 0;
  double scale = 0;  // scale of the scores that the maps approximate; must equal the model's
  // Digest of the weights that the maps were trained for, "blake2b:<hex>"
  // (decoder::Checkpoint::Digest); may be empty.
  std::string weights;
  bool symmetric = false;  // no phi_q tensors: phi_k maps queries too
};

Result<FeatureMapHeader> ReadFeatureMapHeader(const SafetensorsFile& file);

// Errors: kNotFound, kIo, kCorrupt as from SafetensorsFile::Open; kInvalidArgument when the file is
// no feature-map file, or a tensor is missing, misshapen or not finite. `digest` is BLAKE2b-128 in
// hex over the file's bytes and kFeatureMapKernel.
Result<FeatureMapSet> LoadFeatureMaps(const std::filesystem::path& path);
// Loads from a file that is open already, with the same errors.
Result<FeatureMapSet> LoadFeatureMaps(const SafetensorsFile& file);

}  // namespace prefixd
