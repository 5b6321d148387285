// Makes another file for a stored segment and puts it in the old one's place: what all rewriting
// shares. The new file is written and synced beside the old one, then one catalog commit swaps it
// in. New files are encrypted as the store's keys say, whatever the old one was.
//
// Thread-safety: free functions; each file is one thread's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "storage/core/store_core.h"
#include "storage/io/progress.h"
#include "storage/segment/records.h"
#include "storage/segment/segment_file_writer.h"

namespace prefixd::storage {

// A NewFile holds everything of the new file except its rows. Its space is promised until the
// caller has committed.
struct NewFile {
  SpaceReservation space;
  std::unique_ptr<SegmentFileWriter> writer;
};

Result<NewFile> CreateNewFile(StoreCore& core, const std::string& tenant,
                              const SegmentHeader& header, std::string manifest,
                              std::vector<uint32_t> token_ids);
// Returns the manifest that the segment's file would have if it were written now.
Result<SegmentManifest> ManifestOf(StoreCore& core, const SegmentRecord& record);
// Seals it under the record's sequence, and counts what was written.
Status SealNewFile(StoreCore& core, SegmentFileWriter& writer, const SegmentRecord& record);

// Puts the new file in the place of the old: `in_tree` changes the tree and calls the function that
// commits `change`. After a failed commit it is unknown which file the catalog names until it is
// opened anew, when recovery frees the other one; a file without a commit attempt is removed now.
template <typename InTree>
Status SwapIn(StoreCore& core, NewFile& file, SequenceTicket& sequence, const CatalogChange& change,
              InTree in_tree) {
  bool asked = false;
  Status swapped = in_tree([&]() -> Status {
    PREFIXD_TRY(core.catalog->MayApply());
    asked = true;
    return core.catalog->Apply(change);
  });
  if (swapped.ok()) return swapped;
  if (asked) {
    file.space.Keep();
    sequence.LeaveOpen();
  } else {
    file.writer->Discard();
  }
  return swapped;
}

}  // namespace prefixd::storage
