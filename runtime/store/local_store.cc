#include "runtime/store/local_store.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "base/capture_errors.h"
#include "base/match_calls.h"
#include "base/session_arguments.h"
#include "base/tables/runtime_options.h"
#include "runtime/derived/blob_names.h"
#include "runtime/ingest/ingest.h"
#include "runtime/ingest/rewrite.h"
#include "runtime/rates/rates_file.h"
#include "runtime/session/step_batch.h"
#include "runtime/store/attach_session.h"
#include "runtime/store/begin_put.h"
#include "runtime/store/compress_prefix.h"
#include "runtime/store/core.h"
#include "runtime/store/estimate.h"
#include "runtime/store/explain.h"
#include "runtime/store/lookup.h"
#include "runtime/store/memory_parts.h"
#include "runtime/store/resumption.h"
#include "runtime/store/rewrite_prefix.h"
#include "runtime/store/store_lists.h"
#include "runtime/store/store_options.h"
#include "runtime/store/store_reports.h"
#include "runtime/summaries/token_features.h"

namespace prefixd {
namespace {

using storage::SegmentId;

constexpr std::chrono::minutes kSaveRates{10};

VerifySummary SummaryOf(storage::VerifyReport report) {
  VerifySummary summary{report.covered.size(),
                        report.pages,
                        report.blobs,
                        report.bytes,
                        std::move(report.damaged),
                        {},
                        std::move(report.unread)};
  for (const SegmentId& id : report.covered) summary.covered.push_back(id.ToString());
  return summary;
}

class LocalStoreImpl final : public LocalStore {
 public:
  explicit LocalStoreImpl(std::shared_ptr<Core> core)
      : core_(std::move(core)),
        matches_(std::make_unique<MatchCalls>(
            [this](size_t, const MatchSpec& spec) { return Match(spec); })) {}
  ~LocalStoreImpl() override {
    if (!Opened().ok()) {  // a child of fork(), where there are no threads to wait for
      static_cast<void>(matches_.release());
      return;
    }
    matches_->Stop();
    core_->pace.Stop();
    core_->scrubber->Stop();
    if (core_->warm_up) core_->warm_up->Stop();
    core_->prefetcher.Stop();
    core_->key_preloader.Stop();
    core_->index_preloader.Stop();
    core_->maintenance->Stop();
    core_->resumption->Stop();
    core_->rewrites->Stop();
    core_->ingest->Stop();
    core_->mover->Stop();
    (void)SaveRates(core_->options.dir, core_->rates);  // the next process measures them itself
  }

  Status RegisterModel(const ModelSpec& spec) override {
    PREFIXD_TRY(Opened());
    PREFIXD_ASSIGN(const bool changed, core_->models.Register(spec));
    if (changed) core_->resumption->LookAgain(spec.name);
    return {};
  }

  Result<ModelSpec> Model(std::string_view name) override {
    PREFIXD_TRY(Opened());
    PREFIXD_ASSIGN(const auto model, core_->models.Find(name));
    return model->spec;
  }

  Result<ModelPage> ListModels(const ListSpec& spec) override {
    PREFIXD_TRY(Opened());
    return core_->models.List(spec.after, PageLimit(spec), kMaxPageBytes);
  }

  Status RemoveModel(std::string_view name) override {
    PREFIXD_TRY(Opened());
    return core_->models.Remove(name);
  }

  Result<std::unique_ptr<PutStream>> BeginPut(const PutSpec& spec) override {
    PREFIXD_TRY(Opened());
    return BeginStorePut(core_, spec);
  }

  Result<PrefixMatch> Match(const MatchSpec& spec) override {
    PREFIXD_TRY(Opened());
    PREFIXD_ASSIGN(const auto model, core_->models.Find(spec.model));
    PREFIXD_TRY(CheckEngineSpeed(spec.engine));
    PREFIXD_ASSIGN(const auto accept, AcceptanceOf(spec));
    PREFIXD_ASSIGN(const auto match,
                   core_->storage->LongestMatch(spec.model, spec.tenant, spec.tokens, accept));
    if (match.n_tokens == 0) return PrefixMatch{};
    const ReuseEstimate estimate =
        EstimateReuse(*core_, spec.engine, {model->spec, spec.tenant, match.id, match.n_tokens});
    core_->advised[static_cast<size_t>(estimate.advice)].fetch_add(1, std::memory_order_relaxed);
    return PrefixMatch{match.id.ToString(), match.n_tokens, match.stored_tokens,
                       match.exact_tokens,  estimate,       match.compressed};
  }

