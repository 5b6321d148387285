#include "storage/core/prefix_names.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "base/call_scope.h"
#include "storage/io/errors.h"
#include "storage/segment/unix_time.h"

namespace prefixd::storage {
namespace {

// Bounds one sweep, so that the maintenance thread gets to its other work.
constexpr size_t kMaxSweptNames = 1024;
constexpr int kPassingMs = 1000;  // within which who looks at a segment for a moment lets it go

int64_t Later(int64_t a, int64_t b) { return a == 0 || b == 0 ? 0 : std::max(a, b); }

}  // namespace

Status PrefixNames::Remove(const SegmentId& id) {
  const RemovalCause cause{GoneReason::kRemoved, ""};
  const auto remove = [&] {
    // The commit lock keeps puts from committing below a segment that is being removed.
    std::lock_guard commit(parts_.commit_mutex);
    return RemoveName(id, cause);
  };
  Status removed = remove();
  // Matches, looks at blobs and a warm-up pin it for a moment; what stays pinned is open.
  const SegmentId segment = parts_.tree.Resolve(id).first;
  const auto in_use = [&] {
    return !removed.ok() && removed.error().code == Code::kFailedPrecondition;
  };
  Status called;
  parts_.tree.Claim(segment, [&] {
    for (int ms = 0; ms < kPassingMs && in_use() && called.ok(); ++ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (!parts_.tree.Pinned(segment)) removed = remove();
      called = CheckCall();
    }
  });
  if (in_use()) PREFIXD_TRY(called);
  PREFIXD_TRY(removed);
  parts_.removal.FreeUnneeded(cause);
  return {};
}

Status PrefixNames::RemoveName(const SegmentId& id, const RemovalCause& cause) {
  CatalogChange change;
  if (parts_.tree.Resolve(id).second > 0) {
    change.remove_aliases.push_back(id);
    PREFIXD_ASSIGN(const AliasRecord alias,
                   parts_.tree.EraseAlias(id, [&] { return parts_.catalog.Apply(change); }));
    return {};
  }
  PREFIXD_ASSIGN(const PrefixInfo info, parts_.segments.Info(id));
  PREFIXD_ASSIGN(SegmentRecord record, parts_.tree.Record(id));
  if (!record.listed) {
    return Error{Code::kNotFound, "prefix " + id.ToString() +
                                      " was removed; its tokens stay while others need them"};
  }
  if (info.children == 0 && parts_.tree.AliasesInto(id).empty()) {
    return parts_.removal.Erase(id, cause);
  }
  record.listed = record.pinned = false;
  record.expires_unix_ms = 0;
  change.put.push_back({record, std::nullopt});
  return parts_.tree.Update(record, record.file, [&] { return parts_.catalog.Apply(change); });
}

Status PrefixNames::Change(const SegmentId& id, const std::function<Status(Name&)>& edit) {
  std::lock_guard commit(parts_.commit_mutex);
  const int64_t now = NowUnixMs();
  CatalogChange change;
  for (AliasRecord alias : parts_.tree.AliasesInto(parts_.tree.Resolve(id).first)) {
    if (alias.id != id) continue;
    Name name{Expired(alias.expires_unix_ms, now), alias.pinned, alias.expires_unix_ms};
    PREFIXD_TRY(edit(name));
    alias.pinned = name.pinned;
    alias.expires_unix_ms = name.expires_unix_ms;
    change.put_aliases.push_back(alias);
    return parts_.tree.UpdateAlias(alias, [&] { return parts_.catalog.Apply(change); });
  }
  PREFIXD_ASSIGN(const SegmentRecord old, parts_.tree.Record(id));
  Name name{!old.listed || Expired(old.expires_unix_ms, now), old.pinned, old.expires_unix_ms};
  PREFIXD_TRY(edit(name));
  SegmentRecord record = old;
  record.listed = true;
  record.pinned = name.pinned;
  record.expires_unix_ms = name.expires_unix_ms;
  if (record == old) return {};
  change.put.push_back({record, std::nullopt});
  return parts_.tree.Update(record, record.file, [&] { return parts_.catalog.Apply(change); });
}

Status PrefixNames::SetLifetime(const SegmentId& id, const LifetimeChange& change) {
  return Change(id, [&](Name& name) -> Status {
    if (name.gone) {
      return Error{Code::kNotFound,
                   "prefix " + id.ToString() + " was removed or has expired; put it again"};
    }
    name.pinned = change.pinned.value_or(name.pinned);
    name.expires_unix_ms = change.expires_unix_ms.value_or(name.expires_unix_ms);
    return {};
  });
}

Status PrefixNames::Keep(const SegmentId& id, bool pinned, int64_t expires_unix_ms) {
  return Change(id, [&](Name& name) -> Status {
    name.pinned = pinned || (!name.gone && name.pinned);
    name.expires_unix_ms =
        name.gone ? expires_unix_ms : Later(name.expires_unix_ms, expires_unix_ms);
    return {};
  });
}

void PrefixNames::SweepExpired() {
  size_t done = 0;
  for (const SegmentId& id : parts_.tree.ExpiredNames(NowUnixMs())) {
    if (done >= kMaxSweptNames) break;
    std::lock_guard commit(parts_.commit_mutex);
    const auto info = parts_.tree.Info(id);
    if (!info.ok() || !info->listed || !Expired(info->expires_unix_ms, NowUnixMs())) continue;
    if (RemoveName(id, {GoneReason::kExpired, ""}).ok())
      ++done;  // else it is open: a later sweep tries again
  }
  parts_.expired += done;
  if (done > 0) LogInfo("prefixes that expired: " + std::to_string(done));
}

}  // namespace prefixd::storage
