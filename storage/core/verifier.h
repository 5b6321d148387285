// Reads and verifies what is stored: segments with their blobs.
//
// Thread-safety: all methods may be called concurrently, and none holds a lock while it reads:
// segments may be removed, rewritten or compacted meanwhile. OnBlobLost is called once, before
// anything is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/memory_budget.h"
#include "storage/catalog/catalog.h"
#include "storage/catalog/prefix_tree.h"
#include "storage/core/segment_access.h"
#include "storage/core/stored_models.h"
#include "storage/core/verify_report.h"
#include "storage/files/blob_store.h"
#include "storage/files/segment_cache.h"
#include "storage/files/store_options.h"
#include "storage/io/progress.h"
#include "storage/read/page_reader.h"

namespace prefixd::storage {

// Says how one segment is verified.
struct VerifyRun {
  ScrubPosition from;  // verified pages, if the file is still this one, end here
  size_t window_pages = kWindowPages;
  IoPriority blobs = IoPriority::kStepRead;
  MemoryAccount memory;  // empty for the scrub, which reads one segment at a time
  std::function<bool(const SegmentRecord& record, uint64_t n)> page_done;
};

class Verifier {
 public:
  // All borrowed. direct: whether the file system takes O_DIRECT.
  struct Parts {
    const StoreOptions& options;
    const bool direct;
    const ReadServices& services;
    PrefixTree& tree;
    SegmentCache& files;
    BlobStore& blobs;
    const StoredModels& models;
    SegmentAccess& segments;
    const KeyRing* keys;  // null: none
  };
  explicit Verifier(const Parts& parts) : parts_(parts) {}

  // Verifies the segments that `wanted` returns, each once; asks it again when some were removed or
  // compacted meanwhile, for what took their place. memory: for the tables of what is verified.
  Result<VerifyReport> Verify(const std::function<std::vector<SegmentRecord>()>& wanted,
                              const Progress& progress, MemoryAccount memory);
  // Reads and verifies one segment and its blobs; adds the findings to `report`. kCancelled when
  // `page_done` returns false; that, a deadline and want of memory are no findings.
  Status VerifySegment(SegmentRecord record, const VerifyRun& run, VerifyReport& report);
  // Deletes a blob unless it verifies after all, and tells OnBlobLost, so that it is made again.
  void DropDamagedBlob(const SegmentId& id, std::string_view name);
  void OnBlobLost(BlobLost told) { blob_lost_ = std::move(told); }

 private:
  const Parts parts_;
  BlobLost blob_lost_;
};

}  // namespace prefixd::storage
