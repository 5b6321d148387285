// Removes segments and frees what they took: files, pages in memory, blobs.
//
// Thread-safety: all methods may be called concurrently. A segment is removed under the store's
// commit mutex, so that no put commits below it meanwhile. Lists of what may go are made without
// it, and each segment is looked at again under it.
#pragma once

#include <mutex>
#include <string>

#include "storage/catalog/catalog.h"
#include "storage/catalog/prefix_tree.h"
#include "storage/files/blob_store.h"
#include "storage/files/segment_cache.h"
#include "storage/files/store_options.h"
#include "storage/host_tier/host_tier.h"

namespace prefixd::storage {

// Says why something goes, for the history of what is gone.
struct RemovalCause {
  GoneReason reason = GoneReason::kRemoved;
  std::string why;
};

class SegmentRemoval {
 public:
  // All borrowed.
  struct Parts {
    const StoreOptions& options;
    std::mutex& commit_mutex;
    Catalog& catalog;
    PrefixTree& tree;
    SegmentCache& files;
    HostTier& tier;
    BlobStore& blobs;
  };
  explicit SegmentRemoval(const Parts& parts) : parts_(parts) {}

  // Removes a segment with every name that stands for it. REQUIRES commit_mutex.
  Status Erase(const SegmentId& id, const RemovalCause& cause);
  // Frees the files and the memory of a segment that is gone from catalog and tree.
  Status Free(const SegmentRecord& record);
  // Frees a file that the catalog does not name any more; readers keep it open.
  Status FreeFile(const SegmentRecord& old);
  // Removes every segment that no name needs any more. Takes commit_mutex.
  void FreeUnneeded(const RemovalCause& cause);

 private:
  const Parts parts_;
};

}  // namespace prefixd::storage
