// What is derived of a merged segment, made before there is one: a store that also shows the
// segment which a merge would make, with rows read from the two there are and blobs kept in memory.
// The ingest runs on it as on any other, and the merge then puts the blobs in place in one commit
// with the segment: nobody ever attaches to a merged segment that lacks what the two had.
//
// Thread-safety: as a PrefixStore's; the blobs are taken when nothing runs on it any more.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "storage/store/prefix_store.h"

namespace prefixd {

class MergePreview final : public storage::PrefixStore {
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
  Result<storage::PrefixInfo> GetPrefix(const storage::SegmentId& id) const override;

  // The others are the inner store's.
  Status PutModel(const storage::ModelRecord& model) override { return inner_.PutModel(model); }
  Result<storage::ModelRecord> GetModel(std::string_view name) const override {
    return inner_.GetModel(name);
  }
  std::vector<storage::ModelRecord> ListModels() const override { return inner_.ListModels(); }
  Result<storage::Match> LongestMatch(std::string_view model, std::string_view tenant,
                                      std::span<const uint32_t> tokens) const override {
    return inner_.LongestMatch(model, tenant, tokens);
  }
  Result<std::unique_ptr<storage::SegmentWriter>> BeginPut(
      std::string_view model, std::string_view tenant, std::span<const uint32_t> tokens,
      std::string_view label, const storage::PutOptions& options) override {
    return inner_.BeginPut(model, tenant, tokens, label, options);
  }
  std::vector<storage::PrefixInfo> ListPrefixes() const override { return inner_.ListPrefixes(); }
  Status Remove(const storage::SegmentId& id) override { return inner_.Remove(id); }
  Status SetRetention(const storage::SegmentId& id,
                      const storage::RetentionChange& change) override {
    return inner_.SetRetention(id, change);
  }
  void NoteUse(const storage::SegmentId& id) override { inner_.NoteUse(id); }
  Status Maintain() override { return inner_.Maintain(); }
  Status Settle(const storage::SegmentId& id, const storage::SettleOptions& options) override {
    return inner_.Settle(id, options);
  }
  Result<storage::PrefixInfo> CheckMerge(const storage::SegmentId& leaf,
                                         uint32_t max_tokens) const override {
    return inner_.CheckMerge(leaf, max_tokens);
  }
  Result<storage::SegmentId> Merge(const storage::SegmentId& leaf, uint32_t max_tokens,
                                   std::span<const storage::NewBlob> blobs) override {
    return inner_.Merge(leaf, max_tokens, blobs);
  }
  Status Push(const storage::SegmentId& id, storage::RemoteTier& remote,
              const storage::Progress& progress) override {
    return inner_.Push(id, remote, progress);
  }
  Status Pull(const storage::SegmentId& id, const storage::RemoteTier& remote,
              const storage::Progress& progress) override {
    return inner_.Pull(id, remote, progress);
  }
  Result<storage::VerifyReport> Verify(const storage::SegmentId* only,
                                       const storage::Progress& progress) override {
    return inner_.Verify(only, progress);
  }
  Result<int64_t> Scrub(const storage::ScrubOptions& options) override {
    return inner_.Scrub(options);
  }
  void OnBlobLost(BlobLost told) override { inner_.OnBlobLost(std::move(told)); }
  Stats stats() const override { return inner_.stats(); }

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
