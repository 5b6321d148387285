#include "storage/core/open_puts.h"

#include <algorithm>

#include "base/call_scope.h"

namespace prefixd::storage {
namespace {

constexpr uint32_t kAgainMs = 20;  // after which who does not wait may try again

}  // namespace

OpenPuts::Entry& OpenPuts::Entry::operator=(Entry&& other) noexcept {
  if (this != &other) {
    Leave();
    puts_ = std::exchange(other.puts_, nullptr);
    at_ = other.at_;
  }
  return *this;
}

void OpenPuts::Entry::Leave() {
  if (puts_ == nullptr) return;
  {
    std::lock_guard lock(puts_->mutex_);
    puts_->puts_.erase(at_);
    ++puts_->ended_;
  }
  puts_->changed_.notify_all();
  puts_ = nullptr;
}

uint64_t OpenPuts::ended() const {
  std::lock_guard lock(mutex_);
  return ended_;
}

// Hashes are chained: an equal hash means that all tokens up to it, model and tenant are equal.
bool OpenPuts::Stores(std::span<const BlockHash> hashes, size_t stored) const {
  return stored < hashes.size() && std::ranges::any_of(puts_, [&](const auto& put) {
           return stored < put.size() && put[stored] == hashes[stored];
         });
}

Result<std::optional<OpenPuts::Entry>> OpenPuts::Enter(std::span<const BlockHash> hashes,
                                                       size_t stored, uint64_t seen,
                                                       Clock::time_point until, bool alone) {
  std::unique_lock lock(mutex_);
  const bool waits = alone || until > Clock::now();
  if (waits) {
    const auto may_go = [&] { return ended_ != seen || !Stores(hashes, stored); };
    while (!changed_.wait_until(lock, std::min(until, Clock::now() + kCallSlice), may_go) &&
           Clock::now() < until) {
      PREFIXD_TRY(CheckCall());
    }
    if (ended_ != seen) return std::optional<Entry>();
    if (alone && Stores(hashes, stored)) {
      return Error{Code::kUnavailable,
                   "another put of these tokens is under way; wait for it (wait_ms), try again, or "
                   "store them a second time",
                   kAgainMs};
    }
  }
  Entry entry;
  entry.at_ = puts_.emplace(puts_.end(), hashes.begin(), hashes.end());
  entry.puts_ = this;
  return std::optional<Entry>(std::move(entry));
}

}  // namespace prefixd::storage
