#include "storage/segment/segment_file_writer.h"

#include <fcntl.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <functional>

#include "base/check.h"
#include "base/rows/stream_copy.h"
#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/segment/segment_file.h"

namespace prefixd::storage {
namespace {

constexpr size_t kSlabPages = kSlabBytes / kPageBytes;
constexpr size_t kMaxSlabs = 8;
constexpr size_t kLeastSlabs = 2;        // one is filled while the other is written
constexpr size_t kMaxOpPages = 256;      // 1 MiB, and below the iovec limit
constexpr size_t kPartialOverhead = 64;  // its place in the map
constexpr size_t kMaxPartialPages = (256u << 20) / kPageBytes;

}  // namespace

// A Slab holds whole pages that are written together. `pages[i]` is the file page of slot i.
struct SegmentFileWriter::Slab {
  explicit Slab(size_t n_pages) : capacity(n_pages) {}
  std::byte* slot(size_t i) const { return memory.data() + i * kPageBytes; }

  AlignedBuffer memory;  // allocated with the first page
  const size_t capacity;
  std::vector<uint64_t> pages;
  std::vector<IoOp> ops;
  IoBatch batch;
};

SegmentFileWriter::SegmentFileWriter(IoEngine& engine, SegmentFilePlan plan,
                                     const SegmentLayout& layout)
    : engine_(engine),
      plan_(std::move(plan)),
      layout_(layout),
      seal_(plan_.header.file, plan_.cipher),
      table_(layout.table_words()),
      written_(layout.heads, layout.shape.n_kv_heads, plan_.header.tokens) {
  const size_t pages = std::min<uint64_t>(kSlabPages, layout.table_page);
  const size_t n =
      std::clamp<uint64_t>(plan_.max_buffer_bytes / (pages * kPageBytes), kLeastSlabs, kMaxSlabs);
  for (size_t i = 0; i < n; ++i) slabs_.push_back(std::make_unique<Slab>(pages));
  taken_ = kLeastSlabs;
  fixed_bytes_ = taken_ * pages * kPageBytes + table_.size() * sizeof(uint64_t) +
                 plan_.token_ids.size() * sizeof(uint32_t);
}

SegmentFileWriter::~SegmentFileWriter() {
  if (!sealed_) Discard();
  WaitAll();
  for (const auto& slab : slabs_) {
    if (slab->capacity == kSlabPages) plan_.slabs->Give(std::move(slab->memory));
  }
}

Result<std::unique_ptr<SegmentFileWriter>> SegmentFileWriter::Create(IoEngine& engine,
                                                                     SegmentFilePlan plan) {
  PREFIXD_ASSIGN(const SegmentLayout layout, plan.header.Layout());
  assert(plan.manifest.size() == plan.header.manifest_bytes);
  assert(plan.token_ids.size() == plan.header.tokens.size());
  PREFIXD_CHECK(plan.header.encrypted() == (plan.cipher != nullptr), plan.header.encrypted());
  std::unique_ptr<SegmentFileWriter> writer(new SegmentFileWriter(engine, std::move(plan), layout));
  PREFIXD_ASSIGN(writer->memory_,
                 writer->plan_.memory.Take(MemoryKind::kPuts, writer->fixed_bytes_));
  PREFIXD_TRY(writer->Allocate());
  return writer;
}

Status SegmentFileWriter::Allocate() {
  PREFIXD_ASSIGN(fd_, OpenMaybeDirect(plan_.path, O_WRONLY | O_CREAT | O_EXCL, plan_.direct));
  exists_ = true;
  CrashPoint("segment.created");
  PREFIXD_ASSIGN(allocated_, Preallocate(fd_.get(), layout_.file_bytes(), plan_.path));
  std::vector<std::byte> header(kPageBytes);
  plan_.header.Encode(PageBytes(header.data(), kPageBytes), plan_.cipher.get());
  CrashPoint("segment.allocated");
  return PutPage(0, header);
}

Status SegmentFileWriter::CheckRun(uint32_t layer, HeadRange heads, uint32_t first, uint32_t n) {
  if (!failed_.ok()) return failed_;
  PREFIXD_TRY(written_.Check(layer, heads, first, n));
  return memory_.Resize(std::max(memory_.bytes(), BytesWithRun(layer, heads)));
}

Status SegmentFileWriter::WriteRows(uint32_t layer, HeadRange heads, uint32_t first, uint32_t n,
                                    std::span<const std::byte> rows) {
  if (layout_.reclustered()) return InvalidArgument("a reclustered segment is written in chunks");
  if (layout_.compressed()) return InvalidArgument("a compressed segment is written in runs");
  if (!failed_.ok()) return failed_;
  PREFIXD_TRY(written_.Check(layer, heads, first, n));
  const uint32_t begin = first - plan_.header.tokens.begin;
  const size_t head_bytes = size_t{n} * layout_.of(layer).row_bytes();
  const HeadRange own = HeadsIn(layer, heads);
  if (const size_t expected = own.n * head_bytes; rows.size() != expected) {
    return InvalidArgument("rows of " + std::to_string(rows.size()) + " bytes instead of " +
                           std::to_string(expected));
  }
  memory_.Set(BytesWithRun(layer, heads));
  for (uint32_t h = 0; h < own.n && failed_.ok(); ++h) {
    failed_ = PutRun(layer, own.first + h, begin, n, rows.data() + h * head_bytes);
  }
  if (!failed_.ok()) return failed_;
  written_.Note(layer, heads, first, n);
  return {};
}

Status SegmentFileWriter::AwaitRoom(uint32_t n) {
  if (CarriedScope::Current() == nullptr) return {};  // nothing ends this call
  PREFIXD_TRY(CheckCall());
  // A run begins and ends within a page of each head at most.
  size_t needed = 0;
  for (const RunLayout& kind : layout_.kinds) {
    if (kind.rows.n_kv_heads == 0) continue;
    needed = std::max(needed, kind.rows.n_kv_heads * (size_t{kind.row.pages(n)} + 1));
  }
  size_t room = slabs_[current_]->capacity - slabs_[current_]->pages.size();
  for (size_t at = NextSlab(current_); room <= needed && at != current_; at = NextSlab(at)) {
    Slab& next = *slabs_[at];
    while (!next.batch.WaitUntil(IoBatch::Clock::now() + kCallSlice)) PREFIXD_TRY(CheckCall());
    room += next.capacity;
  }
  return {};
}

size_t SegmentFileWriter::NextSlab(size_t at) {
  const size_t next = (at + 1) % slabs_.size();
  if (next < taken_) return next;
  const uint64_t bytes = slabs_[next]->capacity * kPageBytes;
  if (!memory_.TryResize(memory_.bytes() + bytes)) return 0;
  fixed_bytes_ += bytes;
  ++taken_;
  return next;
}

// A run begins and ends within a page of each head at most.
uint64_t SegmentFileWriter::BytesWithRun(uint32_t layer, HeadRange heads) const {
  const uint64_t pages = partials_.size() + 2 * uint64_t{HeadsIn(layer, heads).n};
  return fixed_bytes_ + written_.BytesWith(heads) + pages * (kPageBytes + kPartialOverhead);
}

Status SegmentFileWriter::WriteChunk(uint32_t layer, uint32_t head, uint32_t chunk,
                                     std::span<const std::byte> rows,
                                     std::span<const uint32_t> order) {
  if (!failed_.ok()) return failed_;
  const SegmentLayout& l = layout_;
  const RunLayout& own = l.of(layer);
  if (!l.reclustered() || uint64_t{l.run(layer, head)} * l.chunks() + chunk != chunks_written_) {
    return InvalidArgument(
        "chunks of a reclustered segment are written once and in ascending order");
  }
  const uint32_t n = l.chunk_size(chunk);
  std::vector<uint16_t> slots(n);
  std::vector<bool> taken(n);
  bool permutation = order.size() == n && rows.size() == size_t{n} * own.row_bytes();
  for (uint32_t slot = 0; permutation && slot < n; ++slot) {
    permutation = order[slot] < n && !taken[order[slot]];
    if (!permutation) break;
    taken[order[slot]] = true;
    slots[order[slot]] = static_cast<uint16_t>(slot);
  }
  if (!permutation) {
    return InvalidArgument("the order of a chunk of " + std::to_string(n) +
                           " rows must name each of them once");
  }
  slots_.insert(slots_.end(), slots.begin(), slots.end());
  ++chunks_written_;
  const uint64_t run = l.run_page(layer, head);
  failed_ = [&]() -> Status {
    const size_t row_bytes = own.row_bytes();
    PREFIXD_TRY(PutItems(run + l.chunk_keys(layer, chunk), own.key, rows, row_bytes, 0, order));
    PREFIXD_TRY(PutItems(run + l.chunk_values(layer, chunk), own.value, rows, row_bytes,
                         own.key_bytes(), order));
    if (chunk + 1 < l.chunks()) return {};
    PREFIXD_TRY(PutBytes(l.order_page_of(layer, head), std::as_bytes(std::span(slots_))));
    slots_.clear();
    return {};
  }();
  return failed_;
}

Status SegmentFileWriter::WriteKept(uint32_t layer, uint32_t head, std::span<const uint32_t> kept,
                                    std::span<const std::byte> rows) {
  if (!failed_.ok()) return failed_;
  const SegmentLayout& l = layout_;
  const bool ascend = std::ranges::adjacent_find(kept, std::greater_equal()) == kept.end() &&
                      !kept.empty() && kept.back() < l.shape.n_tokens;
  if (!l.compressed() || l.run(layer, head) != runs_written_ || kept.size() != l.rows() ||
      !ascend || rows.size() != kept.size() * l.of(layer).row_bytes()) {
    return InvalidArgument(
        "runs of a compressed segment are written once and in ascending order, each with as many "
        "rows as the header says, of tokens that ascend");
  }
  ++runs_written_;
  failed_ = [&]() -> Status {
    PREFIXD_TRY(PutRun(layer, head, 0, l.rows(), rows.data()));
    return PutBytes(l.order_page_of(layer, head), std::as_bytes(kept));
  }();
  return failed_;
}

Status SegmentFileWriter::PutItems(uint64_t page, const ItemPages& items,
                                   std::span<const std::byte> rows, size_t row_bytes, size_t first,
                                   std::span<const uint32_t> order) {
  std::vector<std::byte> bytes(items.pages_per_item * kPageBytes);
  for (size_t slot = 0; slot < order.size(); slot += items.per_page) {
    const size_t n = std::min<size_t>(items.per_page, order.size() - slot);
    for (size_t i = 0; i < n; ++i) {
      std::memcpy(bytes.data() + i * items.bytes, rows.data() + order[slot + i] * row_bytes + first,
                  items.bytes);
    }
    PREFIXD_TRY(PutBytes(page + items.page(slot), std::span(bytes).first(n * items.bytes)));
  }
  return {};
}

Status SegmentFileWriter::PutRun(uint32_t layer, uint32_t head, uint32_t i, uint32_t n,
                                 const std::byte* rows) {
  const uint64_t run = layout_.run_page(layer, head);
  const ItemPages& row = layout_.of(layer).row;
  const uint32_t end = i + n;
  while (i < end) {
    const uint64_t page = run + row.page(i);
    if (row.pages_per_item > 1) {
      PREFIXD_TRY(PutBytes(page, {rows, row.bytes}));
      rows += row.bytes;
      ++i;
      continue;
    }
    const uint32_t page_begin = i / row.per_page * row.per_page;
    const uint32_t page_end = std::min(page_begin + row.per_page, layout_.rows());
    const uint32_t take = std::min(end, page_end) - i;
    const std::span of_page(rows, size_t{take} * row.bytes);
    if (take == page_end - page_begin) {
      PREFIXD_TRY(PutPage(page, of_page));
    } else {
      PREFIXD_TRY(PutPartial(page, row.offset(i), page_end - page_begin, take, of_page));
    }
    rows += of_page.size();
    i += take;
  }
  return {};
}

Status SegmentFileWriter::PutBytes(uint64_t first_page, std::span<const std::byte> bytes) {
  for (size_t at = 0; at < bytes.size(); at += kPageBytes) {
    PREFIXD_TRY(PutPage(first_page + at / kPageBytes,
                        bytes.subspan(at, std::min<size_t>(kPageBytes, bytes.size() - at))));
  }
  return {};
}

Status SegmentFileWriter::PutPartial(uint64_t page, uint32_t offset, uint32_t rows_in_page,
                                     uint32_t n, std::span<const std::byte> rows) {
  auto it = partials_.find(page);
  if (it == partials_.end()) {
    if (partials_.size() >= kMaxPartialPages) {
      return Error{Code::kResourceExhausted,
                   "rows of this put come too scattered: more than 256 MiB of half-filled pages"};
    }
    it = partials_.emplace(page, Partial{std::make_unique<std::byte[]>(kPageBytes), 0}).first;
  }
  Partial& partial = it->second;
  const size_t end = offset + rows.size();
  PREFIXD_CHECK(end <= kPageBytes && partial.rows + n <= rows_in_page, page, end, partial.rows, n);
  std::memcpy(partial.bytes.get() + offset, rows.data(), rows.size());
  partial.rows += n;
  if (partial.rows < rows_in_page) return {};
  const Partial full = std::move(partial);
  partials_.erase(it);
  return PutPage(page, {full.bytes.get(), kPageBytes});
}

Status SegmentFileWriter::PutPage(uint64_t page, std::span<const std::byte> bytes) {
  // A sealed file never changes, and nothing lies beyond its table.
  PREFIXD_CHECK(!sealed_ && page < layout_.table_page && bytes.size() <= kPageBytes, page,
                layout_.table_page, bytes.size());
  if (slabs_[current_]->pages.size() == slabs_[current_]->capacity) PREFIXD_TRY(FlushSlab());
  Slab& slab = *slabs_[current_];
  if (slab.memory.size() == 0) {
    slab.memory = slab.capacity == kSlabPages ? plan_.slabs->Take()
                                              : AlignedBuffer(slab.capacity * kPageBytes);
  }
  std::byte* slot = slab.slot(slab.pages.size());
  uint64_t* entry = seal_.entry(table_.data(), page);
  const bool sealed = plan_.cipher && page != 0;
  if (bytes.size() == kPageBytes) {
    const ConstPageBytes whole(bytes.data(), kPageBytes);
    // The checksum is taken here, where the bytes are in the cache; the stream copy keeps the slab
    // out of it.
    if (sealed) [[unlikely]] {
      seal_.Seal(page, whole, PageBytes(slot, kPageBytes), entry);
    } else {
      seal_.Note(page, whole, entry);
      StreamCopy(slot, bytes.data(), kPageBytes);
    }
  } else {
    std::memcpy(slot, bytes.data(), bytes.size());
    std::memset(slot + bytes.size(), 0, kPageBytes - bytes.size());
    const PageBytes filled(slot, kPageBytes);
    if (sealed) [[unlikely]] {
      seal_.Seal(page, filled, filled, entry);
    } else {
      seal_.Note(page, filled, entry);
    }
  }
  slab.pages.push_back(page);
  return {};
}

// Starts writing the current slab and makes the next one current, once it is free.
Status SegmentFileWriter::FlushSlab() {
  Slab& slab = *slabs_[current_];
  std::vector<std::pair<uint64_t, size_t>> order;  // (file page, slot)
  for (size_t i = 0; i < slab.pages.size(); ++i) order.emplace_back(slab.pages[i], i);
  std::sort(order.begin(), order.end());
  slab.ops.clear();
  for (size_t i = 0; i < order.size();) {
    IoOp op{IoKind::kWrite, IoPriority::kWrite, fd_.get(), order[i].first * kPageBytes, {}, 0};
    size_t n = 0;
    while (i + n < order.size() && n < kMaxOpPages && order[i + n].first == order[i].first + n) {
      std::byte* slot = slab.slot(order[i + n].second);
      if (!op.iov.empty() &&
          static_cast<std::byte*>(op.iov.back().iov_base) + op.iov.back().iov_len == slot) {
        op.iov.back().iov_len += kPageBytes;
      } else {
        op.iov.push_back({slot, kPageBytes});
      }
      ++n;
    }
    slab.ops.push_back(std::move(op));
    i += n;
  }
  engine_.Submit(slab.ops, slab.batch);
  current_ = NextSlab(current_);
  return Reap(*slabs_[current_]);
}

Status SegmentFileWriter::Reap(Slab& slab) {
  slab.batch.Wait();
  for (const IoOp& op : slab.ops) {
    PREFIXD_TRY(storage::CheckComplete(op, "writing " + plan_.path.string()));
    bytes_written_ += static_cast<uint64_t>(op.result);
  }
  slab.ops.clear();
  slab.pages.clear();
  return {};
}

Status SegmentFileWriter::Seal(uint64_t sequence, int64_t unix_ms, const EncodingError& error) {
  if (!failed_.ok()) return failed_;
  PREFIXD_TRY(CheckComplete(AllHeads()));
  failed_ = [&]() -> Status {
    PREFIXD_TRY(PutBytes(layout_.token_page, std::as_bytes(std::span(plan_.token_ids))));
    PREFIXD_TRY(PutBytes(layout_.manifest_page, std::as_bytes(std::span(plan_.manifest))));
    PREFIXD_TRY(FlushSlab());
    CrashPoint("seal.rows_in_flight");
    for (const auto& slab : slabs_) PREFIXD_TRY(Reap(*slab));
    CrashPoint("seal.rows_written");
    PREFIXD_TRY(WriteTableAndFooter(sequence, unix_ms, error));
    CrashPoint("seal.before_sync");
    PREFIXD_TRY(DataSync(engine_, fd_.get(), "syncing " + plan_.path.string()));
    CrashPoint("seal.before_directory_sync");
    return SyncDirectory(plan_.path.parent_path());
  }();
  if (!failed_.ok()) return failed_;
  sealed_ = true;
  return {};
}

void SegmentFileWriter::WaitAll() {
  for (const auto& slab : slabs_) slab->batch.Wait();
}

void SegmentFileWriter::Discard() {
  WaitAll();
  fd_.Close();
  sealed_ = false;
  if (failed_.ok()) failed_ = Error{Code::kCancelled, "the put was aborted"};
  if (!exists_) return;
  exists_ = false;
  CrashPoint("segment.before_discard");
  if (Status removed = RemoveFile(plan_.path); !removed.ok()) {
    LogWarning(removed.error().message + " (it will be freed when the store is opened next)");
  }
}

}  // namespace prefixd::storage
