// Implements the store's public interface as a thin layer over StoreCore.
#include "storage/store/prefix_store.h"

#include <algorithm>

#include "storage/core/store_core.h"
#include "storage/io/file.h"
#include "storage/segment/hex.h"
#include "storage/store/explain_match.h"
#include "storage/store/open_prefix.h"
#include "storage/store/open_store.h"
#include "storage/store/remote_segment.h"
#include "storage/store/scrub.h"
#include "storage/store/segment_compress.h"
#include "storage/store/segment_reencrypt.h"
#include "storage/store/segment_rewrite.h"
#include "storage/store/snapshot.h"
#include "storage/store/store_match.h"
#include "storage/store/store_put.h"
#include "storage/store/store_recovery.h"
#include "storage/store/warm_up.h"

namespace prefixd::storage {

std::string SegmentId::ToString() const { return ToHex(bytes); }

Error Compressed(const SegmentId& id) {
  return {Code::kFailedPrecondition,
          "prefix " + id.ToString() +
              " is compressed: of some of its tokens no rows are stored, so it can be attended "
              "over by steps under a policy, but not be read, restored, continued or attended over "
              "in full; put the prompt again for that"};
}

std::string LineageName(const Lineage& lineage) {
  return lineage == Lineage{} ? "" : ToHex(lineage);
}

Result<Lineage> ParseLineage(std::string_view name) {
  Lineage lineage{};
  if (name.empty()) return lineage;
  if (!FromHex(name, lineage) || lineage == Lineage{}) {
    return InvalidArgument("a lineage is 32 hex digits, as a put returned it, not '" +
                           std::string(name) + "'");
  }
  return lineage;
}

Result<SegmentId> SegmentId::Parse(std::string_view hex) {
  SegmentId id;
  if (!FromHex(hex, id.bytes)) {
    return InvalidArgument("a prefix id is 32 hex digits, not '" + std::string(hex) + "'");
  }
  return id;
}

ReadStats& ReadStats::operator+=(const ReadStats& o) {
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] += o.bytes[i];
  pages_ssd += o.pages_ssd;
  pages_host += o.pages_host;
  prefetch_used_bytes += o.prefetch_used_bytes;
  return *this;
}

namespace {

constexpr size_t kMaxProducerBytes = 1024;
constexpr size_t kIdsAtOnce = 1000;  // under the tree's lock

Status CheckBlob(std::string_view name, std::string_view producer) {
  if (ValidBlobName(name) && producer.size() <= kMaxProducerBytes) return {};
  return InvalidArgument(
      "a blob's name is 1..64 of A-Z a-z 0-9 . _ - (dots inside), its "
      "producer at most 1024 bytes");
}

class Store final : public PrefixStore {
 public:
  explicit Store(std::shared_ptr<StoreCore> core) : core_(std::move(core)) {}

  Status PutModel(const ModelRecord& model) override { return core_->models->Put(model); }

  Result<ModelRecord> GetModel(std::string_view name) const override {
    PREFIXD_ASSIGN(RequestScope scope, core_->models->Resolve(name, ""));
    return std::move(scope.model);
  }

  std::vector<ModelRecord> ListModels() const override { return core_->models->List(); }
  Status RemoveModel(std::string_view name) override { return core_->models->Remove(name); }

  Result<Match> LongestMatch(std::string_view model, std::string_view tenant,
                             std::span<const uint32_t> tokens,
                             const Acceptance& accept) const override {
    PREFIXD_ASSIGN(const RequestScope scope, core_->models->Resolve(model, tenant));
    return FindLongest(*core_, scope, core_->HashesOf(scope.model.fingerprint, tenant, tokens),
                       tokens, accept);
  }

  Result<RowsHeld> HeldRows(const SegmentId& id, TokenRange tokens) const override {
    return FindHeldRows(*core_, id, tokens);
  }

  Result<MatchExplanation> ExplainMatch(std::string_view model, std::string_view tenant,
                                        std::span<const uint32_t> tokens,
                                        const Acceptance& accept) const override {
    PREFIXD_ASSIGN(const RequestScope scope, core_->models->Resolve(model, tenant));
    return ExplainLongest(*core_, scope, tokens, accept);
  }

  Result<std::optional<int64_t>> ModelRemovedAt(std::string_view name) const override {
    PREFIXD_ASSIGN(const auto gone, core_->catalog->FindGone("", ModelNameHash(name)));
    if (!gone || gone->reason != GoneReason::kModelRemoved) return std::optional<int64_t>();
    return std::optional(gone->unix_ms);
  }

  Result<std::unique_ptr<SegmentWriter>> BeginPut(std::string_view model, std::string_view tenant,
                                                  std::span<const uint32_t> tokens,
                                                  std::string_view label,
                                                  const PutOptions& options) override {
    return storage::BeginPut(core_, model, tenant, tokens, label, options);
  }

  Result<std::shared_ptr<const StoredPrefix>> OpenPrefix(const SegmentId& id,
                                                         uint32_t n_tokens) override {
    return OpenStoredPrefix(core_, id, n_tokens);
  }

