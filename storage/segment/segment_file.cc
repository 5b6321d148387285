#include "storage/segment/segment_file.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "storage/io/errors.h"
#include "storage/io/owned_read.h"

namespace prefixd::storage {
namespace {

constexpr uint64_t kPagesReadWhole = 16;

Error Damaged(const std::filesystem::path& path, const std::string& how) {
  return {Code::kCorrupt, "segment " + path.string() + ": " + how};
}

// Runs `load` again once if it fails: a transient fault must not condemn a segment. It does not
// when the disk did not answer or the call has ended: the caller has waited long enough.
template <typename Load>
auto Twice(Load load) {
  auto first = load();
  if (first.ok() || first.error().code == Code::kUnavailable || EndedEarly(first.error())) {
    return first;
  }
  return load();
}

}  // namespace

Result<UniqueFd> OpenMaybeDirect(const std::filesystem::path& path, int flags, bool direct) {
  if (direct) {
    auto fd = OpenFile(path, flags | O_DIRECT);
    if (fd.ok() || errno != EINVAL) return fd;
  }
  return OpenFile(path, flags);
}

Status SegmentFile::OpenEnds(IoEngine& engine, const std::filesystem::path& path,
                             const SegmentRecord& record, bool direct, const KeyRing* keys) {
  record_ = record;
  path_ = path;
  auto fd = OpenMaybeDirect(path, O_RDONLY, direct);
  if (!fd.ok()) {
    if (fd.error().code == Code::kNotFound) return Damaged(path, "the file is missing");
    return fd.error();
  }
  fd_ = std::make_shared<const UniqueFd>(std::move(*fd));
  PREFIXD_ASSIGN(const uint64_t bytes, FileBytes(fd_->get(), path));
  if (bytes != record.file_bytes || bytes % kPageBytes != 0 || bytes < 2 * kPageBytes) {
    return Damaged(path, "the file has " + std::to_string(bytes) + " bytes instead of " +
                             std::to_string(record.file_bytes));
  }
  // A small file is read at once: with many of them, reads are what opening and recovery cost. The
  // second time its ends are read alone, since a bad sector between them is no matter here.
  const uint64_t pages = bytes / kPageBytes;
  bool small = pages <= kPagesReadWhole;
  return Twice([&]() -> Status {
    const bool whole = std::exchange(small, false);
    PREFIXD_ASSIGN(const AlignedBuffer first, ReadRaw(engine, 0, whole ? pages : 1));
    PREFIXD_ASSIGN(header_, SegmentHeader::Decode(ConstPageBytes(first.data(), kPageBytes)));
    PREFIXD_ASSIGN(layout_, header_.Layout());
    if (header_.segment != record.id.bytes || header_.file != record.file ||
        header_.parent != record.parent.bytes || header_.tokens != record.tokens ||
        header_.lineage != record.lineage || header_.kept_rows != record.kept_rows ||
        layout_.file_bytes() != bytes) {
      return Damaged(path, "the header does not agree with the catalog");
    }
    PREFIXD_ASSIGN(seal_, PageSeal::Of(keys, header_, ConstPageBytes(first.data(), kPageBytes)));
    AlignedBuffer last;
    if (!whole) {
      PREFIXD_ASSIGN(last, ReadRaw(engine, layout_.footer_page, 1));
    }
    const std::byte* footer = whole ? first.data() + layout_.footer_page * kPageBytes : last.data();
    PREFIXD_ASSIGN(footer_, SegmentFooter::Decode(ConstPageBytes(footer, kPageBytes)));
    PREFIXD_TRY(CheckMac(seal_.cipher(), layout_.footer_page, ConstPageBytes(footer, kPageBytes)));
    if (footer_.file != header_.file || footer_.sequence != record.sequence ||
        footer_.total_pages != layout_.total_pages() ||
        footer_.manifest_bytes != header_.manifest_bytes) {
      return Damaged(path, "the footer does not agree with header and catalog");
    }
    return {};
  });
}

Status SegmentFile::LoadTable(IoEngine& engine) const {
  if (has_table_.load(std::memory_order_acquire)) return {};
  PREFIXD_ASSIGN(const CallLock lock, CallLock::Take(table_mutex_));
  if (has_table_.load(std::memory_order_relaxed)) return {};
  PREFIXD_TRY(Twice([&] { return ReadTable(engine); }));
  has_table_.store(true, std::memory_order_release);
  return {};
}

Status SegmentFile::ReadTable(IoEngine& engine) const {
  const uint64_t pages = layout_.footer_page - layout_.table_page;
  PREFIXD_ASSIGN(const AlignedBuffer buffer, ReadRaw(engine, layout_.table_page, pages));
  table_.resize(layout_.table_words());
  std::memcpy(table_.data(), buffer.data(), table_.size() * sizeof(uint64_t));
  if (TableChecksum(header_.file, layout_.table_page, table_) != footer_.table_checksum) {
    return Damaged(path_, "the checksum table is damaged");
  }
  return {};
}

// Entries of the table may be used before the table as a whole is verified: damage to them cannot
// make damaged ids look sound, because an entry that fits other bytes by accident is as unlikely as
// a damaged page that fits its entry.
Status SegmentFile::LoadTokens(IoEngine& engine) {
  const uint64_t pages = layout_.manifest_page - layout_.token_page;
  const uint64_t first = layout_.token_page / layout_.checks_per_page();
  const uint64_t last = (layout_.manifest_page - 1) / layout_.checks_per_page();
  AlignedBuffer part;
  const uint64_t* expected = nullptr;
  if (has_table_) {
    expected = seal_.entry(std::as_const(table_).data(), layout_.token_page);
  } else {
    PREFIXD_ASSIGN(part, ReadRaw(engine, layout_.table_page + first, last - first + 1));
    expected = seal_.entry(reinterpret_cast<const uint64_t*>(part.data()),
                           layout_.token_page % layout_.checks_per_page());
  }
  PREFIXD_ASSIGN(const AlignedBuffer ids, ReadRaw(engine, layout_.token_page, pages));
  for (uint64_t i = 0; i < pages; ++i) {
    const PageBytes bytes(ids.data() + i * kPageBytes, kPageBytes);
    if (!seal_.Open(layout_.token_page + i, bytes, seal_.entry(expected, i))) {
      return Damaged(path_, "its token ids, or their checksums, are damaged");
    }
  }
  tokens_.resize(layout_.shape.n_tokens);
  std::memcpy(tokens_.data(), ids.data(), tokens_.size() * sizeof(uint32_t));
  return {};
}

Result<std::string> SegmentFile::Manifest(IoEngine& engine) const {
  PREFIXD_ASSIGN(const AlignedBuffer buffer, Twice([&] {
                   return ReadPages(engine, layout_.manifest_page,
                                    (header_.manifest_bytes + kPageBytes - 1) / kPageBytes,
                                    "manifest");
                 }));
  return std::string(reinterpret_cast<const char*>(buffer.data()), header_.manifest_bytes);
}

Result<AlignedBuffer> SegmentFile::ReadRaw(IoEngine& engine, uint64_t first, uint64_t n) const {
  return ReadOwned(engine, fd_, first * kPageBytes, n * kPageBytes, priority_, deadline_,
                   "reading segment " + record_.id.ToString());
}

Result<AlignedBuffer> SegmentFile::ReadPages(IoEngine& engine, uint64_t first, uint64_t n,
                                             const char* what) const {
  PREFIXD_ASSIGN(AlignedBuffer out, ReadRaw(engine, first, n));
  for (uint64_t i = 0; i < n; ++i) {
    if (!VerifyPage(first + i, PageBytes(out.data() + i * kPageBytes, kPageBytes))) {
      return Error{Code::kCorrupt,
                   "segment " + record_.id.ToString() + ": its " + what + " are damaged"};
    }
  }
  return out;
}

Result<std::unique_ptr<const RunOrder>> SegmentFile::LoadOrder(IoEngine& engine, uint32_t layer,
                                                               uint32_t head) const {
  PREFIXD_ASSIGN(const AlignedBuffer buffer, Twice([&] {
                   return ReadPages(engine, layout_.order_page_of(layer, head),
                                    layout_.pages_per_order, "row orders");
                 }));
  if (layout_.compressed()) {
    auto order = std::make_unique<RunOrder>();
    order->kept.resize(layout_.rows());
    std::memcpy(order->kept.data(), buffer.data(), order->kept.size() * sizeof(uint32_t));
    const bool ascend =
        std::ranges::adjacent_find(order->kept, std::greater_equal()) == order->kept.end();
    if (!ascend || order->kept.back() >= layout_.shape.n_tokens) {
      return Error{Code::kCorrupt,
                   "segment " + record_.id.ToString() + ": the list of its rows does not ascend"};
    }
    return std::unique_ptr<const RunOrder>(std::move(order));
  }
  const uint32_t n = layout_.shape.n_tokens, chunk_tokens = layout_.chunk_tokens();
  auto order = std::make_unique<RunOrder>();
  order->slot_of.resize(n);
  std::memcpy(order->slot_of.data(), buffer.data(), n * sizeof(uint16_t));
  order->token_in.resize(n);
  std::vector<bool> taken(n);
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t begin = i / chunk_tokens * chunk_tokens;
    const uint32_t slot = begin + order->slot_of[i];
    if (slot >= std::min(begin + chunk_tokens, n) || taken[slot]) {
      return Error{Code::kCorrupt,
                   "segment " + record_.id.ToString() + ": a row order is no permutation"};
    }
    taken[slot] = true;
    order->token_in[slot] = static_cast<uint16_t>(i - begin);
  }
  return std::unique_ptr<const RunOrder>(std::move(order));
}