  Result<std::unique_ptr<PendingMatch>> MatchAsync(const MatchSpec& spec,
                                                   std::chrono::milliseconds deadline) override {
    PREFIXD_TRY(Opened());
    return matches_->Begin(spec, deadline);
  }

  Result<Explanation> Explain(const ExplainSpec& spec) override {
    PREFIXD_TRY(Opened());
    return ExplainMatch(*core_, spec);
  }

  Result<RewriteResult> Rewrite(std::string_view prefix, RewriteKind kind,
                                const ProgressFn& progress) override {
    PREFIXD_TRY(Opened());
    return RewritePrefix(*core_, prefix, kind, progress);
  }

  Result<CompressReport> Compress(std::string_view prefix, const CompressSpec& spec,
                                  const ProgressFn& progress) override {
    PREFIXD_TRY(Opened());
    return CompressPrefix(*core_, prefix, spec, progress);
  }

  Result<std::unique_ptr<Snapshot>> TakeSnapshot() override {
    PREFIXD_TRY(Opened());
    return core_->storage->TakeSnapshot();
  }

  Status WaitReady(std::string_view prefix, const ProgressFn& progress) override {
    PREFIXD_TRY(Opened());
    std::vector<SegmentId> chain;
    while (true) {
      PREFIXD_ASSIGN(const auto info, FindPrefix(*core_, prefix));
      const bool same = std::exchange(chain, info.chain) == info.chain;
      core_->resumption->LookAt(chain);
      for (const SegmentId& id : chain) core_->ingest->EnqueueUnknown(id);
      Status ready = core_->ingest->Wait(chain, progress);
      // A compaction may have replaced a missing segment: the prefix then has another chain to wait
      // for.
      if (ready.ok() || ready.error().code != Code::kNotFound || same) return ready;
    }
  }

  Status WaitRewritten(const ProgressFn& progress) override {
    PREFIXD_TRY(core_->resumption->Wait(progress));
    // A compacted segment goes back to the ingest, and from there to the rewriting.
    while (core_->ingest->queued() + core_->rewrites->queued() > 0) {
      PREFIXD_TRY(core_->ingest->WaitIdle(progress));
      PREFIXD_TRY(core_->rewrites->WaitIdle(progress));
    }
    return {};
  }

  Result<std::shared_ptr<Session>> Attach(const AttachSpec& spec) override {
    PREFIXD_TRY(Opened());
    return AttachSession(core_, spec);
  }

  Result<PrefixPage> ListPrefixes(const ListSpec& spec) override {
    PREFIXD_TRY(Opened());
    return PrefixPageOf(*core_, spec);
  }

  Result<PrefixDetail> Prefix(std::string_view prefix) override {
    PREFIXD_TRY(Opened());
    return PrefixDetailOf(*core_, prefix);
  }

  Result<std::string> TenantOf(std::string_view prefix) override {
    PREFIXD_TRY(Opened());
    const auto id = SegmentId::Parse(prefix);
    auto tenant = id.ok() ? core_->storage->TenantOf(*id) : std::nullopt;
    if (!tenant) return NoSuchPrefix(prefix);
    return *std::move(tenant);
  }

  Status Remove(std::string_view prefix) override {
    PREFIXD_TRY(Opened());
    PREFIXD_ASSIGN(const auto info, FindPrefix(*core_, prefix));
    const SegmentId segment = info.chain.back();
    const bool derives = core_->Derives(segment);
    Status status = core_->resumption->Undisturbed(segment, [&] {
      core_->rewrites->Forget(segment);
      core_->ingest->Forget(segment);
      return core_->storage->Remove(info.id);
    });
    core_->prepared.Forget(segment);
    // The segment is still stored: the removal was refused, or other prefixes need it. The ingest
    // resumes and keeps what is stored.
    if (derives && core_->storage->GetPrefix(segment).ok()) core_->ingest->Enqueue(segment);
    return status;
  }