  Status PutBlob(const SegmentId& id, std::string_view name, std::string_view producer,
                 std::span<const std::byte> bytes) override {
    PREFIXD_TRY(CheckBlob(name, producer));
    PREFIXD_ASSIGN(const ChainPin pin, core_->tree.PinSegment(id));
    const std::string& tenant = pin.chain().back().tenant;
    const uint64_t file_bytes = core_->blobs->BytesFor(name, producer, bytes.size());
    PREFIXD_ASSIGN(const SpaceReservation space,
                   core_->room->Reserve(tenant, file_bytes, Room::kMayEvict));
    return core_->blobs->Put(id, tenant, name, producer, bytes);
  }

  Result<std::vector<std::byte>> GetBlob(const SegmentId& id, std::string_view name,
                                         std::string_view producer) const override {
    if (!ValidBlobName(name)) return InvalidArgument("not a blob name: " + std::string(name));
    PREFIXD_ASSIGN(const ChainPin pin, core_->tree.PinSegment(id));
    auto bytes = core_->blobs->Get(id, name, producer);
    if (!bytes.ok() && bytes.error().code == Code::kCorrupt) {
      core_->counters.checksum_failures++;
      core_->verifier->DropDamagedBlob(id, name);
    }
    return bytes;
  }

  std::vector<std::string> ListBlobs(const SegmentId& id) const override {
    return core_->blobs->List(id);
  }

  Status RemoveBlob(const SegmentId& id, std::string_view name) override {
    if (!ValidBlobName(name)) return InvalidArgument("not a blob name: " + std::string(name));
    PREFIXD_ASSIGN(const ChainPin pin, core_->tree.PinSegment(id));
    return core_->blobs->Remove(id, name);
  }

  std::vector<PrefixInfo> ListPrefixes(const PrefixesAfter& after) const override {
    std::vector<PrefixInfo> out;
    PrefixTree::Place place{after.tenant, after.id};
    while (out.size() < after.limit) {
      const size_t want = std::min(after.limit - out.size(), kIdsAtOnce);
      const auto ids = core_->tree.IdsAfter(place, want, after.one_tenant);
      for (const PrefixTree::Place& next : ids) {
        auto info = core_->segments->Info(next.id);
        // A concurrent call may have removed it.
        if (info.ok() && info->listed && !info->live) out.push_back(std::move(*info));
      }
      if (ids.size() < want) break;
      place = ids.back();
    }
    return out;
  }

  Result<PrefixInfo> GetPrefix(const SegmentId& id) const override {
    return core_->segments->Info(id);
  }
  std::optional<std::string> TenantOf(const SegmentId& id) const override {
    return core_->tree.TenantOf(id);
  }
  Status Remove(const SegmentId& id) override { return core_->names->Remove(id); }

  Status SetLifetime(const SegmentId& id, const LifetimeChange& change) override {
    return core_->names->SetLifetime(id, change);
  }

  void NoteUse(const SegmentId& id) override {
    core_->segments->Touch(core_->tree.Resolve(id).first);
  }
  Status Maintain() override { return core_->Maintain(); }

  Status Recluster(const SegmentId& id, const ReclusterOptions& options) override {
    return ReclusterSegment(*core_, id, options);
  }

  Status CheckCompressible(const SegmentId& id) const override {
    return storage::CheckCompressible(*core_, id);
  }
  Result<SegmentSizes> SizesOf(const SegmentId& id, uint32_t kept_rows) const override {
    return CompressedSizes(*core_, id, kept_rows);
  }
  Status Compress(const SegmentId& id, const CompressOptions& options) override {
    return CompressSegment(*core_, id, options);
  }

  Result<bool> Reencrypt(const SegmentId& id, const Progress& progress) override {
    return ReencryptSegment(*core_, id, progress);
  }

  Result<PrefixInfo> CheckCompaction(const SegmentId& leaf, uint32_t max_tokens) const override {
    return CheckCompactionOf(*core_, leaf, max_tokens);
  }
  Result<SegmentId> Compact(const SegmentId& leaf, uint32_t max_tokens,
                            std::span<const NewBlob> blobs) override {
    for (const NewBlob& blob : blobs) PREFIXD_TRY(CheckBlob(blob.name, blob.producer));
    return CompactSegment(*core_, leaf, max_tokens, blobs);
  }

  Status Push(const SegmentId& id, RemoteTier& remote, const Progress& progress) override {
    return PushChain(*core_, id, remote, progress);
  }

  Status Pull(const SegmentId& id, const RemoteTier& remote, const Progress& progress) override {
    return PullChain(*core_, id, remote, progress);
  }

  Result<std::unique_ptr<Snapshot>> TakeSnapshot() override { return storage::TakeSnapshot(core_); }