Result<const RunOrder*> SegmentFile::Order(IoEngine& engine, uint32_t layer, uint32_t head) const {
  if (!has_orders()) return static_cast<const RunOrder*>(nullptr);
  const uint32_t run = layout_.run(layer, head);
  {
    std::lock_guard lock(orders_mutex_);
    if (orders_[run]) return orders_[run].get();
  }
  const uint64_t bytes = OrderBytes();
  {
    std::lock_guard lock(orders_mutex_);
    PREFIXD_TRY(memory_.Resize(memory_bytes() + bytes));
    memory_bytes_ += bytes;
  }
  auto order = LoadOrder(engine, layer, head);
  std::lock_guard lock(orders_mutex_);
  if (order.ok() && !orders_[run]) {
    orders_[run] = *std::move(order);
    return orders_[run].get();
  }
  memory_bytes_ -= bytes;  // it cannot be read, or another thread was first
  memory_.Set(memory_bytes());
  if (!order.ok()) return std::move(order).error();
  return orders_[run].get();
}

uint64_t SegmentFile::OrderBytes() const {
  if (layout_.compressed()) return layout_.rows() * sizeof(uint32_t);
  return layout_.shape.n_tokens * (sizeof(uint16_t) * 2);
}

bool SegmentFile::HasOrder(uint32_t layer, uint32_t head) const {
  if (!has_orders()) return true;
  std::lock_guard lock(orders_mutex_);
  return orders_[layout_.run(layer, head)] != nullptr;
}

