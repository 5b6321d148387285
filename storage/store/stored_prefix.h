// Reads a stored prefix: rows are copied, viewed for a step, streamed, prefetched or read in place.
//
// Thread-safety: all methods of StoredPrefix may be called concurrently. Errors: kCorrupt means
// that stored bytes did not verify and were not returned; kUnavailable that the disk did not answer
// in time.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/ledger.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"
#include "prefixd/row_ref.h"
#include "prefixd/stored_part.h"
#include "storage/read/row_access.h"
#include "storage/segment/prefix_info.h"

namespace prefixd::storage {

// A StoredPrefix is opened for reading and pinned: removal waits for (or refuses) open prefixes.
class StoredPrefix {
 public:
  virtual ~StoredPrefix() = default;
  virtual const PrefixInfo& info() const = 0;
  virtual const ModelRecord& model() const = 0;
  virtual uint32_t n_tokens() const = 0;                 // may be cut shorter than info().n_tokens
  virtual std::span<const uint32_t> tokens() const = 0;  // [n_tokens]

  // Whether rows are missing: of the last segment's tokens, since no other can be compressed. Reads
  // of those, and VisitRows, are kFailedPrecondition then.
  bool compressed() const { return info().kept_rows > 0; }
  // Returns the tokens of the last segment whose rows a KV head has: positions, ascending. Only
  // where the prefix is compressed.
  virtual Result<std::vector<uint32_t>> KeptTokens(uint32_t layer, uint32_t kv_head) const = 0;

  // Gathers single rows, or a part of them, in the order of `ids` (ascending, < n_tokens). Every
  // byte returned was verified against its page's checksum.
  virtual Status ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                          RowPart part, RowSink out, ReadStats* stats) const = 0;
  // Reads the same rows and copies only those that cannot be read in place; `out.rows` becomes
  // [ids.size()].
  virtual Status ViewRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                          RowPart part, RowViews& out, ReadStats* stats) const = 0;
  // Streams a run of rows, or a part of them, without displacing hot rows of the host tier.
  virtual Status ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range, RowPart part,
                           RowSink out, RangeUse use, ReadStats* stats) const = 0;
  Status ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range, RowPart part, RowSink out,
                   ReadStats* stats) const {
    return ReadRange(layer, kv_head, range, part, out, RangeUse::kShared, stats);
  }
  // These read whole rows, densely: out [ids.size()][row bytes] and [range.size()][row bytes].
  Status ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                  std::span<std::byte> out, ReadStats* stats) const {
    return ReadRows(layer, kv_head, ids, RowPart::kRow, {out, RowBytes(layer)}, stats);
  }
  Status ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range, std::span<std::byte> out,
                   ReadStats* stats) const {
    return ReadRange(layer, kv_head, range, RowPart::kRow, {out, RowBytes(layer)}, stats);
  }
  // Visits every row once, in runs of some megabytes, in stored order: for readers that do not mind
  // the order, such as exact attention. Rows are in place where the host tier has them, pinned
  // while `visit` runs; else copied into room.own. Streams as ReadRange does. room.rows is empty
  // afterwards. Begins behind `place`, and moves it with each run that `visit` has taken: a visit
  // that `visit` ends with an error goes on with the run that it was given.
  virtual Status VisitRows(uint32_t layer, uint32_t kv_head, RowViews& room,
                           const RowVisitor& visit, VisitPlace& place, ReadStats* stats) const = 0;
  Status VisitRows(uint32_t layer, uint32_t kv_head, RowViews& room, const RowVisitor& visit,
                   ReadStats* stats) const {
    VisitPlace from_the_first;
    return VisitRows(layer, kv_head, room, visit, from_the_first, stats);
  }
  // Prefetches such rows (ascending, < n_tokens) into the host tier, behind all other reads, for a
  // step that may soon need them and does not wait. Reads at most max_bytes; ends when `stop` is
  // set (kCancelled, whatever the disk does). Does nothing where there is no tier, or where the
  // order of reclustered rows has not been read yet. An error means only that the rows are not
  // there; `stats` gets what was read in any case.
  virtual Status Prefetch(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                          RowPart part, uint64_t max_bytes, const std::atomic<bool>& stop,
                          ReadStats* stats) const = 0;
  // Returns how the rows are stored, part by part in order; constant while the prefix is open.
  virtual std::span<const StoredPart> parts() const = 0;
  // Pins rows in place in the host tier, and first reads those that are not there; copies nothing.
  // Returns all rows or an error: kFailedPrecondition for rows larger than a page, for encoded rows
  // and without a host tier (use ReadRows), kResourceExhausted beyond what a tenant may hold in
  // place (half its share of the tier, counted in pages).
  virtual Result<RowsInPlace> ReadInPlace(uint32_t layer, uint32_t kv_head,
                                          std::span<const uint32_t> ids,
                                          ReadStats* stats) const = 0;
  // Pins a run of rows of some KV heads in place where the host tier has all of it, and reads
  // nothing; what `out` of a run points to is not looked at. kNotFound: some of it is not there;
  // otherwise errors as of ReadInPlace.
  virtual Result<RunsInPlace> FindInPlace(uint32_t layer, TokenRange range,
                                          std::span<const WantedRun> runs,
                                          ReadStats* stats) const = 0;

 private:
  // 0 of a layer that is not the model's: the read refuses it.
  size_t RowBytes(uint32_t layer) const {
    const KvGeometry& g = model().geometry;
    return layer < g.n_layers ? g.row(layer).bytes() : 0;
  }
};

}  // namespace prefixd::storage
