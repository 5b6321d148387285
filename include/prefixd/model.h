// Describes a model whose prefixes are stored.
//
// Thread-safety: plain values.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "prefixd/kv_shape.h"

namespace prefixd {

// A model as its user describes it. The identity fields (weights digest, architecture, rope,
// adapter, tokenizer, tenant salt ...) and the geometry make the fingerprint: a prefix is only
// ever matched under the same one.
struct ModelSpec {
  std::string name;
  KvGeometry geometry;
  std::vector<std::pair<std::string, std::string>> identity;
  // Feature maps for the phi estimator, one file per target prefix length; may be empty. Paths are
  // on the machine that runs the store.
  std::vector<std::filesystem::path> feature_maps;
};

}  // namespace prefixd
