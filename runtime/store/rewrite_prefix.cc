#include "runtime/store/rewrite_prefix.h"

#include <algorithm>
#include <string>
#include <vector>

#include "runtime/ingest/rewrite.h"
#include "runtime/store/lookup.h"
#include "runtime/store/work_reporter.h"

namespace prefixd {
namespace {

using storage::SegmentId;

// What cannot be done to one segment, but says nothing about the others.
bool Stays(const Error& error) {
  return error.code == Code::kFailedPrecondition || error.code == Code::kUnavailable ||
         error.code == Code::kNotFound;
}

Status Recluster(Core& core, const Model& model, const storage::PrefixInfo& info,
                 const ProgressFn& progress, RewriteResult* out) {
  for (const SegmentId& id : info.chain) {
    PREFIXD_ASSIGN(const auto segment, core.storage->GetPrefix(id));
    if (segment.reclustered) continue;
    core.rewrites->Forget(id);
    WorkProgress work;
    const Status done = [&] {
      const WorkReporter reporter(work, progress, "rows");
      return ReclusterNow(*core.storage, core.derived, model, id, work);
    }();
    if (!done.ok() && !Stays(done.error())) return done;
    if (done.ok()) {
      ++out->rewritten;
    } else {
      out->left.push_back(done.error().message);
    }
  }
  return {};
}

// Brings every segment of the prefix under the newest key.
Status Encrypt(Core& core, const storage::PrefixInfo& info, const ProgressFn& progress,
               RewriteResult* out) {
  for (const SegmentId& id : info.chain) {
    const auto written =
        core.storage->Reencrypt(id, [&](uint64_t done, uint64_t total, std::string_view unit) {
          return !progress || progress(done, total, unit);
        });
    // Without a key nothing can be encrypted; else a rewrite came between, or it does not fit.
    if (!written.ok() && (core.options.encryption_key_file.empty() || !Stays(written.error()))) {
      return written.error();
    }
    if (!written.ok()) {
      out->left.push_back(written.error().message);
    } else if (*written) {
      ++out->rewritten;
    }
  }
  return {};
}

// Joins the last two segments until something forbids it.
Status Compact(Core& core, const Model& model, std::string_view prefix, const ProgressFn& progress,
               RewriteResult* out) {
  while (true) {
    PREFIXD_ASSIGN(const auto info, FindPrefix(core, prefix));
    const SegmentId leaf = info.chain.back();
    if (info.chain.size() < 2) return {};
    core.rewrites->Forget(leaf);
    WorkProgress work;
    const auto compacted = [&] {
      const WorkReporter reporter(work, progress, "heads");
      return CompactNow(*core.storage, core.derived, model, leaf, work);
    }();
    if (!compacted.ok() && !Stays(compacted.error())) return compacted.error();
    if (!compacted.ok()) {
      out->left.push_back(compacted.error().message);
      return {};
    }
    ++out->rewritten;
    const bool derives = core.Derives(leaf);
    for (const SegmentId& gone : {leaf, info.chain[info.chain.size() - 2]}) {
      core.ingest->Forget(gone);
      core.prepared.Forget(gone);
    }
    if (derives) core.ingest->Enqueue(*compacted);
  }
}

}  // namespace

Result<RewriteResult> RewritePrefix(Core& core, std::string_view prefix, RewriteKind kind,
                                    const ProgressFn& progress) {
  PREFIXD_ASSIGN(const auto info, FindPrefix(core, prefix));
  PREFIXD_ASSIGN(const auto model, core.models.Find(info.model));
  RewriteResult out;
  const uint64_t before = core.storage->stats().bytes_rewritten;
  switch (kind) {
    case RewriteKind::kRecluster:
      PREFIXD_TRY(Recluster(core, *model, info, progress, &out));
      break;
    case RewriteKind::kCompact:
      PREFIXD_TRY(Compact(core, *model, prefix, progress, &out));
      break;
    case RewriteKind::kEncrypt:
      PREFIXD_TRY(Encrypt(core, info, progress, &out));
      break;
  }
  PREFIXD_ASSIGN(const auto now, FindPrefix(core, prefix));
  out.segments = static_cast<uint32_t>(now.chain.size());
  out.bytes = core.storage->stats().bytes_rewritten - before;
  return out;
}

}  // namespace prefixd
