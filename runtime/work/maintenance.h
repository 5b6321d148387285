// What a store does by itself every so often: named tasks with a period each, on one thread.
//
// Thread-safety: Stop may be called from any thread, and again.
#pragma once

#include <chrono>
#include <functional>
#include <stop_token>
#include <string>
#include <vector>

#include "prefixd/result.h"
#include "runtime/work/worker.h"

namespace prefixd {

struct MaintenanceTask {
  std::string name;  // for the log
  std::chrono::milliseconds period;
  // Does a bounded piece of work; long work looks at the token and ends soon when asked to stop.
  std::function<Status(const std::stop_token&)> run;
};

// Runs each task when its period has passed since it last ended (first after one period). A task
// that fails is logged when its error changes, not every time, and runs again like the others.
class Maintenance {
 public:
  explicit Maintenance(std::vector<MaintenanceTask> tasks);
  // Waits for the task under way, which is asked to stop.
  void Stop() { worker_.Stop(); }

 private:
  using Clock = Worker::Clock;
  struct Entry {
    MaintenanceTask task;
    Clock::time_point due;
    std::string last_error;
  };
  static std::vector<Entry> Entries(std::vector<MaintenanceTask> tasks);
  Worker::Next Take();
  static void Run(Entry& entry, const std::stop_token& stop);

  std::vector<Entry> entries_;  // used by the worker alone
  Worker worker_;
};

}  // namespace prefixd
