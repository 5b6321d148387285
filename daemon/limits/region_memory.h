// Takes the memory of shared regions and rings. Together they take a quarter of the budget at most,
// so that clients which only hold one keep no calls from theirs, and a tenant's three quarters of
// that, so that clients of others get theirs.
//
// Thread-safety: all methods may be called concurrently. Outlives what is taken.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/memory_budget.h"

namespace prefixd::daemon {

class RegionMemory {
 public:
  // Held until it is destroyed or released. Move-only.
  class Taken {
   public:
    Taken() = default;
    Taken(Taken&& other) noexcept { *this = std::move(other); }
    Taken& operator=(Taken&& other) noexcept {
      std::swap(charge_, other.charge_);
      std::swap(from_, other.from_);
      std::swap(tenant_, other.tenant_);
      return *this;
    }
    ~Taken() { Release(); }
    void Release() {
      if (auto* const from = std::exchange(from_, nullptr)) from->Give(tenant_, charge_.bytes());
      charge_.Release();
    }

   private:
    friend class RegionMemory;
    MemoryCharge charge_;
    RegionMemory* from_ = nullptr;
    std::string tenant_;
  };

  // Null: there is no budget.
  explicit RegionMemory(std::shared_ptr<MemoryBudget> budget) : budget_(std::move(budget)) {}

  // False: there is no room, or the tenant has its part.
  bool TryTake(const std::string& tenant, uint64_t bytes, Taken* out) {
    if (!budget_) return true;
    Taken taken;
    taken.tenant_ = tenant;
    const uint64_t most = budget_->capacity() / 4;
    std::lock_guard lock(mutex_);
    if (budget_->used(MemoryKind::kRegions) + bytes > most) return false;
    const auto held = of_tenant_.try_emplace(tenant).first;
    auto charge = held->second + bytes <= most - most / 4
                      ? budget_->Of(tenant).TryTake(MemoryKind::kRegions, bytes)
                      : std::nullopt;
    if (!charge) {
      if (held->second == 0) of_tenant_.erase(held);
      return false;
    }
    held->second += bytes;
    taken.charge_ = *std::move(charge);
    taken.from_ = this;
    *out = std::move(taken);
    return true;
  }

 private:
  void Give(const std::string& tenant, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    const auto held = of_tenant_.find(tenant);
    if ((held->second -= bytes) == 0) of_tenant_.erase(held);
  }

  const std::shared_ptr<MemoryBudget> budget_;
  std::mutex mutex_;
  std::map<std::string, uint64_t> of_tenant_;
};

}  // namespace prefixd::daemon
