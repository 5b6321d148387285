#include "runtime/work/scrubber.h"

#include <algorithm>
#include <chrono>
#include <string>

#include "base/capture_errors.h"
#include "storage/io/errors.h"

namespace prefixd {
namespace {

// Clocks jump, and segments come and go: these bound the pause between two looks at what is due.
constexpr std::chrono::minutes kLongestPause(60), kShortestPause(1);

int64_t NowUnixMs() {
  using std::chrono::duration_cast, std::chrono::milliseconds, std::chrono::system_clock;
  return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

}  // namespace

Scrubber::Scrubber(storage::PrefixStore* storage, uint64_t bytes_per_second,
                   uint32_t interval_hours)
    : storage_(storage),
      options_(Options(bytes_per_second, interval_hours)),
      worker_(WorkPriority::kStep, [this] { return Take(); }) {}

storage::ScrubOptions Scrubber::Options(uint64_t bytes_per_second, uint32_t interval_hours) {
  storage::ScrubOptions options;
  options.bytes_per_second = bytes_per_second;
  options.interval_ms = int64_t{interval_hours} * 3600'000;
  options.wait = [this](std::chrono::nanoseconds pause) { return worker_.Sleep(pause); };
  return options;
}

Worker::Next Scrubber::Take() {
  if (!ends_checked_) {
    return {[this](const std::stop_token& stop) {
      CheckEnds(stop);
      ends_checked_ = true;
    }};
  }
  if (options_.bytes_per_second == 0) return {};
  if (due_ > Worker::Clock::now()) return {{}, due_};
  return {[this](const std::stop_token&) { Scrub(); }};
}

void Scrubber::CheckEnds(const std::stop_token& stop) {
  const Status done =
      CaptureErrors([&] { return storage_->CheckEnds([&] { return !stop.stop_requested(); }); });
  if (done.ok() || done.error().code == Code::kCancelled) return;
  storage::LogWarning("the check of segments behind the start: " + done.error().message);
}

void Scrubber::Scrub() {
  std::chrono::nanoseconds pause = kShortestPause;
  // A failed round is tried again. Storage logs damage where it finds it; this logs the errors that
  // end a round.
  const Status done = CaptureErrors([&]() -> Status {
    PREFIXD_ASSIGN(const int64_t due, storage_->Scrub(options_));
    pause = std::clamp<std::chrono::nanoseconds>(std::chrono::milliseconds(due - NowUnixMs()),
                                                 kShortestPause, kLongestPause);
    return {};
  });
  due_ = Worker::Clock::now() + pause;
  if (!done.ok() && done.error().code == Code::kCancelled) return;
  const std::string failure = done.ok() ? "" : done.error().message;
  if (!failure.empty() && failure != failure_) {
    storage::LogWarning("scrub: " + failure + "; tried again every minute");
  }
  failure_ = failure;
}

}  // namespace prefixd