  Result<VerifyReport> Verify(const SegmentId* only, const Progress& progress) override {
    if (only == nullptr) {
      return core_->verifier->Verify([&] { return core_->tree.Records(); }, progress,
                                     core_->options.SharedMemory());
    }
    PREFIXD_ASSIGN(const PrefixInfo known, core_->tree.Info(*only));
    return core_->verifier->Verify([&] { return core_->tree.Chain(*only); }, progress,
                                   core_->options.MemoryOf(known.tenant));
  }

  Result<VerifyReport> VerifyTenant(std::string_view tenant, const Progress& progress) override {
    const auto wanted = [&] {
      std::vector<SegmentRecord> records = core_->tree.Records();
      std::erase_if(records, [&](const SegmentRecord& r) { return r.tenant != tenant; });
      return records;
    };
    return core_->verifier->Verify(wanted, progress, core_->options.MemoryOf(tenant));
  }

  Result<int64_t> Scrub(const ScrubOptions& options) override {
    return ScrubStore(*core_, options);
  }

  Status CheckEnds(const std::function<bool()>& go_on) override {
    return storage::CheckEnds(*core_, go_on);
  }

  Result<WarmedUp> WarmUp(const WarmUpOptions& options) override {
    return storage::WarmUp(*core_, options);
  }

  void OnBlobLost(BlobLost told) override { core_->verifier->OnBlobLost(std::move(told)); }

  Stats stats() const override {
    Stats s;
    s.io_backend = core_->engine->name();
    s.segments = core_->tree.size();
    s.bytes_on_disk = core_->tree.file_bytes() + core_->blobs->TotalBytes();
    if (const auto free = FreeBytes(core_->options.dir); free.ok()) s.bytes_free = *free;
    const HostTier::Stats tier = core_->tier->stats();
    s.host_tier_bytes = tier.bytes;
    s.host_tier_capacity = tier.capacity;
    s.host_hits = tier.hits;
    s.host_misses = tier.misses;
    s.host_tier_pinned = tier.pinned_bytes;
    s.host_evictions = tier.evictions;
    s.prefetched_bytes = tier.ahead.read * kPageBytes;
    s.prefetch_used_bytes = tier.ahead.used * kPageBytes;
    s.prefetch_wasted_bytes = tier.ahead.in_vain * kPageBytes;
    s.host_tier_huge_pages = tier.huge_pages;
    for (const auto& [tenant, share, r] : tier.tenants) {
      s.host_tenants.push_back(
          {tenant, r.bytes, r.memory_bytes, share, r.pinned_bytes, r.hits, r.misses, r.evictions});
    }
    s.bytes_written = core_->counters.bytes_written;
    s.bytes_read = core_->counters.bytes_read;
    s.bytes_rewritten = core_->counters.bytes_rewritten;
    s.reclustered = core_->counters.reclustered;
    s.compacted = core_->counters.compacted;
    s.puts = core_->counters.puts;
    s.puts_aborted = core_->counters.puts_aborted;
    s.recovered_orphans = core_->counters.recovered_orphans;
    s.recovered_commits = core_->counters.recovered_commits;
    s.checksum_failures = core_->counters.checksum_failures;
    s.quota_bytes = core_->options.quota_bytes;
    s.expired = core_->counters.expired;
    s.tenants = core_->room->Tenants();
    for (const TenantUsage& t : s.tenants) {
      s.evictions += t.evictions;
      s.evicted_bytes += t.evicted_bytes;
    }
    s.scrub_bytes = core_->counters.scrub_bytes;
    s.scrub_damaged = core_->counters.scrub_damaged;
    s.warmed_bytes = core_->counters.warmed_bytes;
    s.unchecked_segments = core_->counters.unchecked_segments;
    if (const auto oldest = core_->tree.LeastRecentlyVerified()) {
      s.verified_since_unix_ms = oldest->second;
    }
    return s;
  }

 private:
  const std::shared_ptr<StoreCore> core_;
};

}  // namespace

Result<std::shared_ptr<StoreCore>> OpenStoreCore(const StoreOptions& options,
                                                 const EngineWrapper& wrap_engine,
                                                 const CatalogWrapper& wrap_catalog) {
  PREFIXD_ASSIGN(auto core, StoreCore::Join(options, wrap_engine, wrap_catalog));
  PREFIXD_TRY(RemoveOldSnapshot(options.dir));
  PREFIXD_TRY(RecoverStore(*core));
  core->names->SweepExpired();
  core->removal->FreeUnneeded({GoneReason::kExpired, ""});
  core->ballast->Restore(options.min_free_bytes);
  return core;
}

Result<std::unique_ptr<PrefixStore>> OpenStoreWithEngine(const StoreOptions& options,
                                                         const EngineWrapper& wrap) {
  PREFIXD_ASSIGN(std::shared_ptr<StoreCore> core, OpenStoreCore(options, wrap));
  return std::unique_ptr<PrefixStore>(std::make_unique<Store>(std::move(core)));
}

Result<std::unique_ptr<PrefixStore>> PrefixStore::Open(const StoreOptions& options) {
  return OpenStoreWithEngine(options, nullptr);
}

}  // namespace prefixd::storage
