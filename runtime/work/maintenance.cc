#include "runtime/work/maintenance.h"

#include <algorithm>
#include <utility>

#include "base/capture_errors.h"
#include "storage/io/errors.h"

namespace prefixd {

std::vector<Maintenance::Entry> Maintenance::Entries(std::vector<MaintenanceTask> tasks) {
  const auto now = Clock::now();
  std::vector<Entry> entries;
  for (MaintenanceTask& task : tasks) {
    const auto due = now + task.period;
    entries.push_back({std::move(task), due, ""});
  }
  return entries;
}

Maintenance::Maintenance(std::vector<MaintenanceTask> tasks)
    : entries_(Entries(std::move(tasks))),
      worker_(WorkPriority::kBackground, [this] { return Take(); }) {}

Worker::Next Maintenance::Take() {
  const auto next = std::ranges::min_element(entries_, {}, &Entry::due);
  if (next == entries_.end()) return {};
  if (next->due > Clock::now()) return {{}, next->due};
  return {[&entry = *next](const std::stop_token& stop) {
    static_cast<void>(CaptureErrors([&]() -> Status {
      Run(entry, stop);
      return {};
    }));
    entry.due = Clock::now() + entry.task.period;
  }};
}

void Maintenance::Run(Entry& entry, const std::stop_token& stop) {
  const Status done = CaptureErrors([&] { return entry.task.run(stop); });
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
