// Shares prepared prefixes among the sessions that hold them, by (segment, length). Each is opened
// by whoever asks for it first; others who ask for it meanwhile wait for it, and nobody else does.
// Keeps the memory of those that no session holds any more while no other prefix needs the room: a
// prompt that comes again reads nothing twice. Idle memory holds nothing open, so prefixes are
// removed, evicted and rewritten as if it were not there.
//
// Thread-safety: all methods may be called concurrently. Must outlive the prefixes it gave.
#pragma once

#include <condition_variable>
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
  struct OpenPrefix {
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
    bool live = false;  // own tokens of one session, which asks for each of their lengths once
  };

  // A prefix that is being opened. mutex_ guards it.
  struct Loading {
    bool done = false;
    Status status;
    std::shared_ptr<PreparedPrefix> prepared;
    std::vector<storage::SegmentId> forgotten;  // while it was opened
    std::condition_variable changed;
  };
  using IdleNode = std::list<Idle>;  // one, or none; moving it allocates nothing

  Result<std::shared_ptr<PreparedPrefix>> Open(const std::shared_ptr<const Model>& model,
                                               const Key& key, Loading& loading);
  // Returns what is open, or waits for it while another thread opens it; null: this call is to open
  // it and to end `mine`, which others see from now on.
  Result<std::shared_ptr<PreparedPrefix>> FindOrWait(const std::shared_ptr<const Model>& model,
                                                     const Key& key,
                                                     std::shared_ptr<Loading>& mine);
  void Retire(IdleNode idle);
  void AddIdle(IdleNode idle);
  IdleNode TakeIdle(const Key& key, const Model* model);
  // Of one tenant; null: of any.
  bool DropOldest(const std::string* tenant);

  const PreparedPrefix::Services services_;
  storage::PrefixStore& storage_;
  std::mutex mutex_;
  std::map<Key, OpenPrefix> open_;
  std::map<Key, std::shared_ptr<Loading>> loading_;
  std::mutex idle_mutex_;  // may be taken while mutex_ is held
  std::list<Idle> idle_;   // most recently used first
  MemoryBudget::Giver giver_;
};

}  // namespace prefixd
