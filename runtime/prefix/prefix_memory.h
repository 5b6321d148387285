// Holds what steps over one prefix have loaded or made: anchors, keys, indexes, materialised
// summaries.
// All of it follows from stored rows, which never change, and it keeps nothing open: it may outlive
// the sessions that loaded it and serve the next ones (prepared_cache.h).
//
// Thread-safety: a head's mutex makes its loads exclude each other; data whose flag is set stays
// constant while the prefix is prepared.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "base/memory_budget.h"
#include "index/search/key_index.h"
#include "runtime/indexes/indexes.h"
#include "runtime/prefix/prefix_keys.h"
#include "runtime/prefix/selector_memory.h"
#include "runtime/summaries/materialised_summaries.h"
#include "runtime/summaries/token_features.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

struct PrefixMemory {
  struct LoadedIndex {
    std::atomic<bool> loaded{false};
    PrefixIndex of;  // its indexes hold what they take of the selector's memory
  };
  struct Head {
    CallMutex mutex;       // held while loading
    CallMutex keys_mutex;  // held while loading keys, which takes long without blocking steps
    std::atomic<bool> has_anchors{false}, has_keys{false}, has_features{false}, has_kept{false};
    std::vector<std::byte> anchors;  // [sinks + tail][row bytes]
    MemoryCharge anchors_memory;
    const std::byte* keys = nullptr;  // [mid, or kept][key bytes], in PrefixMemory::keys
    std::vector<uint32_t> kept;       // of a compressed prefix: mid tokens with rows
    MemoryCharge kept_memory;
    std::array<LoadedIndex, index::kIndexKinds> indexes;
    std::optional<TokenFeatures> features;
    MemoryCharge features_memory;
    // Counts reads that were made before a step needed them: the next step that uses them is
    // charged.
    std::atomic<bool> has_preloaded{false};
    std::mutex preloaded_mutex;
    storage::ReadStats ahead;
  };

  explicit PrefixMemory(size_t n_heads) : heads(n_heads) {}
  // Drops what sessions bring again at little cost: everything but anchors, keys and indexes. No
  // other thread may use the memory.
  void DropCheap() {
    for (Head& head : heads) {
      head.features.reset();
      head.features_memory.Release();
      head.has_features = false;
    }
    summaries.clear();
  }

  uint32_t kept_rows = 0;  // the prefix's: what is loaded is of no use to one with others
  std::vector<Head> heads;
  std::mutex keys_mutex;
  std::shared_ptr<PrefixKeys> keys;  // null: nothing is loaded
  uint32_t keys_before = 0;          // mid tokens whose keys were there when `keys` was set
  CallMutex summaries_mutex;
  // Those that the plan of some session holds, by Kept() and head, and the clusters that they read.
  std::map<std::pair<EstimatorVariant, size_t>, std::weak_ptr<const KeptSummary>> summaries;
  std::weak_ptr<const PrefixClusters> clusters;
  std::atomic<bool> stale{false};  // newer derived data exists: no new session may use this
};

}  // namespace prefixd
