#include "base/memory_budget.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace prefixd {
namespace {

// How soon a refused caller should try again: calls in flight have ended by then.
constexpr uint32_t kRetryAfterMs = 500;

constexpr std::array<std::string_view, kMemoryKinds> kMemoryKindNames = {
    "host_tier", "tables",      "sessions",      "own_tokens", "summaries", "indexes",
    "keys",      "shared_sets", "gathered_rows", "scratch",    "reads",     "puts",
    "ingest",    "messages",    "regions",       "catalog",    "reserve"};

std::string SizeText(uint64_t bytes) {
  return bytes < (10u << 20) ? std::to_string((bytes + 1023) >> 10) + " KiB"
                             : std::to_string(bytes >> 20) + " MiB";
}

}  // namespace

std::string_view MemoryKindName(MemoryKind kind) {
  return kMemoryKindNames[static_cast<size_t>(kind)];
}

// Charges keep it and the budget alive.
struct MemoryOwner {
  MemoryOwner(std::shared_ptr<MemoryBudget> of, std::string_view name, bool of_tenant)
      : budget(std::move(of)), tenant(name), bounded(of_tenant) {}

  const std::shared_ptr<MemoryBudget> budget;
  const std::string tenant;
  const bool bounded;  // by the share of a tenant
  std::atomic<uint64_t> bytes{0}, host_tier{0}, refused{0};
};

// ---- charges ------------------------------------------------------------------------------------

