#include "client_lib/link.h"

#include <algorithm>
#include <thread>

#include "base/call_scope.h"

namespace prefixd {
namespace {

constexpr auto kFirstPause = std::chrono::milliseconds(5);
constexpr auto kLongestPause = std::chrono::milliseconds(100);

}  // namespace

Result<std::shared_ptr<Connection>> Link::Live(bool look) {
  PREFIXD_TRY(CheckProcess());  // before a lock that the parent may have held
  const auto asked = Clock::now();
  PREFIXD_ASSIGN(const CallLock lock, CallLock::Take(mutex_));
  if (connection_ && look) connection_->NoticeEnd();
  if (connection_ && connection_->alive()) {
    away_since_.reset();
    return connection_;
  }
  // Threads that miss a silent daemon would else wait for it one after another.
  if (failure_ && failure_->when >= asked) return failure_->error;
  if (connection_ && !away_since_) away_since_ = Clock::now();
  auto opened = OpenUntil(options_, connection_ ? PatientUntil() : Clock::now());
  Found(opened);
  // A call whose own time ran out says nothing for those that wait.
  failure_.reset();
  if (!opened.ok() && CheckCall().ok()) failure_ = {opened.error(), Clock::now()};
  PREFIXD_ASSIGN(connection_, std::move(opened));
  return connection_;
}

Result<std::shared_ptr<Connection>> Link::Aside(bool shared_memory) {
  PREFIXD_TRY(CheckProcess());
  ConnectOptions options = options_;
  options.shared_memory = options_.shared_memory && shared_memory;
  // The connection of Live may not know yet that the daemon went away, and is not asked.
  Clock::time_point until;
  {
    PREFIXD_ASSIGN(const CallLock lock, CallLock::Take(mutex_));
    until = PatientUntil();
  }
  auto opened = OpenUntil(options, until);
  PREFIXD_ASSIGN(const CallLock lock, CallLock::Take(mutex_));
  Found(opened);
  return opened;
}

Link::Clock::time_point Link::PatientUntil() const {
  return away_since_.value_or(Clock::now()) + std::chrono::milliseconds(options_.reconnect_ms);
}

void Link::Found(const Result<std::shared_ptr<Connection>>& opened) {
  const bool answered =
      opened.ok() || (opened.error().code != Code::kUnavailable && !EndedEarly(opened.error()));
  if (answered) away_since_.reset();
}

Result<std::shared_ptr<Connection>> Link::OpenUntil(const ConnectOptions& options,
                                                    Clock::time_point until) const {
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    auto opened = Connection::Open(address_, options);
    // Any other refusal than silence would be repeated.
    if (opened.ok() || opened.error().code != Code::kUnavailable || Clock::now() + pause > until) {
      return opened;
    }
    PREFIXD_TRY(CheckCall());
    std::this_thread::sleep_for(pause);
  }
}

bool Link::shared_memory() const {
  const CarriedScope whole(nullptr);  // it waits without end, and cannot fail
  const auto lock = CallLock::Take(mutex_);
  return connection_ != nullptr && connection_->hello().region_bytes > 0;
}

}  // namespace prefixd
