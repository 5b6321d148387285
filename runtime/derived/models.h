// Keeps registered models in the store's catalog: identity, geometry and feature maps.
//
// Thread-safety: all methods may be called concurrently. A Model is immutable; holders keep using
// the one they have when feature maps are replaced.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "attention/estimators/feature_map.h"
#include "prefixd/result.h"
#include "prefixd/types.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

struct Model {
  ModelSpec spec;
  std::vector<FeatureMapSet> maps;  // ascending by trained length
  std::string maps_error;           // why the spec's maps are not loaded; empty: they are

  // Returns the maps trained nearest to a prefix of n tokens: the shortest sufficient length, else
  // the longest one there is; null without maps.
  const FeatureMapSet* MapsFor(uint32_t n_tokens) const;
  // Whether the layer keeps summaries. Layers with a softcap attend exactly or by selection only;
  // layers with a sliding window belong to the engine (docs/mathematics.md).
  bool Summarised(uint32_t layer) const;
};

class ModelRegistry {
 public:
  explicit ModelRegistry(storage::PrefixStore* storage) : storage_(storage) {}

  // Loads the models of the catalog. Feature maps that cannot be loaded any more do not fail the
  // open; Model::maps_error tells why when phi is requested.
  Status LoadAll();
  // True when the model is new or its feature maps changed (stored prefixes need new caches).
  Result<bool> Register(const ModelSpec& spec);
  // kNotFound names the models that exist.
  Result<std::shared_ptr<const Model>> Find(std::string_view name) const;
  std::vector<ModelSpec> Specs() const;

 private:
  storage::PrefixStore* storage_;
  std::mutex register_mutex_;  // one registration at a time
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const Model>, std::less<>> models_;
};

}  // namespace prefixd