MemoryCharge& MemoryCharge::operator=(MemoryCharge&& other) noexcept {
  if (this == &other) return *this;
  Release();
  owner_ = std::move(other.owner_);
  kind_ = other.kind_;
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

Status MemoryCharge::Resize(uint64_t bytes) {
  if (!owner_) return {};
  if (bytes > bytes_) {
    PREFIXD_TRY(owner_->budget->AddBySqueezing(*owner_, kind_, bytes - bytes_));
    bytes_ = bytes;
  } else {
    Set(bytes);
  }
  return {};
}

bool MemoryCharge::TryResize(uint64_t bytes) {
  if (!owner_) return true;
  if (bytes > bytes_) {
    if (!owner_->budget->Add(*owner_, kind_, bytes - bytes_)) return false;
    bytes_ = bytes;
  } else {
    Set(bytes);
  }
  return true;
}

void MemoryCharge::Set(uint64_t bytes) {
  if (!owner_) return;
  if (bytes > bytes_) owner_->budget->AddAnyway(*owner_, kind_, bytes - bytes_);
  if (bytes < bytes_) owner_->budget->Subtract(*owner_, kind_, bytes_ - bytes);
  bytes_ = bytes;
}

void MemoryCharge::Release() {
  Set(0);
  owner_.reset();
}

// ---- accounts -----------------------------------------------------------------------------------

Result<MemoryCharge> MemoryAccount::Take(MemoryKind kind, uint64_t bytes) const {
  MemoryCharge charge(owner_, kind);
  PREFIXD_TRY(charge.Resize(bytes));
  return charge;
}

std::optional<MemoryCharge> MemoryAccount::TryTake(MemoryKind kind, uint64_t bytes) const {
  MemoryCharge charge(owner_, kind);
  if (!charge.TryResize(bytes)) return std::nullopt;
  return charge;
}

MemoryCharge MemoryAccount::Charge(MemoryKind kind, uint64_t bytes) const {
  MemoryCharge charge(owner_, kind);
  charge.Set(bytes);
  return charge;
}

// ---- the budget ---------------------------------------------------------------------------------

std::shared_ptr<MemoryBudget> MemoryBudget::Create(const Options& options) {
  return std::shared_ptr<MemoryBudget>(new MemoryBudget(options));
}

MemoryBudget::MemoryBudget(const Options& options)
    : options_(options),
      tenant_capacity_(static_cast<uint64_t>(double(options.capacity) * options.tenant_share)),
      used_(options.reserve) {
  kinds_[static_cast<size_t>(MemoryKind::kReserve)] = options.reserve;
}

MemoryAccount MemoryBudget::Shared() {
  return MemoryAccount(std::make_shared<MemoryOwner>(shared_from_this(), "", false));
}

MemoryAccount MemoryBudget::Of(std::string_view tenant) {
  std::lock_guard lock(owners_mutex_);
  std::erase_if(owners_, [](const auto& entry) { return entry.second.expired(); });
  if (const auto it = owners_.find(tenant); it != owners_.end()) {
    if (auto owner = it->second.lock()) return MemoryAccount(std::move(owner));
  }
  auto owner = std::make_shared<MemoryOwner>(shared_from_this(), tenant, true);
  owners_.insert_or_assign(std::string(tenant), owner);
  return MemoryAccount(std::move(owner));
}

bool MemoryBudget::Add(MemoryOwner& owner, MemoryKind kind, uint64_t bytes) {
  const auto reserve = [bytes](std::atomic<uint64_t>& used, uint64_t capacity) {
    uint64_t now = used.load(std::memory_order_relaxed);
    do {
      if (bytes > capacity || now > capacity - bytes) return false;
    } while (!used.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
    return true;
  };
  if (!reserve(used_, options_.capacity)) return false;
  const bool tier = kind == MemoryKind::kHostTier;
  if (!tier && owner.bounded && !reserve(owner.bytes, tenant_capacity_)) {
    used_.fetch_sub(bytes, std::memory_order_relaxed);
    return false;
  }
  if (tier) owner.host_tier.fetch_add(bytes, std::memory_order_relaxed);
  if (!tier && !owner.bounded) owner.bytes.fetch_add(bytes, std::memory_order_relaxed);
  kinds_[static_cast<size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
  return true;
}

void MemoryBudget::AddAnyway(MemoryOwner& owner, MemoryKind kind, uint64_t bytes) {
  used_.fetch_add(bytes, std::memory_order_relaxed);
  (kind == MemoryKind::kHostTier ? owner.host_tier : owner.bytes)
      .fetch_add(bytes, std::memory_order_relaxed);
  kinds_[static_cast<size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
}

void MemoryBudget::Subtract(MemoryOwner& owner, MemoryKind kind, uint64_t bytes) {
  const uint64_t before = used_.fetch_sub(bytes, std::memory_order_relaxed);
  PREFIXD_CHECK(before >= bytes, before, bytes);
  (kind == MemoryKind::kHostTier ? owner.host_tier : owner.bytes)
      .fetch_sub(bytes, std::memory_order_relaxed);
  kinds_[static_cast<size_t>(kind)].fetch_sub(bytes, std::memory_order_relaxed);
}

Status MemoryBudget::AddBySqueezing(MemoryOwner& owner, MemoryKind kind, uint64_t bytes) {
  while (!Add(owner, kind, bytes)) {
    if (!Squeeze(owner, kind, bytes)) return Refuse(owner, kind, bytes);
  }
  return {};
}

// Makes the first that can give back some. Where the tenant's own share is what is short, only its
// own memory helps.
bool MemoryBudget::Squeeze(MemoryOwner& owner, MemoryKind kind, uint64_t bytes) {
  const bool by_share = kind != MemoryKind::kHostTier && owner.bounded &&
                        owner.bytes.load(std::memory_order_relaxed) + bytes > tenant_capacity_;
  if (bytes > options_.capacity - options_.reserve) return false;
  if (by_share && bytes > tenant_capacity_) return false;
  std::lock_guard lock(squeeze_mutex_);
  return std::ranges::any_of(givers_, [&](const GiveBack& give_back) {
    return give_back(bytes, by_share ? &owner.tenant : nullptr);
  });
}

Error MemoryBudget::Refuse(MemoryOwner& owner, MemoryKind kind, uint64_t bytes) {
  refused_.fetch_add(1, std::memory_order_relaxed);
  owner.refused.fetch_add(1, std::memory_order_relaxed);
  const std::string what = SizeText(bytes) + " more for " + std::string(MemoryKindName(kind));
  const uint64_t free = options_.capacity - options_.reserve;
  if (bytes > free || (owner.bounded && bytes > tenant_capacity_)) {
    return {Code::kResourceExhausted,
            what + " are more than the memory budget has in all (store.memory_mib, " +
                SizeText(options_.capacity) + "); ask for less, or give the store more memory"};
  }
  const uint64_t held = owner.bytes.load(std::memory_order_relaxed);
  const std::string help =
      kind == MemoryKind::kCatalog ? "remove prefixes" : "detach sessions, or try again later";
  if (owner.bounded && held + bytes > tenant_capacity_) {
    return {Code::kResourceExhausted,
            "tenant '" + owner.tenant + "' holds " + SizeText(held) + " of memory, and " + what +
                " exceed its share of " + SizeText(tenant_capacity_) +
                " (store.tenant_memory_percent); " + help,
            kRetryAfterMs};
  }
  return {Code::kResourceExhausted,
          "the memory budget is used up: " + what + " do not fit beside " + SizeText(used()) +
              " of " + SizeText(options_.capacity) + " (store.memory_mib); try again later",
          kRetryAfterMs};
}

MemoryBudget::Giver MemoryBudget::OnShortage(GiveBack give_back) {
  std::lock_guard lock(squeeze_mutex_);
  Giver giver;
  giver.budget_ = shared_from_this();
  giver.at_ = givers_.insert(givers_.end(), std::move(give_back));
  return giver;
}

MemoryBudget::Giver& MemoryBudget::Giver::operator=(Giver&& other) noexcept {
  if (this == &other) return *this;
  Withdraw();
  budget_ = std::move(other.budget_);
  at_ = other.at_;
  return *this;
}

void MemoryBudget::Giver::Withdraw() {
  if (!budget_) return;
  {
    std::lock_guard lock(budget_->squeeze_mutex_);
    budget_->givers_.erase(at_);
  }
  budget_.reset();
}

std::vector<MemoryBudget::Tenant> MemoryBudget::tenants() const {
  std::vector<Tenant> out;
  std::lock_guard lock(owners_mutex_);
  for (const auto& [tenant, held] : owners_) {
    const auto owner = held.lock();
    if (!owner) continue;
    out.push_back({tenant, owner->bytes, owner->host_tier, owner->refused});
  }
  return out;
}

}  // namespace prefixd
