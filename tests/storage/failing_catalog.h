// Wraps the catalog of an open store, so that its writes can be made to fail.
#pragma once

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "storage/catalog/catalog.h"
#include "storage/store/open_store.h"

namespace prefixd::storage {

class FailingCatalog : public Catalog {
 public:
  explicit FailingCatalog(std::unique_ptr<Catalog> inner) : inner_(std::move(inner)) {}

  bool fail_commit = false, fail_remove = false;
  bool refuse = false;  // before anything is written
  std::optional<SegmentId> cannot_remove;

  const CatalogMeta& meta() const override { return inner_->meta(); }
  Status PutModel(const ModelRecord& model) override { return inner_->PutModel(model); }
  Result<std::vector<ModelRecord>> LoadModels() const override { return inner_->LoadModels(); }
  Status RemoveModel(std::string_view name) override { return inner_->RemoveModel(name); }
  Status Apply(const CatalogChange& change) override {
    if (fail_commit && !change.put.empty()) return Error{Code::kIo, "no answer to the commit"};
    if (cannot_remove && std::ranges::count(change.remove, *cannot_remove) > 0) {
      return Error{Code::kCorrupt, "its hashes do not read"};
    }
    if (fail_remove && !change.remove.empty()) return Error{Code::kIo, "no answer to the removal"};
    return inner_->Apply(change);
  }
  Status SetQuarantine(const SegmentId& id, const std::string& reason) override {
    return inner_->SetQuarantine(id, reason);
  }
  Status SetLastUsed(const SegmentId& id, int64_t unix_ms, float heat) override {
    return inner_->SetLastUsed(id, unix_ms, heat);
  }
  Sequences& sequences() override { return inner_->sequences(); }
  Status SetVerified(const SegmentId& id, int64_t unix_ms) override {
    return inner_->SetVerified(id, unix_ms);
  }
  Status SetScrubPosition(const ScrubPosition& position) override {
    return inner_->SetScrubPosition(position);
  }
  Result<ScrubPosition> LoadScrubPosition() const override { return inner_->LoadScrubPosition(); }
  Result<std::vector<CatalogSegment>> LoadSegments() const override {
    return inner_->LoadSegments();
  }
  Result<std::vector<AliasRecord>> LoadAliases() const override { return inner_->LoadAliases(); }
  Status CopyTo(const std::filesystem::path& dir) const override { return inner_->CopyTo(dir); }
  Status MayApply() override {
    if (refuse) return Error{Code::kResourceExhausted, "nothing was changed"};
    return inner_->MayApply();
  }
  Status NoteGone(const GoneRecord& record) override { return inner_->NoteGone(record); }
  Result<std::optional<GoneRecord>> FindGone(std::string_view tenant,
                                             const BlockHash& block) const override {
    return inner_->FindGone(tenant, block);
  }
  Result<std::vector<SegmentId>> FindBlock(const BlockHash& hash) const override {
    return inner_->FindBlock(hash);
  }

 private:
  const std::unique_ptr<Catalog> inner_;
};

// Wraps the catalog of a store that opens; `out` is where the test finds it.
inline CatalogWrapper Failing(FailingCatalog** out) {
  return [out](std::unique_ptr<Catalog> inner) {
    auto failing = std::make_unique<FailingCatalog>(std::move(inner));
    *out = failing.get();
    return failing;
  };
}

}  // namespace prefixd::storage
