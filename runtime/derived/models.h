// Registered models: identity, geometry and feature maps, kept in the store's catalog.
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
  std::string maps_error;           // why maps of the spec are not loaded; empty: they are

  // The maps trained nearest to a prefix of n tokens: the shortest length that is enough, or else
  // the longest there is; null without maps.
  const FeatureMapSet* MapsFor(uint32_t n_tokens) const;
  // Layers that keep summaries: those with a softcap attend exactly or by selection only, those
  // with a sliding window are the engine's own (spec §1).
  bool Summarised(uint32_t layer) const;
};

class ModelRegistry {
 public:
  explicit ModelRegistry(storage::PrefixStore* storage) : storage_(storage) {}

  // Loads what the catalog holds. Feature maps that cannot be loaded any more do not fail the
  // open: the model says so where it is asked for them.
  Status LoadAll();
  // True when the model is new or its feature maps changed (stored prefixes need new caches).
  Result<bool> Register(const ModelSpec& spec);
  // kNotFound names the models there are.
  Result<std::shared_ptr<const Model>> Find(std::string_view name) const;
  std::vector<ModelSpec> Specs() const;

 private:
  storage::PrefixStore* storage_;
  std::mutex register_mutex_;  // one registration at a time
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const Model>, std::less<>> models_;
};

}  // namespace prefixd
