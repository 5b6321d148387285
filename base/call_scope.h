// Ends calls that nobody waits for any more: a call runs under a deadline and a canceller, and all
// that it does asks CheckCall now and then, before each piece of work that takes long.
//
// The limits belong to the calling thread (CallScope), not to a parameter: what asks for them lies
// a dozen calls below what sets them, through rooms that know nothing of calls, and a hundred
// functions would pass a parameter on that they do not read. Threads that run a part of a call take
// its limits over (CarriedScope). Work of the background runs under none: no call waits for it.
//
// Thread-safety: a CallCanceller may be used from any thread; scopes belong to their thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>

#include "prefixd/result.h"

namespace prefixd {

// Ends the calls that run when Cancel is called; later ones are not concerned.
class CallCanceller {
 public:
  CallCanceller() = default;
  // Counts the value of `shared`, too, which another process may change to cancel; it must outlive
  // this object.
  explicit CallCanceller(uint32_t* shared) : shared_(shared) {}
  void Cancel() { count_.fetch_add(1, std::memory_order_release); }
  uint64_t count() const {
    const uint64_t own = count_.load(std::memory_order_acquire);
    if (shared_ == nullptr) return own;
    return own + std::atomic_ref<uint32_t>(*shared_).load(std::memory_order_acquire);
  }

 private:
  std::atomic<uint64_t> count_{0};
  uint32_t* const shared_ = nullptr;
};

// What a call keeps to. A plain value; what it points to must live as long as the call.
struct CallLimits {
  using Clock = std::chrono::steady_clock;

  Clock::time_point deadline = Clock::time_point::max();
  const CallCanceller* canceller = nullptr;
  uint64_t since = 0;                 // the canceller's count when the call began
  const CallLimits* outer = nullptr;  // of the call that this one is a part of

  // The limits of a call that begins now, as a part of the calling thread's. timeout_ms 0: none.
  static CallLimits Of(uint32_t timeout_ms, const CallCanceller* canceller);
  // kCancelled or kDeadlineExceeded when the call is to end.
  Status Check() const;
  // The earliest of all deadlines; max(): none.
  Clock::time_point Earliest() const;
};

// How long a wait may last before it asks whether its call is to end.
inline constexpr std::chrono::milliseconds kCallSlice{20};

// Runs what follows on this thread under the limits of a call; null: under none.
class CarriedScope {
 public:
  explicit CarriedScope(const CallLimits* limits) : before_(std::exchange(current_, limits)) {}
  ~CarriedScope() { current_ = before_; }
  CarriedScope(const CarriedScope&) = delete;
  CarriedScope& operator=(const CarriedScope&) = delete;

  static const CallLimits* Current() { return current_; }

 private:
  static inline thread_local constinit const CallLimits* current_ = nullptr;
  const CallLimits* const before_;
};

// Runs what follows on this thread as a call with these limits, and those that hold already.
class CallScope {
 public:
  explicit CallScope(CallLimits limits)
      : limits_{limits.deadline, limits.canceller, limits.since, CarriedScope::Current()},
        scope_(&limits_) {}

 private:
  const CallLimits limits_;
  const CarriedScope scope_;
};

// kCancelled or kDeadlineExceeded when this thread's call is to end. Costs next to nothing.
inline Status CheckCall() {
  const CallLimits* const limits = CarriedScope::Current();
  return limits == nullptr ? Status() : limits->Check();
}

// Whether a call failed because it was to end: it says nothing of what was asked.
inline bool EndedEarly(const Error& error) {
  return error.code == Code::kCancelled || error.code == Code::kDeadlineExceeded;
}

// Waits until ready() (under `lock`), or fails with CheckCall's error.
template <typename Ready>
Status AwaitInCall(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                   const Ready& ready) {
  if (CarriedScope::Current() == nullptr) {
    changed.wait(lock, ready);
    return {};
  }
  while (!changed.wait_for(lock, kCallSlice, ready)) PREFIXD_TRY(CheckCall());
  return {};
}

// A mutex that is held while something is loaded or asked: a call that waits for it can end.
class CallMutex {
 public:
  // CheckCall's error, and then not locked.
  Status Lock() {
    std::unique_lock lock(mutex_);
    PREFIXD_TRY(AwaitInCall(changed_, lock, [this] { return !locked_; }));
    locked_ = true;
    return {};
  }
  void Unlock() {
    std::lock_guard lock(mutex_);
    locked_ = false;
    changed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool locked_ = false;
};

// Holds a CallMutex.
class CallLock {
 public:
  static Result<CallLock> Take(CallMutex& mutex) {
    PREFIXD_TRY(mutex.Lock());
    return CallLock(mutex);
  }
  ~CallLock() {
    if (mutex_ != nullptr) mutex_->Unlock();
  }
  CallLock(CallLock&& other) noexcept : mutex_(std::exchange(other.mutex_, nullptr)) {}
  CallLock& operator=(CallLock&&) = delete;

 private:
  explicit CallLock(CallMutex& mutex) : mutex_(&mutex) {}
  CallMutex* mutex_;
};

}  // namespace prefixd
