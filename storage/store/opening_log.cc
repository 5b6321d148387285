#include "storage/store/opening_log.h"

#include <string>
#include <utility>

namespace prefixd::storage {

using Clock = std::chrono::steady_clock;

OpeningLog::OpeningLog(std::chrono::milliseconds pause, Say say)
    : pause_(pause), say_(std::move(say)), next_(Clock::now() + pause_) {}

void OpeningLog::Note(uint64_t done, uint64_t total, std::string_view what) {
  const Clock::time_point now = Clock::now();
  Clock::time_point due = next_.load(std::memory_order_relaxed);
  // Of several threads one says it.
  if (now < due || !next_.compare_exchange_strong(due, now + pause_)) return;
  say_("opening the store: " + std::to_string(done) + " of " + std::to_string(total) + " " +
       std::string(what));
}

}  // namespace prefixd::storage
