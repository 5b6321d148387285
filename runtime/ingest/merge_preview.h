// What is derived of a merged segment, made before there is one: a source that also shows the
// segment which a merge would make, with rows read from the two there are and blobs kept in memory.
// The ingest runs on it as on any other, and the merge then puts the blobs in place in one commit
// with the segment: nobody ever attaches to a merged segment that lacks what the two had.
//
// Thread-safety: as a SegmentSource's; the blobs are taken when nothing runs on it any more.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "storage/store/prefix_store.h"

namespace prefixd {

class MergePreview final : public storage::SegmentSource {
 public:
  // `inner` is borrowed. The refusals of PrefixStore::Merge.
  static Result<std::unique_ptr<MergePreview>> Of(storage::PrefixStore& inner,
                                                  const storage::SegmentId& leaf,
                                                  uint32_t max_tokens);

  // The segment that would be; known to this store alone.
  const storage::SegmentId& id() const { return merged_.id; }
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
  MergePreview(storage::PrefixStore& inner, storage::SegmentId leaf, storage::PrefixInfo merged)
      : inner_(inner), leaf_(leaf), merged_(std::move(merged)) {}

  struct Blob {
    std::string producer;
    std::vector<std::byte> bytes;
  };

  storage::PrefixStore& inner_;
  const storage::SegmentId leaf_;
  const storage::PrefixInfo merged_;
  mutable std::mutex mutex_;
  std::map<std::string, Blob, std::less<>> blobs_;
};

}  // namespace prefixd
