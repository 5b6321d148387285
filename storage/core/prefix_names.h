// Changes the names of prefixes: removes them, says how long they stay, and removes those that
// expired. Segments are removed when no name needs them (segment_removal.h).
//
// Thread-safety: all methods may be called concurrently. A name changes under the store's commit
// mutex; catalog and tree change together under the tree's lock, inside it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>

#include "storage/catalog/catalog.h"
#include "storage/catalog/prefix_tree.h"
#include "storage/core/lifetime_change.h"
#include "storage/core/segment_access.h"
#include "storage/core/segment_removal.h"

namespace prefixd::storage {

class PrefixNames {
 public:
  // All borrowed. expired: counts names that the sweep removed.
  struct Parts {
    std::mutex& commit_mutex;
    Catalog& catalog;
    PrefixTree& tree;
    const SegmentAccess& segments;
    SegmentRemoval& removal;
    std::atomic<uint64_t>& expired;
  };
  explicit PrefixNames(const Parts& parts) : parts_(parts) {}

  // Removes a prefix's name, and every segment that no name needs any more.
  Status Remove(const SegmentId& id);
  Status SetLifetime(const SegmentId& id, const LifetimeChange& change);
  // Renews the name of a prefix that was put again: it stays at least as long as given, and is
  // restored if it was gone.
  Status Keep(const SegmentId& id, bool pinned, int64_t expires_unix_ms);
  void SweepExpired();

 private:
  struct Name {
    bool gone = false;  // removed or expired
    bool pinned = false;
    int64_t expires_unix_ms = 0;
  };
  // Removes the name, and its segment if nothing else needs that. REQUIRES commit_mutex.
  Status RemoveName(const SegmentId& id, const RemovalCause& cause);
  // Commits, synced, what `edit` makes of a prefix's name; afterwards the name is listed.
  Status Change(const SegmentId& id, const std::function<Status(Name&)>& edit);

  const Parts parts_;
};

}  // namespace prefixd::storage
