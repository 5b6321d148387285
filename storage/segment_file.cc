#include "storage/segment_file.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "storage/errors.h"

namespace prefixd::storage {
namespace {

Error Damaged(const std::filesystem::path& path, const std::string& how) {
  return {Code::kCorrupt, "segment " + path.string() + ": " + how};
}

// Runs `load` again once if it fails: a transient fault must not condemn a segment.
template <typename Load>
Status Twice(Load load) {
  Status first = load();
  return first.ok() ? first : load();
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
                             const SegmentRecord& record, bool direct) {
  record_ = record;
  auto fd = OpenMaybeDirect(path, O_RDONLY, direct);
  if (!fd.ok()) {
    if (fd.error().code == Code::kNotFound) return Damaged(path, "the file is missing");
    return fd.error();
  }
  fd_ = std::move(*fd);
  PREFIXD_ASSIGN(const uint64_t bytes, FileBytes(fd_.get(), path));
  if (bytes != record.file_bytes || bytes % kPageBytes != 0 || bytes < 2 * kPageBytes) {
    return Damaged(path, "the file has " + std::to_string(bytes) + " bytes instead of " +
                             std::to_string(record.file_bytes));
  }
  return Twice([&]() -> Status {
    AlignedBuffer page(kPageBytes);
    const PageBytes view(page.data(), kPageBytes);
    PREFIXD_TRY(ReadFully(engine, fd_.get(), 0, view, IoPriority::kStepRead, path.string()));
    PREFIXD_ASSIGN(header_, SegmentHeader::Decode(view));
    PREFIXD_ASSIGN(layout_, header_.Layout());
    if (header_.segment != record.id.bytes || header_.file != record.file ||
        header_.parent != record.parent.bytes || header_.tokens != record.tokens ||
        layout_.file_bytes() != bytes) {
      return Damaged(path, "the header does not agree with the catalog");
    }
    PREFIXD_TRY(ReadFully(engine, fd_.get(), layout_.footer_page * kPageBytes, view,
                          IoPriority::kStepRead, path.string()));
    PREFIXD_ASSIGN(footer_, SegmentFooter::Decode(view));
    if (footer_.file != header_.file || footer_.sequence != record.sequence ||
        footer_.total_pages != layout_.total_pages() ||
        footer_.manifest_bytes != header_.manifest_bytes) {
      return Damaged(path, "the footer does not agree with header and catalog");
    }
    return {};
  });
}

Status SegmentFile::LoadTable(IoEngine& engine, const std::filesystem::path& path) {
  const uint64_t pages = layout_.footer_page - layout_.table_page;
  AlignedBuffer buffer(pages * kPageBytes);
  PREFIXD_TRY(ReadFully(engine, fd_.get(), layout_.table_page * kPageBytes, buffer.span(),
                        IoPriority::kStepRead, path.string()));
  table_.resize(layout_.table_page);
  std::memcpy(table_.data(), buffer.data(), table_.size() * sizeof(uint64_t));
  if (TableChecksum(header_.file, table_) != footer_.table_checksum) {
    return Damaged(path, "the checksum table is damaged");
  }
  return {};
}

Status SegmentFile::LoadTokens(IoEngine& engine) {
  AlignedBuffer buffer;
  PREFIXD_TRY(ReadPages(engine, layout_.token_page, layout_.manifest_page - layout_.token_page,
                        buffer, "token ids"));
  tokens_.resize(layout_.shape.n_tokens);
  std::memcpy(tokens_.data(), buffer.data(), tokens_.size() * sizeof(uint32_t));
  return {};
}

Result<std::string> SegmentFile::Manifest(IoEngine& engine) const {
  AlignedBuffer buffer;
  PREFIXD_TRY(Twice([&] {
    return ReadPages(engine, layout_.manifest_page,
                     (header_.manifest_bytes + kPageBytes - 1) / kPageBytes, buffer, "manifest");
  }));
  return std::string(reinterpret_cast<const char*>(buffer.data()), header_.manifest_bytes);
}

Status SegmentFile::ReadPages(IoEngine& engine, uint64_t first, uint64_t n, AlignedBuffer& out,
                              const char* what) const {
  const std::string who = "segment " + record_.id.ToString();
  out = AlignedBuffer(n * kPageBytes);
  PREFIXD_TRY(
      ReadFully(engine, fd_.get(), first * kPageBytes, out.span(), IoPriority::kStepRead, who));
  for (uint64_t i = 0; i < n; ++i) {
    if (!VerifyPage(first + i, ConstPageBytes(out.data() + i * kPageBytes, kPageBytes))) {
      return Error{Code::kCorrupt, who + ": its " + what + " are damaged"};
    }
  }
  return {};
}

Result<std::unique_ptr<const RunOrder>> SegmentFile::LoadOrder(IoEngine& engine, uint32_t layer,
                                                               uint32_t head) const {
  AlignedBuffer buffer;
  PREFIXD_TRY(Twice([&] {
    return ReadPages(engine, layout_.order_page_of(layer, head), layout_.pages_per_order, buffer,
                     "row orders");
  }));
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
  if (!layout_.settled()) return static_cast<const RunOrder*>(nullptr);
  const uint32_t run = layout_.run(layer, head);
  {
    std::lock_guard lock(orders_mutex_);
    if (orders_[run]) return orders_[run].get();
  }
  PREFIXD_ASSIGN(auto order, LoadOrder(engine, layer, head));
  std::lock_guard lock(orders_mutex_);
  if (!orders_[run]) orders_[run] = std::move(order);  // else another thread was first
  return orders_[run].get();
}

Result<std::shared_ptr<const SegmentFile>> SegmentFile::Open(IoEngine& engine,
                                                             const std::filesystem::path& path,
                                                             const SegmentRecord& record,
                                                             bool direct) {
  auto file = std::shared_ptr<SegmentFile>(new SegmentFile());
  PREFIXD_TRY(file->OpenEnds(engine, path, record, direct));
  PREFIXD_TRY(Twice([&] { return file->LoadTable(engine, path); }));
  PREFIXD_TRY(Twice([&] { return file->LoadTokens(engine); }));
  if (file->layout_.settled()) file->orders_.resize(file->layout_.runs());
  return std::shared_ptr<const SegmentFile>(std::move(file));
}

Result<SegmentHeader> SegmentFile::Check(IoEngine& engine, const std::filesystem::path& path,
                                         const SegmentRecord& record, bool direct) {
  SegmentFile file;
  PREFIXD_TRY(file.OpenEnds(engine, path, record, direct));
  return file.header_;
}

}  // namespace prefixd::storage
