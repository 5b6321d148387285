#include "storage/files/space.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "storage/io/file.h"

namespace prefixd::storage {
namespace {

constexpr uint64_t kHeadroomParts = 32;

uint64_t Excess(uint64_t needed, uint64_t limit) { return needed > limit ? needed - limit : 0; }

}  // namespace

SpaceReservation& SpaceReservation::operator=(SpaceReservation&& other) noexcept {
  if (this != &other) {
    Release();
    account_ = std::exchange(other.account_, nullptr);
    tenant_ = std::move(other.tenant_);
    bytes_ = other.bytes_;
    allocated_ = other.allocated_;
  }
  return *this;
}

void SpaceReservation::Allocated() {
  if (account_ == nullptr || allocated_) return;
  std::lock_guard lock(account_->mutex_);
  PREFIXD_CHECK(account_->unallocated_ >= bytes_, account_->unallocated_, bytes_);
  account_->unallocated_ -= bytes_;
  allocated_ = true;
}

void SpaceReservation::Release() {
  if (account_ == nullptr) return;
  Allocated();
  std::lock_guard lock(account_->mutex_);
  account_->reserved_.Subtract(tenant_, bytes_);
  account_ = nullptr;
}

void SpaceReservation::Settle(const std::function<void()>& count) {
  if (account_ == nullptr) return count();
  Allocated();
  std::lock_guard lock(account_->mutex_);
  count();
  account_->reserved_.Subtract(tenant_, bytes_);
  account_ = nullptr;
}

void SpaceReservation::Keep() {
  Allocated();
  account_ = nullptr;
}

uint64_t SpaceAccount::QuotaOf(const std::string& tenant) const {
  const auto own = options_.tenant_quotas.find(tenant);
  return own == options_.tenant_quotas.end() ? options_.tenant_quota_bytes : own->second;
}

TenantBytes SpaceAccount::Taken() const {
  TenantBytes taken = reserved_;
  for (const auto& usage : {tree_.Usage(), blobs_.Usage()}) {
    for (const auto& [tenant, bytes] : usage.by_tenant()) taken.Add(tenant, bytes);
  }
  return taken;
}

Result<uint64_t> SpaceAccount::FreeForPuts() const {
  PREFIXD_ASSIGN(const uint64_t free, FreeBytes(options_.dir));
  return Excess(free, options_.min_free_bytes + ballast_.missing_bytes() + unallocated_);
}

Result<SpaceShortage> SpaceAccount::TryReserve(const std::string& tenant, uint64_t bytes,
                                               SpaceReservation* out) {
  std::lock_guard lock(mutex_);
  SpaceShortage shortage;
  PREFIXD_ASSIGN(const uint64_t free, FreeForPuts());
  shortage.disk = Excess(bytes, free);
  const TenantBytes taken = Taken();
  if (options_.quota_bytes > 0) {
    shortage.store = Excess(taken.total() + bytes, options_.quota_bytes);
  }
  if (const uint64_t quota = QuotaOf(tenant); quota > 0) {
    shortage.tenant = Excess(taken.of(tenant) + bytes, quota);
  }
  if (shortage.any()) return shortage;
  reserved_.Add(tenant, bytes);
  unallocated_ += bytes;
  out->account_ = this;
  out->tenant_ = tenant;
  out->bytes_ = bytes;
  out->allocated_ = false;
  return shortage;
}

Error SpaceAccount::Refusal(const std::string& tenant, uint64_t bytes,
                            const SpaceShortage& shortage) const {
  const auto n = [](uint64_t x) { return std::to_string(x); };
  const std::string what_is_left = options_.eviction == Eviction::kByScore
                                       ? "what may be evicted (not pinned, not open) is too "
                                         "little: unpin or remove prefixes"
                                       : "nothing is evicted here: remove prefixes";
  std::lock_guard lock(mutex_);
  const TenantBytes taken = Taken();
  std::string text;
  if (shortage.tenant > 0) {
    text = "the quota of tenant '" + tenant + "', " + n(QuotaOf(tenant)) +
           " bytes, is used up: " + n(taken.of(tenant)) + " are taken and " + n(bytes) +
           " are needed; " + what_is_left + " of this tenant, or raise its quota";
  } else if (shortage.store > 0) {
    text = "the store's quota of " + n(options_.quota_bytes) +
           " bytes is used up: " + n(taken.total()) + " are taken, " + n(taken.of(tenant)) +
           " of them by tenant '" + tenant + "', and " + n(bytes) + " are needed; " + what_is_left +
           ", or raise the quota";
  } else {
    const auto free = FreeBytes(options_.dir);
    text = "the disk is too full: " + (free.ok() ? n(*free) : "an unknown number of") +
           " bytes are free, " + n(options_.min_free_bytes + ballast_.missing_bytes()) +
           " must stay free and " + n(bytes) + " are needed for tenant '" + tenant + "'; " +
           what_is_left + ", or free space on the disk";
  }
  return {Code::kResourceExhausted, std::move(text)};
}

Result<SpaceAccount::Headroom> SpaceAccount::MissingHeadroom() const {
  std::lock_guard lock(mutex_);
  Headroom headroom;
  const TenantBytes taken = Taken();
  const auto of_quota = [](uint64_t used, uint64_t quota) {
    const uint64_t ready = quota / kHeadroomParts;
    if (quota == 0) return Headroom::Part{};
    return Headroom::Part{Excess(used + ready, quota), Excess(used, quota) + 2 * ready};
  };
  PREFIXD_ASSIGN(const uint64_t free, FreeForPuts());
  headroom.store = of_quota(taken.total(), options_.quota_bytes);
  const uint64_t ready = taken.total() / kHeadroomParts;
  headroom.disk = {Excess(ready, free), 2 * ready};
  for (const auto& [tenant, bytes] : taken.by_tenant()) {
    const Headroom::Part own = of_quota(bytes, QuotaOf(tenant));
    if (own.missing > 0) headroom.tenants[tenant] = own;
  }
  return headroom;
}

std::vector<TenantUsage> SpaceAccount::Usage() const {
  std::lock_guard lock(mutex_);
  const TenantBytes taken = Taken();
  std::map<std::string, TenantUsage> by_tenant;
  for (const auto& [tenant, quota] : options_.tenant_quotas) by_tenant[tenant];
  for (const auto& [tenant, bytes] : taken.by_tenant()) {
    TenantUsage& usage = by_tenant[tenant];
    usage.reserved_bytes = reserved_.of(tenant);
    usage.bytes = bytes - usage.reserved_bytes;
  }
  std::vector<TenantUsage> out;
  for (auto& [tenant, usage] : by_tenant) {
    usage.tenant = tenant;
    usage.quota_bytes = QuotaOf(tenant);
    out.push_back(std::move(usage));
  }
  return out;
}

}  // namespace prefixd::storage
