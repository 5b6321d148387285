// Writes one segment file: rows in any order (arrival layout) or chunk by chunk (reclustered
// layout), then a seal. Pages that calls fill only in part wait in memory; whole pages go out in
// large writes while the caller goes on. A segment whose rows come in runs keeps at most two
// partial pages per run and KV head.
//
// Thread-safety: one thread at a time. Destroying an unsealed (or discarded) writer removes the
// file.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/memory_budget.h"
#include "storage/io/buffer_pool.h"
#include "storage/io/file.h"
#include "storage/io/io_engine.h"
#include "storage/segment/page_seal.h"
#include "storage/segment/segment_format.h"
#include "storage/segment/written_rows.h"

namespace prefixd::storage {

// Whole pages leave for the disk in slabs of this size.
inline constexpr size_t kSlabBytes = 4u << 20;

struct SegmentFilePlan {
  std::filesystem::path path;  // must not exist
  SegmentHeader header;
  std::string manifest;                      // header.manifest_bytes bytes
  std::vector<uint32_t> token_ids;           // header.tokens.size() ids
  std::shared_ptr<const FileCipher> cipher;  // of header.cipher (EncryptNewFile); null: none
  bool direct = false;
  uint64_t max_buffer_bytes = 16ull << 20;  // bound of whole pages on their way to the disk
  std::shared_ptr<BufferPool> slabs;        // buffers of kSlabBytes each
  MemoryAccount memory;                     // for all that the writer keeps
};

class SegmentFileWriter {
 public:
  // Creates and allocates the whole file: kResourceExhausted when it does not fit, or what the
  // writer keeps does not fit into memory.
  static Result<std::unique_ptr<SegmentFileWriter>> Create(IoEngine& engine, SegmentFilePlan plan);
  ~SegmentFileWriter();
  SegmentFileWriter(const SegmentFileWriter&) = delete;
  SegmentFileWriter& operator=(const SegmentFileWriter&) = delete;

  const SegmentLayout& layout() const { return layout_; }
  // Ranges of heads are of the model's, here and below: HeadRange of a model.
  // Returns whether WriteRows would take these tokens of these heads (n above 0): kInvalidArgument
  // for tokens outside the segment or written before, and for some heads of a run of heads that was
  // written together.
  // kResourceExhausted when memory is short for the pages that the rows may leave half-filled:
  // after success writing them, in any pieces, finds that memory.
  Status CheckRun(uint32_t layer, HeadRange heads, uint32_t first, uint32_t n);
  // Writes rows of the arrival layout like SegmentWriter::WriteRows, as stored. After a failed
  // write every call returns its error.
  Status WriteRows(uint32_t layer, HeadRange heads, uint32_t first, uint32_t n,
                   std::span<const std::byte> rows);
  // Waits until the disk has taken so much that WriteRows need not wait for it with n tokens. A
  // call may end here (base/call_scope.h), and not while its rows are written.
  Status AwaitRoom(uint32_t n);
  // Writes one chunk of one (layer, KV head) of the reclustered layout; chunks come once each, in
  // ascending order. rows: [chunk size][row bytes] in token order; slot s holds row order[s].
  // kInvalidArgument when `order` is no permutation or it is not this chunk's turn.
  Status WriteChunk(uint32_t layer, uint32_t head, uint32_t chunk, std::span<const std::byte> rows,
                    std::span<const uint32_t> order);
  // Writes all rows of one (layer, KV head) of a compressed segment, and which they are; runs come
  // once each, in ascending order. kept: own indices, ascending; rows: [kept][row bytes], as
  // stored.
  Status WriteKept(uint32_t layer, uint32_t head, std::span<const uint32_t> kept,
                   std::span<const std::byte> rows);
  // Writes pages of rows, or of orders, as another file with this header's layout of both has them:
  // instead of the calls above, each page once, ascending, orders behind rows. first_page: of this
  // file.
  Status CopyPages(uint64_t first_page, std::span<const std::byte> pages);
  // Returns kFailedPrecondition naming the first missing layer and token of these heads; nothing
  // has changed then.
  Status CheckComplete(HeadRange heads) const;
  // Writes the rest and syncs file and directory. The file stays unless Discard is called.
  Status Seal(uint64_t sequence, int64_t unix_ms, const EncodingError& error);
  // Waits for what is in flight and removes the file.
  void Discard();

  uint64_t bytes_written() const { return bytes_written_; }
  // Returns whether the file system has allocated all blocks of the file (some cannot).
  bool allocated() const { return allocated_; }

 private:
  struct Slab;
  struct Partial {
    std::unique_ptr<std::byte[]> bytes;
    uint32_t rows = 0;
  };

  SegmentFileWriter(IoEngine& engine, SegmentFilePlan plan, const SegmentLayout& layout);
  Status Allocate();
  HeadRange AllHeads() const { return {0, layout_.shape.n_kv_heads}; }
  // Returns what a range of the model's heads is in a layer.
  HeadRange HeadsIn(uint32_t layer, HeadRange heads) const {
    const uint32_t own = layout_.heads.heads_in(layer), all = layout_.shape.n_kv_heads;
    return {heads.first * own / all, heads.n * own / all};
  }
  // Returns the slab that comes behind `at`, the first again where there is no memory for another:
  // the put then waits for the disk earlier.
  size_t NextSlab(size_t at);
  // Returns what the writer takes with the partial pages that another run may leave.
  uint64_t BytesWithRun(uint32_t layer, HeadRange heads) const;
  Status PutRun(uint32_t layer, uint32_t head, uint32_t i, uint32_t n, const std::byte* rows);
  Status PutPartial(uint64_t page, uint32_t offset, uint32_t rows_in_page, uint32_t n,
                    std::span<const std::byte> rows);
  // Queues a zero-padded page that holds `bytes` for file page `page`.
  Status PutPage(uint64_t page, std::span<const std::byte> bytes);
  Status PutBytes(uint64_t first_page, std::span<const std::byte> bytes);
  // Writes items of a chunk, `first` bytes into each row, in slot order from file page `page` on.
  Status PutItems(uint64_t page, const ItemPages& items, std::span<const std::byte> rows,
                  size_t row_bytes, size_t first, std::span<const uint32_t> order);
  Status FlushSlab();
  Status Reap(Slab& slab);
  Status WriteTableAndFooter(uint64_t sequence, int64_t unix_ms, const EncodingError& error);
  void WaitAll();

  IoEngine& engine_;
  const SegmentFilePlan plan_;
  const SegmentLayout layout_;
  UniqueFd fd_;
  bool exists_ = false, sealed_ = false, allocated_ = false;
  std::vector<std::unique_ptr<Slab>> slabs_;
  size_t current_ = 0;
  size_t taken_ = 0;                                // the first so many slabs are paid for
  std::unordered_map<uint64_t, Partial> partials_;  // keyed by file page
  const PageSeal seal_;
  std::vector<uint64_t> table_;  // [layout.table_words()]
  WrittenRows written_;          // in the arrival layout
  uint64_t chunks_written_ = 0;  // in the reclustered layout
  uint64_t runs_written_ = 0;    // of a compressed segment
  uint64_t pages_copied_ = 0;    // by CopyPages
  std::vector<uint16_t> slots_;  // the order of the run being written, so far
  Status failed_;
  uint64_t bytes_written_ = 0;
  uint64_t fixed_bytes_ = 0;  // of memory_, with the slabs in use; the rest is for partial pages
  MemoryCharge memory_;
};

}  // namespace prefixd::storage
