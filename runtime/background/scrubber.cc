#include "runtime/background/scrubber.h"

#include <algorithm>
#include <chrono>
#include <string>

#include "base/caught.h"
#include "storage/io/errors.h"

namespace prefixd {
namespace {

// Clocks jump and segments come and go: look again at least this often, and not more often.
constexpr std::chrono::minutes kLongestPause(60), kShortestPause(1);

int64_t NowUnixMs() {
  using std::chrono::duration_cast, std::chrono::milliseconds, std::chrono::system_clock;
  return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

}  // namespace

Scrubber::Scrubber(storage::PrefixStore* storage, uint64_t bytes_per_second,
                   uint32_t interval_hours)
    : storage_(storage) {
  if (bytes_per_second == 0) return;
  storage::ScrubOptions options;
  options.bytes_per_second = bytes_per_second;
  options.interval_ms = int64_t{interval_hours} * 3600'000;
  options.wait = [this](std::chrono::nanoseconds pause) { return Wait(pause); };
  thread_ = std::thread([this, options] { Loop(options); });
}

void Scrubber::Loop(const storage::ScrubOptions& options) {
  std::chrono::nanoseconds pause{0};
  std::string said;  // of the failure that lasts
  while (Wait(pause)) {
    pause = kShortestPause;
    // What fails is tried again. Damage is said in the log where it is found; here, what ends a
    // round.
    const Status done = Caught([&]() -> Status {
      PREFIXD_ASSIGN(const int64_t due, storage_->Scrub(options));
      pause = std::clamp<std::chrono::nanoseconds>(std::chrono::milliseconds(due - NowUnixMs()),
                                                   kShortestPause, kLongestPause);
      return {};
    });
    if (!done.ok() && done.error().code == Code::kCancelled) continue;
    const std::string failure = done.ok() ? "" : done.error().message;
    if (!failure.empty() && failure != said) {
      storage::LogWarning("scrub: " + failure + "; tried again every minute");
    }
    said = failure;
  }
}

bool Scrubber::Wait(std::chrono::nanoseconds pause) {
  std::unique_lock lock(mutex_);
  stop_.wait_for(lock, pause, [this] { return stopping_; });
  return !stopping_;
}

void Scrubber::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace prefixd