  Status SetLifetime(std::string_view prefix, const Lifetime& lifetime) override {
    PREFIXD_TRY(Opened());
    PREFIXD_ASSIGN(const auto info, FindPrefix(*core_, prefix));
    storage::LifetimeChange change;
    change.pinned = lifetime.pinned;
    if (lifetime.ttl_seconds) {
      PREFIXD_TRY(CheckTtl(*lifetime.ttl_seconds));
      const auto ttl = std::chrono::seconds(*lifetime.ttl_seconds);
      const auto expires = std::chrono::system_clock::now().time_since_epoch() + ttl;
      change.expires_unix_ms =
          ttl.count() == 0 ? 0
                           : std::chrono::duration_cast<std::chrono::milliseconds>(expires).count();
    }
    return core_->storage->SetLifetime(info.id, change);
  }

  Result<VerifySummary> Verify(std::string_view prefix, const ProgressFn& progress) override {
    PREFIXD_TRY(Opened());
    std::optional<SegmentId> only;
    if (!prefix.empty()) {
      PREFIXD_ASSIGN(const auto info, FindPrefix(*core_, prefix));
      only = info.id;
    }
    PREFIXD_ASSIGN(auto report, core_->storage->Verify(only ? &*only : nullptr, progress));
    return SummaryOf(std::move(report));
  }

  Result<VerifySummary> VerifyTenant(std::string_view tenant, const ProgressFn& progress) override {
    PREFIXD_TRY(Opened());
    PREFIXD_ASSIGN(auto report, core_->storage->VerifyTenant(tenant, progress));
    return SummaryOf(std::move(report));
  }

  const std::shared_ptr<MemoryBudget>& memory() const override { return core_->memory; }

  Result<RuntimeStats> Stats() override {
    PREFIXD_TRY(Opened());
    return StatsOf(*core_);
  }

  void StepBatch(std::span<StepRequest> requests) override {
    prefixd::StepBatch(core_->services, requests);
  }

