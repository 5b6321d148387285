// Keeps registered models in the store's catalog: identity, geometry and feature maps. Their number
// and their bytes in memory are bounded: a new model takes the place of the least recently used one
// that nothing is stored for.
//
// Thread-safety: all methods may be called concurrently. A Model is immutable; holders keep using
// the one they have when feature maps are replaced.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/estimators/feature_map.h"
#include "base/memory_budget.h"
#include "prefixd/lists.h"
#include "prefixd/model.h"
#include "prefixd/result.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

struct Model {
  ModelSpec spec;
  std::vector<FeatureMapSet> maps;  // ascending by trained length
  std::string maps_error;           // why the spec's maps are not loaded; empty: they are
  MemoryCharge memory;              // of all this
  HeadIndex heads;                  // spec.geometry's

  // Returns the maps trained nearest to a prefix of n tokens: the shortest sufficient length, else
  // the longest one there is; null without maps.
  const FeatureMapSet* MapsFor(uint32_t n_tokens) const;
  // Whether the layer keeps summaries. Layers with a softcap attend exactly or by selection only;
  // layers with a sliding window belong to the engine (docs/mathematics.md).
  bool Summarised(uint32_t layer) const;
};

struct ModelLimits {
  uint64_t models = 0, bytes = 0;
};

class ModelRegistry {
 public:
  ModelRegistry(storage::PrefixStore* storage, const ModelLimits& limits, MemoryAccount memory)
      : storage_(storage), limits_(limits), memory_(std::move(memory)) {}

  // Loads the models of the catalog. Feature maps that cannot be loaded any more do not fail the
  // open; Model::maps_error tells why when phi is requested.
  Status LoadAll();
  // True when the feature maps of a known model changed (stored prefixes need new caches).
  // kResourceExhausted when it is one too many and all others are used.
  Result<bool> Register(const ModelSpec& spec);
  // As PrefixStore::RemoveModel.
  Status Remove(std::string_view name);
  // kNotFound names some of the models that exist.
  Result<std::shared_ptr<const Model>> Find(std::string_view name) const;
  // Returns models behind the name `after`, `limit` and about `max_bytes` at most, but at least
  // one.
  ModelPage List(std::string_view after, size_t limit, uint64_t max_bytes) const;

  struct Stats {
    uint64_t models = 0, bytes = 0, dropped = 0;
  };
  Stats stats() const;

 private:
  struct Entry {
    std::shared_ptr<const Model> model;
    mutable uint64_t used = 0;  // when it was asked for last
  };
  // Drops models until one of so many bytes may take the place of the one with its name, if any.
  Status MakeRoom(const std::string& name, uint64_t bytes);
  std::vector<std::string> LeastRecentlyUsed() const;

  storage::PrefixStore* storage_;
  const ModelLimits limits_;
  const MemoryAccount memory_;
  std::mutex register_mutex_;  // one registration or removal at a time
  mutable std::mutex mutex_;
  std::map<std::string, Entry, std::less<>> models_;
  mutable uint64_t uses_ = 0;
  uint64_t dropped_ = 0;
};

}  // namespace prefixd
