// Opens stored segments, and says which of them may not be used.
//
// Thread-safety: all methods may be called concurrently. It has no lock of its own, and needs none
// of its callers': tree, catalog and cache lock themselves, one after another.
#pragma once

#include <memory>
#include <string>

#include "storage/catalog/catalog.h"
#include "storage/catalog/prefix_tree.h"
#include "storage/core/store_counters.h"
#include "storage/core/stored_models.h"
#include "storage/files/blob_store.h"
#include "storage/files/open_files.h"
#include "storage/files/segment_cache.h"
#include "storage/files/store_options.h"
#include "storage/read/page_reader.h"
#include "storage/segment/prefix_info.h"
#include "storage/segment/segment_file.h"

namespace prefixd::storage {

// Says what of a segment's file is used: its token ids alone, or rows too.
enum class Need : uint8_t { kIds, kRows };

class SegmentAccess {
 public:
  // What it works on, all borrowed. direct: whether the file system takes O_DIRECT.
  struct Parts {
    const StoreOptions& options;
    const bool direct;
    const ReadServices& services;
    Catalog& catalog;
    PrefixTree& tree;
    OpenFiles& open_files;
    SegmentCache& files;
    const BlobStore& blobs;
    const StoredModels& models;
    StoreCounters& counters;
    const KeyRing* keys;  // null: none
  };
  explicit SegmentAccess(const Parts& parts) : parts_(parts) {}

  // Opens (or finds open) a pinned segment, in the file that holds it now; quarantines one that
  // does not verify. kResourceExhausted: there are as many files open as there may be.
  Result<std::shared_ptr<const SegmentFile>> Open(const SegmentId& id, Need need = Need::kRows);
  // Checks header and footer of the file of a segment, behind all other reads, and quarantines the
  // segment if they do not verify, which is no error. kNotFound: it is not stored any more.
  Status CheckEnds(const SegmentId& id);
  void Quarantine(const SegmentId& id, const std::string& reason);
  void LiftQuarantine(const SegmentId& id);
  // Notes a use, in memory and, at times, in the catalog.
  void Touch(const SegmentId& id);
  Result<PrefixInfo> Info(const SegmentId& id) const;
  // Checks what records say of one another, which no segment file can show. The message of kCorrupt
  // says what is wrong. The error costs this segment and those below it, not the store.
  Status CheckRelations(const SegmentRecord& record) const;

 private:
  // Closes idle files, the tenant's own first, where there is no place for another.
  Result<OpenFiles::Place> PlaceFor(const std::string& tenant);
  // Judges a file that could not be opened. False: the segment has another file now.
  bool Condemn(const SegmentRecord& record, const Error& why);

  const Parts parts_;
};

}  // namespace prefixd::storage
