// Shares prepared prefixes among the sessions that hold them, by (segment, length), and keeps the
// memory of those that no session holds any more while no other prefix needs the room: a prompt
// that comes again reads nothing twice. Idle memory holds nothing open, so prefixes are removed,
// evicted and rewritten as if it were not there.
//
// Thread-safety: all methods may be called concurrently. Must outlive the prefixes it gave.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/prefix/prepared_prefix.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

class PreparedCache {
 public:
  // Lets the selector's memory, and the store's budget, reclaim what idle prefixes hold, the
  // longest unused one first.
  PreparedCache(PreparedPrefix::Services services, storage::PrefixStore& storage);
  PreparedCache(const PreparedCache&) = delete;
  PreparedCache& operator=(const PreparedCache&) = delete;

  Result<std::shared_ptr<PreparedPrefix>> Get(const std::shared_ptr<const Model>& model,
                                              const storage::SegmentId& id, uint32_t n_tokens);
  // Call when derived data was made for the segment, or when the segment is gone: loaded prefixes
  // with it serve the sessions that have them, and no new ones.
  void Forget(const storage::SegmentId& segment);
  // Drops idle prefixes whose segments are gone.
  void Prune(const std::function<bool(const storage::SegmentId&)>& exists);

 private:
  using Key = std::pair<storage::SegmentId, uint32_t>;
  struct Open {
    std::weak_ptr<PreparedPrefix> prefix;
    std::weak_ptr<PrefixMemory> memory;
    std::vector<storage::SegmentId> chain;
  };
  struct Idle {
    Key key;
    std::shared_ptr<const Model> model;
    std::shared_ptr<PrefixMemory> memory;
    std::vector<storage::SegmentId> chain;
    std::string tenant;
  };

  void Retire(Idle idle);
  void AddIdle(Idle idle);
  std::shared_ptr<PrefixMemory> TakeIdle(const Key& key, const Model* model);
  // Of one tenant; null: of any.
  bool DropOldest(const std::string* tenant);

  const PreparedPrefix::Services services_;
  storage::PrefixStore& storage_;
  std::mutex mutex_;
  std::map<Key, Open> open_;
  std::mutex idle_mutex_;  // may be taken while mutex_ is held
  std::list<Idle> idle_;   // most recently used first
  MemoryBudget::Giver giver_;
};

}  // namespace prefixd
