#include "storage/io/io_batch.h"

#include <utility>

#include "base/check.h"

namespace prefixd::storage {

void IoBatch::Wait() {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return pending_ == 0; });
}

bool IoBatch::WaitUntil(Clock::time_point t) {
  std::unique_lock lock(mutex_);
  const auto done = [this] { return pending_ == 0; };
  if (t != Clock::time_point::max()) return done_.wait_until(lock, t, done);
  done_.wait(lock, done);
  return true;
}

void IoBatch::Add(size_t n) {
  std::lock_guard lock(mutex_);
  pending_ += n;
}

void IoBatch::Complete(size_t n) {
  // `owner` outlives the lock: it may hold the last reference to this batch.
  std::shared_ptr<const void> owner;
  // The waiter is notified under the lock: it may destroy the batch as soon as it gets the lock.
  std::lock_guard lock(mutex_);
  PREFIXD_CHECK(n <= pending_, n, pending_);
  pending_ -= n;
  if (pending_ > 0) return;
  owner = std::move(owner_);
  done_.notify_all();
}

bool IoBatch::EndsWith(size_t n) const {
  std::lock_guard lock(mutex_);
  return pending_ == n;
}

void IoBatch::Own(std::shared_ptr<const void> owner) {
  std::lock_guard lock(mutex_);
  owner_ = std::move(owner);
  ++pending_;
}

bool IoBatch::owned() const {
  std::lock_guard lock(mutex_);
  return owner_ != nullptr;
}

}  // namespace prefixd::storage
