// Counts what connections hold of something that the whole daemon has a bounded number of, by
// tenant: nobody takes the last quarter from the others.
//
// Thread-safety: all methods may be called concurrently. Outlives its slots.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "prefixd/result.h"

namespace prefixd::daemon {

class Slots {
 public:
  // `what` and `option` are for the sentence that refuses: "sessions", "limits.max_sessions".
  // kPart: the store itself refuses what is more than `most`, and only the tenant's part is bounded
  // here.
  enum class Bounds : uint8_t { kPartAndAll, kPart };
  Slots(uint64_t most, std::string what, std::string option, Bounds bounds = Bounds::kPartAndAll)
      : most_(most), what_(std::move(what)), option_(std::move(option)), bounds_(bounds) {}

  // Taken until it is destroyed. Move-only.
  class Slot {
   public:
    Slot() = default;
    Slot(Slot&& other) noexcept
        : slots_(std::exchange(other.slots_, nullptr)), tenant_(std::move(other.tenant_)) {}
    Slot& operator=(Slot&& other) noexcept {
      std::swap(slots_, other.slots_);
      std::swap(tenant_, other.tenant_);
      return *this;
    }
    ~Slot() {
      if (slots_ != nullptr) slots_->Give(tenant_);
    }

   private:
    friend class Slots;
    Slots* slots_ = nullptr;
    std::string tenant_;
  };

  // kResourceExhausted when there are as many as there may be, or the tenant has its part.
  Result<Slot> Take(const std::string& tenant) {
    Slot slot;
    slot.tenant_ = tenant;
    std::lock_guard lock(mutex_);
    uint64_t& held = of_tenant_[tenant];
    const uint64_t part = most_ - most_ / 4;
    const bool all = taken_ >= most_;
    if (all ? bounds_ == Bounds::kPartAndAll : held >= part) {
      const Error full{Code::kResourceExhausted,
                       (all ? "there are as many " + what_ + " as there may be"
                            : "tenant '" + tenant + "' has as many " + what_ + " as one may, " +
                                  std::to_string(part)) +
                           " (" + option_ + " = " + std::to_string(most_) + "); try again later",
                       500};
      if (held == 0) of_tenant_.erase(tenant);
      return full;
    }
    ++held;
    ++taken_;
    slot.slots_ = this;
    return slot;
  }

 private:
  void Give(const std::string& tenant) {
    std::lock_guard lock(mutex_);
    --taken_;
    const auto it = of_tenant_.find(tenant);
    if (--it->second == 0) of_tenant_.erase(it);
  }

  const uint64_t most_;
  const std::string what_, option_;
  const Bounds bounds_;
  std::mutex mutex_;
  uint64_t taken_ = 0;
  std::map<std::string, uint64_t> of_tenant_;
};

}  // namespace prefixd::daemon
