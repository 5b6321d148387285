// Runs a store's recurring work: named tasks with a period each, on one thread.
//
// Thread-safety: Stop may be called from any thread, more than once.
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
  // Does a bounded piece of work; long work checks the token and ends soon after a stop request.
  std::function<Status(const std::stop_token&)> run;
};

// Runs each task when its period has passed since it last ended (first after one period). A failing
// task runs again like the others; its error is logged when it changes, not every time.
class Maintenance {
 public:
  explicit Maintenance(std::vector<MaintenanceTask> tasks);
  // Requests a stop, and waits for the running task.
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