 private:
  // kFailedPrecondition in a child of the process that opened the store.
  Status Opened() const { return core_->services.opened.Check(); }
  const std::shared_ptr<Core> core_;
  std::unique_ptr<MatchCalls> matches_;
};

}  // namespace

void Core::Rebuild(const storage::SegmentId& id) {
  (void)MarkIncomplete(derived, id);  // if it fails, the queue below still does the work
  if (ingest) ingest->Enqueue(id);
}

Result<std::unique_ptr<LocalStore>> LocalStore::Open(const RuntimeOptions& options) {
  return Open(options, &storage::PrefixStore::Open);
}

Result<std::unique_ptr<LocalStore>> LocalStore::Open(const RuntimeOptions& options,
                                                     const OpenStorage& open) {
  PREFIXD_TRY(CheckOptions(options));
  PREFIXD_ASSIGN(RuntimeOptions resolved, WithMemoryParts(options, MachineMemory()));
  // Others are told of the directory (a snapshot's is read by prefixctl), and a program may change
  // its own.
  std::error_code failed;
  auto dir = std::filesystem::absolute(options.dir, failed);
  if (!failed) resolved.dir = std::move(dir);
  const std::shared_ptr<MemoryBudget> memory = NewMemoryBudget(resolved);
  PREFIXD_ASSIGN(storage::StoreOptions at, StorageOptions(resolved));
  at.memory = memory;
  at.tables_bytes = TablesBytes(resolved);
  std::shared_ptr<HostPinning> pinning;
  if (options.pin_host_tier) {
    pinning = HostPinning::Open();
    at.on_host_block = HostPinning::Hook(pinning);
  }
  PREFIXD_ASSIGN(auto compute, Compute::Open(options.compute));
  PREFIXD_ASSIGN(auto storage, open(at));
  if (resolved.phi_features == "auto") {
    resolved.phi_features = compute->steps_on_device() ? "none" : "log8";
  }
  // A child of fork() leaves its copy as it is: it has none of the threads that would have to end.
  const std::shared_ptr<Core> core(
      new Core(resolved, memory, std::move(storage), std::move(compute)), [](const Core* ended) {
        if (ended->services.opened.holds()) delete ended;
      });
  core->pinning = std::move(pinning);
  core->services.store = {
      // sessions keep the core
      [c = std::weak_ptr(core)](const PutSpec& spec) { return BeginStorePut(c.lock(), spec); },
      [c = std::weak_ptr(core)](const AttachSpec& spec) { return AttachSession(c.lock(), spec); },
      [c = std::weak_ptr(core)](const PutSpec& spec) {
        return BeginStorePut(c.lock(), spec, /*live=*/true);
      },
      [c = core.get()](const SegmentId& id, const ProgressFn& told) {
        c->ingest->EnqueueUnknown(id);
        c->ingest->PutFirst(id);  // a session's memory waits for it
        return c->ingest->Wait({&id, 1}, told);
      },
      [c = core.get()](std::span<const SegmentId> chain) {
        // What there was no memory for, the next session asks for.
        static_cast<void>(CaptureErrors([&]() -> Status {
          for (const SegmentId& id : chain) {
            if (!c->Derives(id)) c->ingest->Enqueue(id);
          }
          return {};
        }));
      },
      [c = core.get()](const std::shared_ptr<const prefixd::Model>& model, const SegmentId& id,
                       uint32_t n_tokens) { return c->prepared.Get(model, id, n_tokens); }};
  core->services.live_ids = std::random_device()();
  core->mover = std::make_unique<OwnMover>([c = core.get()](const SegmentId& id) {
    // An ingest that is not done would keep it open, and stand before that of the next one.
    const bool ready = c->ingest->Get(id).state == IngestState::kReady;
    if (!ready) c->ingest->Forget(id);
    const Status removed = c->storage->Remove(id);
    if (!removed.ok()) return removed;
    // A later move may continue it, and is as prepared as it was.
    if (c->storage->GetPrefix(id).ok()) {
      if (!ready) c->ingest->Enqueue(id);
      return removed;
    }
    c->ingest->Forget(id);
    c->rewrites->Forget(id);
    c->prepared.Forget(id);
    return removed;
  });
  core->services.mover = core->mover.get();
  core->services.scorers = &core->scorers;
  PREFIXD_TRY(core->models.LoadAll());
  LoadRates(core->options.dir, core->rates);
  core->ingest = std::make_unique<SegmentQueue>(
      "summaries", core->pace,
      [c = core.get()](const SegmentId& id, WorkProgress& progress) -> Status {
        PREFIXD_ASSIGN(const auto info, c->storage->GetPrefix(id));
        PREFIXD_ASSIGN(const auto model, c->models.Find(info.model));
        PREFIXD_TRY(IngestSegment(c->derived, *model, info.chain.back(), progress));
        c->prepared.Forget(info.chain.back());
        if (c->options.recluster) c->rewrites->Enqueue(info.chain.back());
        return {};
      });
  core->rewrites = std::make_unique<SegmentQueue>(
      "rewritten rows", core->pace,
      [c = core.get()](const SegmentId& id, WorkProgress& progress) -> Status {
        PREFIXD_ASSIGN(const auto info, c->storage->GetPrefix(id));
        PREFIXD_ASSIGN(const auto model, c->models.Find(info.model));
        PREFIXD_ASSIGN(const Rewritten done,
                       RewriteSegment(*c->storage, c->derived, *model, id, progress));
        if (!done.compacted) return {};
        for (const SegmentId& gone : done.gone) c->ingest->Forget(gone);
        c->ingest->Enqueue(*done.compacted);
        return {};
      });
  core->maintenance = std::make_unique<Maintenance>(std::vector<MaintenanceTask>{
      {"limits", std::chrono::milliseconds(options.maintenance_ms),
       [c = core.get()](const std::stop_token&) {
         Status done = c->storage->Maintain();
         const auto exists = [c](const SegmentId& id) {
           return c->storage->TenantOf(id).has_value();
         };
         c->ingest->Prune(exists);
         c->ingest->RetryFailed();
         c->rewrites->Prune(exists);
         c->prepared.Prune(exists);
         return done;
       }},
      {"rates", kSaveRates,
       [c = core.get()](const std::stop_token&) { return SaveRates(c->options.dir, c->rates); }}});
  // Lost derived data is made again.
  core->storage->OnBlobLost([c = core.get()](const SegmentId& id, std::string_view name) {
    if (name == kQueriesBlob) ReportLostQueries(c->derived, id);
    c->Rebuild(id);
  });
  core->scrubber = std::make_unique<Scrubber>(core->storage.get(), options.scrub_bytes_per_second,
                                              options.scrub_interval_hours);
  core->resumption = std::make_unique<Resumption>(*core);
  if (options.warm_up) core->warm_up = std::make_unique<WarmUp>(*core->storage, core->pace);
  return std::unique_ptr<LocalStore>(std::make_unique<LocalStoreImpl>(core));
}

}  // namespace prefixd
