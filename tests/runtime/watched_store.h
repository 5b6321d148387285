// A storage that a test looks into: it can do something between two calls of the runtime, or answer
// in its place.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "storage/store/prefix_store.h"

namespace prefixd::testing {

class WatchedStore final : public storage::PrefixStore {
 public:
  using SegmentId = storage::SegmentId;

  explicit WatchedStore(std::unique_ptr<storage::PrefixStore> inner) : inner_(std::move(inner)) {}

  storage::PrefixStore& inner() { return *inner_; }
  // The store's own threads call it, too: what is set below counts once `watching` is true.
  std::atomic<bool> watching{false};
  // Called behind each GetPrefix, with the id that was asked for.
  std::function<void(const SegmentId&)> behind_get;
  // Called before these; a put that it refuses is not begun.
  std::function<Status(std::span<const uint32_t> tokens, const storage::PutOptions&)> before_put;
  std::function<void(const SegmentId&)> before_blob, before_remove;
  // Lists these instead of what is stored, unless it is null.
  std::function<std::vector<storage::PrefixInfo>(const storage::PrefixesAfter&)> list;

  Status CheckCompressible(const SegmentId& id) const override {
    return inner_->CheckCompressible(id);
  }
  Result<storage::SegmentSizes> SizesOf(const SegmentId& id, uint32_t kept_rows) const override {
    return inner_->SizesOf(id, kept_rows);
  }
  Status Compress(const SegmentId& id, const storage::CompressOptions& options) override {
    return inner_->Compress(id, options);
  }
  Result<bool> Reencrypt(const SegmentId& id, const storage::Progress& progress) override {
    return inner_->Reencrypt(id, progress);
  }
  std::optional<std::string> TenantOf(const SegmentId& id) const override {
    return inner_->TenantOf(id);
  }
  Result<storage::PrefixInfo> GetPrefix(const SegmentId& id) const override {
    auto info = inner_->GetPrefix(id);
    if (watching && behind_get) behind_get(id);
    return info;
  }
  std::vector<storage::PrefixInfo> ListPrefixes(
      const storage::PrefixesAfter& after) const override {
    return watching && list ? list(after) : inner_->ListPrefixes(after);
  }

  Result<std::shared_ptr<const storage::StoredPrefix>> OpenPrefix(const SegmentId& id,
                                                                  uint32_t n_tokens) override {
    return inner_->OpenPrefix(id, n_tokens);
  }
  Status PutBlob(const SegmentId& id, std::string_view name, std::string_view producer,
                 std::span<const std::byte> bytes) override {
    if (watching && before_blob) before_blob(id);
    return inner_->PutBlob(id, name, producer, bytes);
  }
  Result<std::vector<std::byte>> GetBlob(const SegmentId& id, std::string_view name,
                                         std::string_view producer) const override {
    return inner_->GetBlob(id, name, producer);
  }
  std::vector<std::string> ListBlobs(const SegmentId& id) const override {
    return inner_->ListBlobs(id);
  }
  Status RemoveBlob(const SegmentId& id, std::string_view name) override {
    return inner_->RemoveBlob(id, name);
  }
  Status PutModel(const storage::ModelRecord& model) override { return inner_->PutModel(model); }
  Result<storage::ModelRecord> GetModel(std::string_view name) const override {
    return inner_->GetModel(name);
  }
  std::vector<storage::ModelRecord> ListModels() const override { return inner_->ListModels(); }
  Status RemoveModel(std::string_view name) override { return inner_->RemoveModel(name); }
  Result<storage::Match> LongestMatch(std::string_view model, std::string_view tenant,
                                      std::span<const uint32_t> tokens,
                                      const storage::Acceptance& accept) const override {
    return inner_->LongestMatch(model, tenant, tokens, accept);
  }
  Result<storage::RowsHeld> HeldRows(const SegmentId& id, TokenRange tokens) const override {
    return inner_->HeldRows(id, tokens);
  }
  Result<storage::MatchExplanation> ExplainMatch(std::string_view model, std::string_view tenant,
                                                 std::span<const uint32_t> tokens,
                                                 const storage::Acceptance& accept) const override {
    return inner_->ExplainMatch(model, tenant, tokens, accept);
  }
  Result<std::optional<int64_t>> ModelRemovedAt(std::string_view name) const override {
    return inner_->ModelRemovedAt(name);
  }
  Result<std::unique_ptr<Snapshot>> TakeSnapshot() override { return inner_->TakeSnapshot(); }
  Result<std::unique_ptr<storage::SegmentWriter>> BeginPut(
      std::string_view model, std::string_view tenant, std::span<const uint32_t> tokens,
      std::string_view label, const storage::PutOptions& options) override {
    if (watching && before_put) PREFIXD_TRY(before_put(tokens, options));
    return inner_->BeginPut(model, tenant, tokens, label, options);
  }
  Status Remove(const SegmentId& id) override {
    if (watching && before_remove) before_remove(id);
    return inner_->Remove(id);
  }
  Status SetLifetime(const SegmentId& id, const storage::LifetimeChange& change) override {
    return inner_->SetLifetime(id, change);
  }
  void NoteUse(const SegmentId& id) override { inner_->NoteUse(id); }
  Status Maintain() override { return inner_->Maintain(); }
  Status Recluster(const SegmentId& id, const storage::ReclusterOptions& options) override {
    return inner_->Recluster(id, options);
  }
  Result<storage::PrefixInfo> CheckCompaction(const SegmentId& leaf,
                                              uint32_t max_tokens) const override {
    return inner_->CheckCompaction(leaf, max_tokens);
  }
  Result<SegmentId> Compact(const SegmentId& leaf, uint32_t max_tokens,
                            std::span<const storage::NewBlob> blobs) override {
    return inner_->Compact(leaf, max_tokens, blobs);
  }
  Status Push(const SegmentId& id, storage::RemoteTier& remote,
              const storage::Progress& progress) override {
    return inner_->Push(id, remote, progress);
  }
  Status Pull(const SegmentId& id, const storage::RemoteTier& remote,
              const storage::Progress& progress) override {
    return inner_->Pull(id, remote, progress);
  }
  Result<storage::VerifyReport> Verify(const SegmentId* only,
                                       const storage::Progress& progress) override {
    return inner_->Verify(only, progress);
  }
  Result<storage::VerifyReport> VerifyTenant(std::string_view tenant,
                                             const storage::Progress& progress) override {
    return inner_->VerifyTenant(tenant, progress);
  }
  Result<int64_t> Scrub(const storage::ScrubOptions& options) override {
    return inner_->Scrub(options);
  }
  Status CheckEnds(const std::function<bool()>& go_on) override { return inner_->CheckEnds(go_on); }
  Result<storage::WarmedUp> WarmUp(const storage::WarmUpOptions& options) override {
    return inner_->WarmUp(options);
  }
  void OnBlobLost(storage::BlobLost told) override { inner_->OnBlobLost(std::move(told)); }
  Stats stats() const override { return inner_->stats(); }

 private:
  const std::unique_ptr<storage::PrefixStore> inner_;
};

}  // namespace prefixd::testing
