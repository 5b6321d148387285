#include "runtime/ingest/compaction_preview.h"

namespace prefixd {
namespace {

using storage::ReadStats;
using storage::RowPart;
using storage::SegmentId;

// Presents the rows of the leaf's chain under another name.
class PreviewPrefix final : public storage::StoredPrefix {
 public:
  PreviewPrefix(std::shared_ptr<const StoredPrefix> inner, storage::PrefixInfo info)
      : inner_(std::move(inner)), info_(std::move(info)) {}

  const storage::PrefixInfo& info() const override { return info_; }
  const storage::ModelRecord& model() const override { return inner_->model(); }
  uint32_t n_tokens() const override { return inner_->n_tokens(); }
  std::span<const uint32_t> tokens() const override { return inner_->tokens(); }
  Result<std::vector<uint32_t>> KeptTokens(uint32_t layer, uint32_t kv_head) const override {
    return inner_->KeptTokens(layer, kv_head);
  }
  Status ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids, RowPart part,
                  storage::RowSink out, ReadStats* stats) const override {
    return inner_->ReadRows(layer, kv_head, ids, part, out, stats);
  }
  Status ViewRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids, RowPart part,
                  storage::RowViews& out, ReadStats* stats) const override {
    return inner_->ViewRows(layer, kv_head, ids, part, out, stats);
  }
  Status ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range, RowPart part,
                   storage::RowSink out, storage::RangeUse use, ReadStats* stats) const override {
    return inner_->ReadRange(layer, kv_head, range, part, out, use, stats);
  }
  Status VisitRows(uint32_t layer, uint32_t kv_head, storage::RowViews& room,
                   const storage::RowVisitor& visit, storage::VisitPlace& place,
                   ReadStats* stats) const override {
    return inner_->VisitRows(layer, kv_head, room, visit, place, stats);
  }
  std::span<const StoredPart> parts() const override { return inner_->parts(); }
  Result<storage::RowsInPlace> ReadInPlace(uint32_t layer, uint32_t kv_head,
                                           std::span<const uint32_t> ids,
                                           ReadStats* stats) const override {
    return inner_->ReadInPlace(layer, kv_head, ids, stats);
  }
  Result<storage::RunsInPlace> FindInPlace(uint32_t layer, TokenRange range,
                                           std::span<const storage::WantedRun> runs,
                                           ReadStats* stats) const override {
    return inner_->FindInPlace(layer, range, runs, stats);
  }
  Status Prefetch(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids, RowPart part,
                  uint64_t max_bytes, const std::atomic<bool>& stop,
                  ReadStats* stats) const override {
    return inner_->Prefetch(layer, kv_head, ids, part, max_bytes, stop, stats);
  }

 private:
  const std::shared_ptr<const StoredPrefix> inner_;
  const storage::PrefixInfo info_;
};

}  // namespace

Result<std::unique_ptr<CompactionPreview>> CompactionPreview::Of(storage::PrefixStore& inner,
                                                                 const SegmentId& leaf,
                                                                 uint32_t max_tokens) {
  PREFIXD_ASSIGN(auto compacted, inner.CheckCompaction(leaf, max_tokens));
  return std::unique_ptr<CompactionPreview>(
      new CompactionPreview(inner, leaf, std::move(compacted)));
}

std::vector<storage::NewBlob> CompactionPreview::TakeBlobs() {
  std::lock_guard lock(mutex_);
  std::vector<storage::NewBlob> out;
  for (auto& [name, blob] : blobs_) {
    out.push_back({name, std::move(blob.producer), std::move(blob.bytes)});
  }
  blobs_.clear();
  return out;
}

Result<std::shared_ptr<const storage::StoredPrefix>> CompactionPreview::OpenPrefix(
    const SegmentId& id, uint32_t n_tokens) {
  if (id != compacted_.id) return inner_.OpenPrefix(id, n_tokens);
  PREFIXD_ASSIGN(auto opened, inner_.OpenPrefix(leaf_, n_tokens));
  return std::shared_ptr<const storage::StoredPrefix>(
      std::make_shared<PreviewPrefix>(std::move(opened), compacted_));
}

Status CompactionPreview::PutBlob(const SegmentId& id, std::string_view name,
                                  std::string_view producer, std::span<const std::byte> bytes) {
  if (id != compacted_.id) return inner_.PutBlob(id, name, producer, bytes);
  std::lock_guard lock(mutex_);
  blobs_[std::string(name)] = {std::string(producer), {bytes.begin(), bytes.end()}};
  return {};
}

Result<std::vector<std::byte>> CompactionPreview::GetBlob(const SegmentId& id,
                                                          std::string_view name,
                                                          std::string_view producer) const {
  if (id != compacted_.id) return inner_.GetBlob(id, name, producer);
  std::lock_guard lock(mutex_);
  const auto it = blobs_.find(name);
  if (it != blobs_.end() && it->second.producer == producer) return it->second.bytes;
  return Error{Code::kNotFound, "no blob '" + std::string(name) + "' was made by this producer"};
}

Status CompactionPreview::RemoveBlob(const SegmentId& id, std::string_view name) {
  if (id != compacted_.id) return inner_.RemoveBlob(id, name);
  std::lock_guard lock(mutex_);
  if (const auto blob = blobs_.find(name); blob != blobs_.end()) blobs_.erase(blob);
  return {};
}

std::vector<std::string> CompactionPreview::ListBlobs(const SegmentId& id) const {
  if (id != compacted_.id) return inner_.ListBlobs(id);
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, blob] : blobs_) names.push_back(name);
  return names;
}

Result<storage::PrefixInfo> CompactionPreview::GetPrefix(const SegmentId& id) const {
  if (id != compacted_.id) return inner_.GetPrefix(id);
  return compacted_;
}

}  // namespace prefixd
