// Enforces limits: makes room for puts, keeps lifetimes, and sweeps both in the background.
#include <algorithm>
#include <cstdio>

#include "storage/catalog/eviction.h"
#include "storage/io/errors.h"
#include "storage/store/store_core.h"

namespace prefixd::storage {
namespace {

// Between plan and eviction a concurrent call may have opened or continued a victim.
constexpr int kEvictionAttempts = 4;
// Bounds of one sweep, so that the maintenance thread gets to its other work.
constexpr size_t kMaxSweptNames = 1024, kMaxSweptSegments = 256;

int64_t Later(int64_t a, int64_t b) { return a == 0 || b == 0 ? 0 : std::max(a, b); }

}  // namespace

Result<SpaceReservation> StoreCore::Reserve(const std::string& tenant, uint64_t bytes, Room room) {
  SpaceReservation reserved;
  const bool may_evict = room == Room::kMayEvict && options.eviction == Eviction::kByScore;
  if (!may_evict) {
    PREFIXD_ASSIGN(const SpaceShortage shortage, space->TryReserve(tenant, bytes, &reserved));
    if (shortage.any()) return space->Refusal(tenant, bytes, shortage);
    return reserved;
  }
  wanted_room_ = true;
  // One eviction runs at a time, so that no put takes the room that another has just made.
  std::lock_guard evicting(eviction_mutex_);
  for (int attempt = 0;; ++attempt) {
    PREFIXD_ASSIGN(const SpaceShortage shortage, space->TryReserve(tenant, bytes, &reserved));
    if (!shortage.any()) return reserved;
    if (attempt == kEvictionAttempts || !EvictFor(tenant, shortage, "to make room for a put")) {
      return space->Refusal(tenant, bytes, shortage);
    }
  }
}

EvictionPlan StoreCore::NewEvictionPlan() const {
  std::vector<EvictionNode> nodes = tree.EvictionNodes(NowUnixMs());
  for (EvictionNode& node : nodes) node.bytes += blobs->BytesOf(node.id);
  return EvictionPlan(std::move(nodes));
}

bool StoreCore::EvictFor(const std::string& tenant, const SpaceShortage& shortage,
                         const char* why) {
  EvictionPlan plan = NewEvictionPlan();
  if (shortage.tenant > 0 && !plan.Free(shortage.tenant, &tenant)) return false;
  const uint64_t total = std::max(shortage.disk, shortage.store);
  if (total > plan.freed() && !plan.Free(total - plan.freed(), nullptr)) return false;
  Evict(plan.victims(), why);
  return true;
}

void StoreCore::Evict(std::span<const EvictionNode> victims, const char* why) {
  for (const EvictionNode& victim : victims) {
    std::lock_guard commit(commit_mutex);
    if (Retained(victim.id)) continue;  // pinned meanwhile
    const Status erased = EraseSegment(victim.id);
    if (tree.Record(victim.id).ok()) continue;  // needed again
    // The segment is gone, even if its file could not be removed yet.
    if (!erased.ok()) LogWarning(erased.error().message);
    char uses[16];
    std::snprintf(uses, sizeof(uses), "%.2f", double{victim.heat});
    LogInfo("evicted segment " + victim.id.ToString() + " of tenant '" + victim.tenant + "' (" +
            std::to_string(victim.tokens.size()) + " tokens, " + std::to_string(victim.bytes) +
            " bytes, " + uses + " recent uses) " + why);
    std::lock_guard guard(mutex_);
    EvictionCount& count = evicted_[victim.tenant];
    ++count.segments;
    count.bytes += victim.bytes;
  }
  FreeUnneeded();
}

bool StoreCore::Retained(const SegmentId& id) const {
  const auto record = tree.Record(id);
  const auto aliases = tree.AliasesInto(id);
  return (record.ok() && record->listed && record->pinned) ||
         std::any_of(aliases.begin(), aliases.end(), [](const auto& a) { return a.pinned; });
}

Status StoreCore::ChangeName(const SegmentId& id, const std::function<Status(Name&)>& edit) {
  std::lock_guard commit(commit_mutex);
  const int64_t now = NowUnixMs();
  CatalogChange change;
  for (AliasRecord alias : tree.AliasesInto(tree.Resolve(id).first)) {
    if (alias.id != id) continue;
    Name name{Expired(alias.expires_unix_ms, now), alias.pinned, alias.expires_unix_ms};
    PREFIXD_TRY(edit(name));
    alias.pinned = name.pinned;
    alias.expires_unix_ms = name.expires_unix_ms;
    change.put_aliases.push_back(alias);
    return tree.UpdateAlias(alias, [&] { return catalog->Apply(change); });
  }
  PREFIXD_ASSIGN(const SegmentRecord old, tree.Record(id));
  Name name{!old.listed || Expired(old.expires_unix_ms, now), old.pinned, old.expires_unix_ms};
  PREFIXD_TRY(edit(name));
  SegmentRecord record = old;
  record.listed = true;
  record.pinned = name.pinned;
  record.expires_unix_ms = name.expires_unix_ms;
  if (record == old) return {};
  change.put.push_back({record, std::nullopt});
  return tree.Update(record, record.file, [&] { return catalog->Apply(change); });
}

Status StoreCore::SetLifetime(const SegmentId& id, const LifetimeChange& change) {
  return ChangeName(id, [&](Name& name) -> Status {
    if (name.gone) {
      return Error{Code::kNotFound,
                   "prefix " + id.ToString() + " was removed or has expired; put it again"};
    }
    name.pinned = change.pinned.value_or(name.pinned);
    name.expires_unix_ms = change.expires_unix_ms.value_or(name.expires_unix_ms);
    return {};
  });
}

Status StoreCore::Keep(const SegmentId& id, bool pinned, int64_t expires_unix_ms) {
  return ChangeName(id, [&](Name& name) -> Status {
    name.pinned = pinned || (!name.gone && name.pinned);
    name.expires_unix_ms =
        name.gone ? expires_unix_ms : Later(name.expires_unix_ms, expires_unix_ms);
    return {};
  });
}

void StoreCore::SweepExpired() {
  size_t done = 0;
  for (const SegmentId& id : tree.ExpiredNames(NowUnixMs())) {
    if (done >= kMaxSweptNames) break;
    std::lock_guard commit(commit_mutex);
    const auto info = tree.Info(id);
    if (!info.ok() || !info->listed || !Expired(info->expires_unix_ms, NowUnixMs())) continue;
    if (RemoveName(id).ok()) ++done;  // else it is open: a later sweep tries again
  }
  expired += done;
  if (done > 0) LogInfo("prefixes that expired: " + std::to_string(done));
}

// Headroom is made only when puts came since the last time: an idle store keeps its data, even when
// others fill the disk.
Status StoreCore::MakeHeadroom() {
  if (!wanted_room_.exchange(false)) return {};
  std::lock_guard evicting(eviction_mutex_);
  PREFIXD_ASSIGN(const SpaceAccount::Headroom missing, space->MissingHeadroom());
  if (missing.total == 0 && missing.tenants.empty()) return {};
  EvictionPlan plan = NewEvictionPlan();
  // A limit that no eviction can satisfy does not justify emptying the cache.
  const auto reach = [&plan](uint64_t bytes, const std::string* tenant) {
    EvictionPlan further = plan;
    if (further.Free(bytes, tenant)) plan = std::move(further);
  };
  for (const auto& [tenant, bytes] : missing.tenants) reach(bytes, &tenant);
  if (missing.total > plan.freed()) reach(missing.total - plan.freed(), nullptr);
  const std::span<const EvictionNode> victims = plan.victims();
  Evict(victims.first(std::min(victims.size(), kMaxSweptSegments)),
        "so that the next puts need not wait");
  if (victims.size() > kMaxSweptSegments) wanted_room_ = true;
  return {};
}

Status StoreCore::Maintain() {
  SweepExpired();
  FreeUnneeded();
  PREFIXD_TRY(MakeHeadroom());
  ballast->Restore(options.min_free_bytes);
  return {};
}

std::vector<TenantUsage> StoreCore::Tenants() const {
  std::vector<TenantUsage> tenants = space->Usage();
  std::lock_guard guard(mutex_);
  for (const auto& [name, count] : evicted_) {
    auto it = std::find_if(tenants.begin(), tenants.end(),
                           [&](const TenantUsage& t) { return t.tenant == name; });
    if (it == tenants.end()) {
      it = tenants.insert(it, TenantUsage{});
      it->tenant = name;
      it->quota_bytes = space->QuotaOf(name);
    }
    it->evictions = count.segments;
    it->evicted_bytes = count.bytes;
  }
  return tenants;
}

}  // namespace prefixd::storage