Result<std::shared_ptr<const SegmentFile>> SegmentFile::OpenParts(
    IoEngine& engine, const std::filesystem::path& path, const SegmentRecord& record, bool direct,
    std::chrono::milliseconds deadline, const MemoryAccount& memory, const KeyRing* keys,
    bool table) {
  auto file = std::shared_ptr<SegmentFile>(new SegmentFile());
  file->deadline_ = deadline;
  PREFIXD_TRY(file->OpenEnds(engine, path, record, direct, keys));
  const SegmentLayout& layout = file->layout_;
  const uint64_t orders = file->has_orders() ? layout.runs() : 0;
  // The table counts from the start: it may be loaded at any time.
  const uint64_t kept = layout.table_words() * sizeof(uint64_t) +
                        layout.shape.n_tokens * sizeof(uint32_t) +
                        orders * sizeof(file->orders_.front());
  // The pages that are read lie beside what is kept of them.
  PREFIXD_ASSIGN(file->memory_, memory.Take(MemoryKind::kTables, 2 * kept));
  if (table) PREFIXD_TRY(file->LoadTable(engine));
  PREFIXD_TRY(Twice([&] { return file->LoadTokens(engine); }));
  file->orders_.resize(orders);
  file->memory_bytes_ = kept;
  file->memory_.Set(kept);
  return std::shared_ptr<const SegmentFile>(std::move(file));
}

Result<std::shared_ptr<const SegmentFile>> SegmentFile::Open(
    IoEngine& engine, const std::filesystem::path& path, const SegmentRecord& record, bool direct,
    std::chrono::milliseconds deadline, const MemoryAccount& memory, const KeyRing* keys) {
  return OpenParts(engine, path, record, direct, deadline, memory, keys, /*table=*/true);
}

Result<std::shared_ptr<const SegmentFile>> SegmentFile::OpenIds(
    IoEngine& engine, const std::filesystem::path& path, const SegmentRecord& record, bool direct,
    std::chrono::milliseconds deadline, const MemoryAccount& memory, const KeyRing* keys) {
  return OpenParts(engine, path, record, direct, deadline, memory, keys, /*table=*/false);
}

Result<SegmentHeader> SegmentFile::Check(IoEngine& engine, const std::filesystem::path& path,
                                         const SegmentRecord& record, bool direct,
                                         const KeyRing* keys, IoPriority priority) {
  SegmentFile file;
  file.priority_ = priority;
  PREFIXD_TRY(file.OpenEnds(engine, path, record, direct, keys));
  return file.header_;
}

}  // namespace prefixd::storage
