#include "storage/core/room_maker.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "storage/io/errors.h"
#include "storage/segment/unix_time.h"

namespace prefixd::storage {
namespace {

// Between plan and eviction a concurrent call may have opened or continued a victim.
constexpr int kEvictionAttempts = 4;
// Bounds one sweep, so that the maintenance thread gets to its other work.
constexpr size_t kMaxSweptSegments = 256;
// How long nothing is evicted for the disk's sake after that was seen to free nothing.
constexpr auto kFutile = std::chrono::minutes(1);
constexpr int kInVain = 2;  // evictions in a row

}  // namespace

Result<SpaceReservation> RoomMaker::Reserve(const std::string& tenant, uint64_t bytes, Room room) {
  SpaceReservation reserved;
  const bool may_evict = room == Room::kMayEvict && parts_.options.eviction == Eviction::kByScore;
  if (!may_evict) {
    PREFIXD_ASSIGN(const SpaceShortage shortage, parts_.space.TryReserve(tenant, bytes, &reserved));
    if (shortage.any()) return parts_.space.Refusal(tenant, bytes, shortage);
    return reserved;
  }
  // One eviction runs at a time, so that no put takes the room that another has just made.
  PREFIXD_ASSIGN(const CallLock evicting, CallLock::Take(eviction_mutex_));
  wanted_room_.insert(tenant);
  stuck_.clear();
  uint64_t evicted_for = 0;  // bytes of the disk
  for (int attempt = 0;; ++attempt) {
    PREFIXD_ASSIGN(const SpaceShortage shortage, parts_.space.TryReserve(tenant, bytes, &reserved));
    if (evicted_for > 0) NoteFreed(evicted_for, shortage.disk);
    if (!shortage.any()) return reserved;
    const std::string futile = shortage.disk > 0 ? WhyFutile() : "";
    bool evicted = false;
    if (futile.empty() && attempt < kEvictionAttempts) {
      PREFIXD_ASSIGN(evicted, EvictFor(tenant, shortage, "to make room for a put"));
    }
    if (!evicted) {
      Error refusal = parts_.space.Refusal(tenant, bytes, shortage);
      if (!futile.empty()) refusal.message += "; " + futile;
      if (!stuck_.empty()) {
        const auto& [id, error] = *stuck_.begin();
        refusal.message += "; " + std::to_string(stuck_.size()) + " segments cannot be evicted, " +
                           id.ToString() + " for one: " + error.message;
      }
      return refusal;
    }
    evicted_for = shortage.disk;
  }
}

std::string RoomMaker::WhyFutile() const {
  if (parts_.snapshot_taken) {
    return "a backup under way keeps the space of what would be evicted until it ends";
  }
  if (std::chrono::steady_clock::now() < futile_until_) {
    return "what was evicted gave the disk no space back: something else keeps it, such as a "
           "snapshot of the file system";
  }
  return "";
}

void RoomMaker::NoteFreed(uint64_t before, uint64_t after) {
  if (after <= before / 2) {
    in_vain_ = 0;
    return;
  }
  if (++in_vain_ < kInVain) return;  // others may have taken what was freed
  if (std::chrono::steady_clock::now() >= futile_until_ + kFutile) {
    LogWarning(
        "segments were evicted and the disk has no more space than before: something keeps it, "
        "such as a snapshot of the file system; puts are refused rather than more evicted");
  }
  futile_until_ = std::chrono::steady_clock::now() + kFutile;
}

EvictionPlan RoomMaker::NewPlan() const {
  std::vector<EvictionNode> nodes = parts_.tree.EvictionNodes(parts_.options.Now());
  for (EvictionNode& node : nodes) {
    node.bytes += parts_.blobs.BytesOf(node.id);
    node.held = node.held || stuck_.contains(node.id);
  }
  return EvictionPlan(std::move(nodes));
}

Result<bool> RoomMaker::EvictFor(const std::string& tenant, const SpaceShortage& shortage,
                                 const char* why) {
  EvictionPlan plan = NewPlan();
  if (shortage.tenant > 0 && !plan.Free(shortage.tenant, &tenant)) return false;
  const size_t for_quota = plan.victims().size();
  const uint64_t total = std::max(shortage.disk, shortage.store);
  if (total > plan.freed() && !plan.Free(total - plan.freed(), nullptr)) return false;
  PREFIXD_TRY(Evict(plan.victims(), for_quota, why));
  return true;
}

Status RoomMaker::Evict(std::span<const EvictionNode> victims, size_t for_quota, const char* why) {
  RemovalCause cause;
  Status ended;
  for (size_t i = 0; i < victims.size(); ++i) {
    ended = CheckCall();
    if (!ended.ok()) break;
    const EvictionNode& victim = victims[i];
    std::lock_guard commit(parts_.commit_mutex);
    if (Retained(victim.id)) continue;  // pinned meanwhile
    cause = CauseOf(victim, i < for_quota, why);
    const Status erased = parts_.removal.Erase(victim.id, cause);
    if (parts_.tree.Record(victim.id).ok()) {
      if (erased.ok() || erased.error().code == Code::kFailedPrecondition)
        continue;                                   // needed again
      if (erased.error().code != Code::kCorrupt) {  // of the others, too
        ended = Error{erased.error().code,
                      "evicting segment " + victim.id.ToString() + ": " + erased.error().message};
        break;
      }
      LogWarning("segment " + victim.id.ToString() +
                 " cannot be evicted: " + erased.error().message);
      stuck_.insert_or_assign(victim.id, erased.error());
      continue;
    }
    // The segment is gone, even if its file could not be removed yet.
    if (!erased.ok()) LogWarning(erased.error().message);
    char uses[16];
    std::snprintf(uses, sizeof(uses), "%.2f", double{victim.heat});
    LogInfo("evicted segment " + victim.id.ToString() + " of tenant '" + victim.tenant + "' (" +
            std::to_string(victim.tokens.size()) + " tokens, " + std::to_string(victim.bytes) +
            " bytes, " + uses + " recent uses) " + why);
    std::lock_guard guard(count_mutex_);
    EvictionCount& count = evicted_[victim.tenant];
    ++count.segments;
    count.bytes += victim.bytes;
  }
  parts_.removal.FreeUnneeded(cause);
  return ended;
}

RemovalCause RoomMaker::CauseOf(const EvictionNode& victim, bool for_quota, const char* why) const {
  const auto info = parts_.tree.Info(victim.id);
  if (info.ok() && info->quarantined) return {GoneReason::kDamaged, info->quarantine};
  if (victim.useless) return {GoneReason::kExpired, ""};
  return {for_quota ? GoneReason::kEvictedQuota : GoneReason::kEvicted, why};
}

bool RoomMaker::Retained(const SegmentId& id) const {
  const auto record = parts_.tree.Record(id);
  const auto aliases = parts_.tree.AliasesInto(id);
  return (record.ok() && record->listed && record->pinned) ||
         std::any_of(aliases.begin(), aliases.end(), [](const auto& a) { return a.pinned; });
}

// Headroom is made only when puts came since the last time: an idle store keeps its data, even when
// others fill the disk.
Status RoomMaker::MakeHeadroom() {
  PREFIXD_ASSIGN(const CallLock evicting, CallLock::Take(eviction_mutex_));
  if (wanted_room_.empty()) return {};
  const auto wanted = std::exchange(wanted_room_, {});
  stuck_.clear();
  PREFIXD_ASSIGN(SpaceAccount::Headroom headroom, parts_.space.MissingHeadroom());
  if (!WhyFutile().empty()) headroom.disk = {};
  std::erase_if(headroom.tenants, [&](const auto& own) { return !wanted.contains(own.first); });
  const uint64_t total = std::max(headroom.store.missing, headroom.disk.missing);
  if (total == 0 && headroom.tenants.empty()) return {};
  EvictionPlan plan = NewPlan();
  const auto reach = [&plan](uint64_t bytes, uint64_t at_most, const std::string* tenant) {
    EvictionPlan further = plan;
    if (!further.Free(bytes, tenant) || further.freed() - plan.freed() > at_most) return;
    plan = std::move(further);
  };
  for (const auto& [tenant, own] : headroom.tenants) reach(own.missing, own.at_most, &tenant);
  const size_t for_quota = plan.victims().size();
  if (total > plan.freed()) {
    reach(total - plan.freed(), std::max(headroom.store.at_most, headroom.disk.at_most), nullptr);
  }
  const std::span<const EvictionNode> victims = plan.victims();
  PREFIXD_TRY(Evict(victims.first(std::min(victims.size(), kMaxSweptSegments)), for_quota,
                    "so that the next puts need not wait"));
  if (victims.size() > kMaxSweptSegments) {
    wanted_room_ = wanted;
  } else if (headroom.disk.missing > 0 && !victims.empty()) {
    PREFIXD_ASSIGN(const SpaceAccount::Headroom left, parts_.space.MissingHeadroom());
    NoteFreed(headroom.disk.missing, left.disk.missing);
  }
  return {};
}

std::vector<TenantUsage> RoomMaker::Tenants() const {
  std::vector<TenantUsage> tenants = parts_.space.Usage();
  std::lock_guard guard(count_mutex_);
  for (const auto& [name, count] : evicted_) {
    auto it = std::find_if(tenants.begin(), tenants.end(),
                           [&](const TenantUsage& t) { return t.tenant == name; });
    if (it == tenants.end()) {
      it = tenants.insert(it, TenantUsage{});
      it->tenant = name;
      it->quota_bytes = parts_.space.QuotaOf(name);
    }
    it->evictions = count.segments;
    it->evicted_bytes = count.bytes;
  }
  return tenants;
}

}  // namespace prefixd::storage
