#include "runtime/work/warm_up.h"

#include <chrono>
#include <string>
#include <utility>

#include "base/capture_errors.h"
#include "storage/io/errors.h"

namespace prefixd {

WarmUp::WarmUp(storage::PrefixStore& storage, BackgroundPace& pace)
    : storage_(storage), pace_(pace), worker_(WorkPriority::kBackground, [this]() -> Worker::Next {
        if (std::exchange(begun_, true)) return {};
        return {[this](const std::stop_token&) { Run(); }};
      }) {}

void WarmUp::Stop() {
  stop_ = true;
  worker_.Stop();
}

void WarmUp::Run() {
  const auto begun = std::chrono::steady_clock::now();
  const Status ended = CaptureErrors([&]() -> Status {
    PREFIXD_ASSIGN(const storage::WarmedUp warmed,
                   storage_.WarmUp({.stop = &stop_, .rest = [this] { pace_.Rest(); }}));
    if (warmed.bytes == 0) return {};
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - begun);
    storage::LogInfo("host tier: " + std::to_string(warmed.bytes >> 20) + " MiB of " +
                     std::to_string(warmed.prefixes) + " prefixes used last read in " +
                     std::to_string(took.count()) + " ms");
    return {};
  });
  if (ended.ok() || ended.error().code == Code::kCancelled) return;
  storage::LogWarning("reading what was used last into the host tier: " + ended.error().message);
}

}  // namespace prefixd
