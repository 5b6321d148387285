#include "runtime/store/compress_prefix.h"

#include <cstdio>
#include <functional>
#include <optional>
#include <string>

#include "base/capture_errors.h"
#include "runtime/derived/blob_names.h"
#include "runtime/derived/unread.h"
#include "runtime/indexes/indexes.h"
#include "runtime/ingest/compress.h"
#include "runtime/ingest/ingest.h"
#include "runtime/store/lookup.h"
#include "runtime/store/work_reporter.h"

namespace prefixd {
namespace {

using storage::SegmentId;

Result<Compression> PlanFor(Core& core, const Model& model, const SegmentId& segment,
                            const CompressSpec& spec, const ProgressFn& progress) {
  PREFIXD_ASSIGN(const auto prefix, core.storage->OpenPrefix(segment, 0));
  const auto blob = core.storage->GetBlob(segment, kQueriesBlob, kQueriesProducer);
  if (!blob.ok() && Unread(blob.error())) return blob.error();
  std::optional<QuerySamples> samples;
  if (blob.ok()) {
    PREFIXD_ASSIGN(samples, QuerySamples::Deserialize(*blob, model.spec.geometry));
  }
  WorkProgress work;
  const WorkReporter reporter(work, progress, "heads");
  return PlanCompression(core.derived, model, *prefix, spec, samples ? &*samples : nullptr, work);
}

// Background rewriting would have the segment open, and so would a look at it behind a start;
// rewriting goes on where nothing was compressed.
class PausedRewriting {
 public:
  PausedRewriting(Core& core, const SegmentId& segment) : core_(core), segment_(segment) {}
  ~PausedRewriting() {
    if (!goes_on_) return;
    static_cast<void>(CaptureErrors([&]() -> Status {
      core_.rewrites->Enqueue(segment_);
      return {};
    }));
  }
  // Whether it is rewritten when this ends: what is not ready is when it is, and what is compressed
  // never.
  void set_goes_on(bool goes_on) { goes_on_ = goes_on; }
  Status Run(const std::function<Status()>& act) {
    return core_.resumption->Undisturbed(segment_, [&] {
      core_.rewrites->Forget(segment_);
      return act();
    });
  }
  PausedRewriting(const PausedRewriting&) = delete;
  PausedRewriting& operator=(const PausedRewriting&) = delete;

 private:
  Core& core_;
  const SegmentId segment_;
  bool goes_on_ = false;
};

}  // namespace

Result<CompressReport> CompressPrefix(Core& core, std::string_view prefix, const CompressSpec& spec,
                                      const ProgressFn& progress) {
  PREFIXD_ASSIGN(const auto info, FindPrefix(core, prefix));
  PREFIXD_ASSIGN(const auto model, core.models.Find(info.model));
  const SegmentId segment = info.chain.back();
  PausedRewriting paused(core, segment);
  paused.set_goes_on(core.options.recluster &&
                     core.ingest->Get(segment).state == IngestState::kReady);
  PREFIXD_TRY(paused.Run([&] { return core.storage->CheckCompressible(segment); }));
  PREFIXD_ASSIGN(const auto own, core.storage->GetPrefix(segment));
  // What stays must be in the summaries, for it cannot be made again.
  if (!IngestComplete(core.derived, *model, own)) {
    if (!core.Derives(segment)) core.ingest->Enqueue(segment);
    return Error{Code::kFailedPrecondition,
                 "the summaries of prefix " + std::string(prefix) +
                     " are not ready, and could not be made of a compressed one; wait until they "
                     "are (prefixctl prefixes show) and try again"};
  }
  core.ingest->MarkReady(segment);  // looks behind a start pass it by while it is compressed
  paused.set_goes_on(core.options.recluster);
  PREFIXD_ASSIGN(const Compression plan, PlanFor(core, *model, segment, spec, progress));
  CompressReport report = plan.report;
  if (spec.max_error > 0 && report.queries_measured == 0) {
    return Error{Code::kFailedPrecondition,
                 "the put of this prefix kept too few queries, so no error can be measured; leave "
                 "out max_error"};
  }
  PREFIXD_ASSIGN(const auto sizes, core.storage->SizesOf(segment, report.kept_tokens));
  report.bytes_before = sizes.now;
  report.bytes_after = sizes.compressed;
  if (spec.max_error > 0 && !(report.error_after <= spec.max_error)) {
    char text[160];
    std::snprintf(text, sizeof text,
                  "compressed, the prefix would err by %.4f on average, more than %.4f; it stays "
                  "as it is",
                  report.error_after, spec.max_error);
    report.refused = text;
    return report;
  }
  if (spec.dry_run) return report;
  storage::CompressOptions options;
  options.kept_rows = report.kept_tokens;
  options.kept = [&](uint32_t layer, uint32_t kv_head) -> Result<std::vector<uint32_t>> {
    return plan.kept[model->heads.of(layer, kv_head)];
  };
  options.progress = [&](uint64_t done, uint64_t total, std::string_view unit) {
    return !progress || progress(done, total, unit);
  };
  PREFIXD_TRY(paused.Run([&] { return core.storage->Compress(segment, options); }));
  paused.set_goes_on(false);
  core.prepared.Forget(segment);
  PREFIXD_TRY(RemoveIndexBlobs(core.derived, segment));
  report.compressed = true;
  return report;
}

}  // namespace prefixd
