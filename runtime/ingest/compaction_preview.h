// Shows the segment that a compaction would make before the compaction, as a source whose rows come
// from the two existing segments and whose blobs stay in memory. The ingest runs on it as on any
// other source, and the compaction then commits the blobs with the segment: no session ever
// attaches to a compacted segment that lacks the derived data of the two.
//
// Thread-safety: that of a SegmentSource; take the blobs when no work uses the preview any more.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "storage/store/prefix_store.h"

namespace prefixd {

class CompactionPreview final : public storage::SegmentSource {
 public:
  // `inner` is borrowed. Refuses what PrefixStore::Compact refuses, with the same errors.
  static Result<std::unique_ptr<CompactionPreview>> Of(storage::PrefixStore& inner,
                                                       const storage::SegmentId& leaf,
                                                       uint32_t max_tokens);

  // Returns the id of the compacted segment to be; only this preview knows it.
  const storage::SegmentId& id() const { return compacted_.id; }
  std::vector<storage::NewBlob> TakeBlobs();

  Result<std::shared_ptr<const storage::StoredPrefix>> OpenPrefix(const storage::SegmentId& id,
                                                                  uint32_t n_tokens) override;
  Status PutBlob(const storage::SegmentId& id, std::string_view name, std::string_view producer,
                 std::span<const std::byte> bytes) override;
  Result<std::vector<std::byte>> GetBlob(const storage::SegmentId& id, std::string_view name,
                                         std::string_view producer) const override;
  std::vector<std::string> ListBlobs(const storage::SegmentId& id) const override;
  Status RemoveBlob(const storage::SegmentId& id, std::string_view name) override;
  Result<storage::PrefixInfo> GetPrefix(const storage::SegmentId& id) const override;

 private:
  CompactionPreview(storage::PrefixStore& inner, storage::SegmentId leaf,
                    storage::PrefixInfo compacted)
      : inner_(inner), leaf_(leaf), compacted_(std::move(compacted)) {}

  struct Blob {
    std::string producer;
    std::vector<std::byte> bytes;
  };

  storage::PrefixStore& inner_;
  const storage::SegmentId leaf_;
  const storage::PrefixInfo compacted_;
  mutable std::mutex mutex_;
  std::map<std::string, Blob, std::less<>> blobs_;
};

}  // namespace prefixd
