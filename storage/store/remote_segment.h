// Copies segments to and from a remote tier. One segment is a few objects:
//
//   segments/<segment>/<file>/<n>   pages of rows, kRemotePartPages each
//   segments/<segment>/meta         every other page: header, token ids, manifest, orders, checksum
//                                   table, footer. Put last: a segment without it does not exist
//
// The checksum table travels with the data, so every page that comes back is verified like one from
// the disk; the tier need not be trusted. Encrypted segments travel as they lie on the disk, and
// are of use to stores that have their key.
//
// Thread-safety: all functions may be called concurrently.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "storage/core/store_core.h"
#include "storage/remote/remote_tier.h"
#include "storage/segment/segment_file.h"
#include "storage/store/prefix_store.h"

namespace prefixd::storage {

inline constexpr uint64_t kRemotePartPages = 2048;

// These implement PrefixStore::Push and ::Pull.
Status PushChain(StoreCore& core, const SegmentId& id, RemoteTier& remote,
                 const Progress& progress);
Status PullChain(StoreCore& core, const SegmentId& id, const RemoteTier& remote,
                 const Progress& progress);

// Removes a segment's objects, the meta object first. The caller must know that no children are
// left.
Status DeleteRemote(RemoteTier& remote, const SegmentId& id, const KeyRing* keys = nullptr);

// A RemoteSegment is a segment in a remote tier whose small parts are read and verified.
class RemoteSegment {
 public:
  // Errors: kNotFound; kCorrupt when the tier's answer does not verify; kFailedPrecondition when
  // the segment is encrypted and `keys` (null: none) lack its key.
  static Result<RemoteSegment> Open(const RemoteTier& remote, const SegmentId& id,
                                    const KeyRing* keys = nullptr);

  const SegmentHeader& header() const { return header_; }
  const SegmentLayout& layout() const { return layout_; }
  const SegmentFooter& footer() const { return footer_; }
  std::vector<uint32_t> tokens() const;
  std::string manifest() const;
  std::span<const uint64_t> table() const { return table_; }
  const PageSeal& seal() const { return seal_; }
  // Returns the pages from the token page to the last one before the table, as stored.
  std::span<const std::byte> small_pages() const;

  // Reads verified pages of rows [first, first + n), as stored, in one ranged read per object.
  Status ReadPages(const RemoteTier& remote, uint64_t first, uint64_t n,
                   std::span<std::byte> out) const;

 private:
  SegmentHeader header_;
  SegmentLayout layout_;
  SegmentFooter footer_;
  PageSeal seal_;
  std::vector<std::byte> meta_;
  std::vector<std::byte> plain_;  // small_pages(), decrypted
  std::vector<uint64_t> table_;
};

}  // namespace prefixd::storage
