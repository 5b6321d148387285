// What a store does by itself every so often: named tasks with a period each, on one thread.
//
// Thread-safety: Stop may be called from any thread, and again.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "prefixd/result.h"

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
  ~Maintenance() { Stop(); }
  // Waits for the task under way, which is asked to stop.
  void Stop();

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    MaintenanceTask task;
    Clock::time_point due;
    std::string last_error;
  };
  void Loop(const std::stop_token& stop);
  static void Run(Entry& entry, const std::stop_token& stop);

  std::vector<Entry> entries_;
  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::jthread thread_;
};

}  // namespace prefixd
