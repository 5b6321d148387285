#include "client_lib/link.h"

#include <algorithm>
#include <thread>

#include "base/call_scope.h"

namespace prefixd {
namespace {

constexpr auto kFirstPause = std::chrono::milliseconds(5);
constexpr auto kLongestPause = std::chrono::milliseconds(100);

}  // namespace

Result<std::shared_ptr<Connection>> Link::Live() {
  std::lock_guard lock(mutex_);
  if (connection_ && connection_->alive()) return connection_;
  const auto now = Clock::now();
  if (connection_ && !away_since_) away_since_ = now;
  const auto until =
      away_since_ ? *away_since_ + std::chrono::milliseconds(options_.reconnect_ms) : now;
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    auto opened = Connection::Open(address_, options_);
    if (opened.ok()) {
      connection_ = *std::move(opened);
      away_since_.reset();
      return connection_;
    }
    // Any other refusal than silence would be repeated.
    if (opened.error().code != Code::kUnavailable || Clock::now() + pause > until) {
      return opened.error();
    }
    PREFIXD_TRY(CheckCall());
    std::this_thread::sleep_for(pause);
  }
}

Result<std::shared_ptr<Connection>> Link::Aside(bool shared_memory) {
  ConnectOptions options = options_;
  options.shared_memory = options_.shared_memory && shared_memory;
  auto opened = Connection::Open(address_, options);
  if (opened.ok() || opened.error().code != Code::kUnavailable || !reconnects()) return opened;
  PREFIXD_ASSIGN(const auto back, Live());
  return Connection::Open(address_, options);
}

bool Link::shared_memory() const {
  std::lock_guard lock(mutex_);
  return connection_ != nullptr && connection_->hello().region_bytes > 0;
}

}  // namespace prefixd
