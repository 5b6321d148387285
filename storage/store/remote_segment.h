// Segments in a remote tier. One segment is a few objects:
//
//   segments/<segment>/<file>/<n>   pages of rows, kRemotePartPages each
//   segments/<segment>/meta         every other page: header, token ids, manifest, orders, checksum
//                                   table, footer. Put last: a segment without it does not exist
//
// The checksum table travels with the data, so every page that comes back is verified as one from
// the disk is; the tier need not be trusted.
//
// Thread-safety: all functions may be called concurrently.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "storage/store/prefix_store.h"
#include "storage/remote/remote_tier.h"
#include "storage/segment/segment_file.h"
#include "storage/store/store_core.h"

namespace prefixd::storage {

inline constexpr uint64_t kRemotePartPages = 2048;

// PrefixStore::Push and ::Pull.
Status PushChain(StoreCore& core, const SegmentId& id, RemoteTier& remote,
                 const Progress& progress);
Status PullChain(StoreCore& core, const SegmentId& id, const RemoteTier& remote,
                 const Progress& progress);

// Removes a segment's objects, the meta object first. Whose children are still there is the
// caller's to know.
Status DeleteRemote(RemoteTier& remote, const SegmentId& id);

// A segment in a remote tier, its small parts read and verified.
class RemoteSegment {
 public:
  // kNotFound; kCorrupt when what the tier returns does not verify.
  static Result<RemoteSegment> Open(const RemoteTier& remote, const SegmentId& id);

  const SegmentHeader& header() const { return header_; }
  const SegmentLayout& layout() const { return layout_; }
  const SegmentFooter& footer() const { return footer_; }
  std::vector<uint32_t> tokens() const;
  std::string manifest() const;
  std::span<const uint64_t> table() const { return table_; }
  // Pages from the token page to the last but the table and footer, as stored.
  std::span<const std::byte> small_pages() const;

  // Verified pages of rows [first, first + n), in one ranged read per object.
  Status ReadPages(const RemoteTier& remote, uint64_t first, uint64_t n,
                   std::span<std::byte> out) const;

 private:
  SegmentHeader header_;
  SegmentLayout layout_;
  SegmentFooter footer_;
  std::vector<std::byte> meta_;
  std::vector<uint64_t> table_;
};

}  // namespace prefixd::storage
