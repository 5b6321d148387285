#include "runtime/background/maintenance.h"

#include <algorithm>
#include <utility>

#include "base/caught.h"
#include "storage/io/errors.h"

namespace prefixd {

Maintenance::Maintenance(std::vector<MaintenanceTask> tasks) {
  const auto now = Clock::now();
  for (MaintenanceTask& task : tasks) {
    const auto due = now + task.period;
    entries_.push_back({std::move(task), due, ""});
  }
  if (entries_.empty()) return;
  thread_ = std::jthread([this](const std::stop_token& stop) { Loop(stop); });
}

void Maintenance::Stop() {
  thread_.request_stop();
  if (thread_.joinable()) thread_.join();
}

void Maintenance::Loop(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    Entry& next = *std::min_element(entries_.begin(), entries_.end(),
                                    [](const auto& a, const auto& b) { return a.due < b.due; });
    {
      std::unique_lock lock(mutex_);
      wake_.wait_until(lock, stop, next.due, [] { return false; });  // until due, or stopped
    }
    if (stop.stop_requested()) return;
    Run(next, stop);
    next.due = Clock::now() + next.task.period;
  }
}

void Maintenance::Run(Entry& entry, const std::stop_token& stop) {
  const Status done = Caught([&] { return entry.task.run(stop); });
  if (done.ok() && !entry.last_error.empty()) {
    storage::LogInfo("maintenance: " + entry.task.name + " works again");
  }
  const std::string error = done.ok() ? "" : done.error().message;
  const bool stopped = !done.ok() && done.error().code == Code::kCancelled;
  if (!error.empty() && !stopped && error != entry.last_error) {
    storage::LogWarning("maintenance: " + entry.task.name + ": " + error);
  }
  entry.last_error = error;
}

}  // namespace prefixd
