// Holds background work back while other threads want the cores.
//
// A low priority does not do that everywhere. Where the kernel schedules by session or control
// group first (autogroups, services of systemd), a daemon whose background is all that runs has as
// much weight as an engine, whatever the priorities inside; and an engine whose threads wait for
// one another at barriers is as slow as the slowest. So a thread of background work looks how long
// it has waited for a core, which is how long others had it, and sleeps in proportion if these were
// other programs: inside one the priority is enough.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace prefixd {

// What the scheduler says of the calling thread: how long it ran, and how long it was runnable and
// waited for a core. Zeros where the kernel does not tell.
struct SchedTimes {
  uint64_t ran_ns = 0, waited_ns = 0;
  static SchedTimes OfThisThread();
};

// What all cores of the machine and this process have worked so far.
struct CoreTimes {
  uint64_t machine_ns = 0;  // 0: the kernel does not tell
  uint64_t process_ns = 0;
  static CoreTimes Now();
};

class BackgroundPace {
 public:
  // busy_percent: the share of a core that all background work together takes at most where others
  // want the cores; 100: nothing is held back. threads: how many may work at a time.
  BackgroundPace(uint32_t busy_percent, uint32_t threads)
      : busy_percent_(busy_percent), threads_(threads) {}
  BackgroundPace(const BackgroundPace&) = delete;
  BackgroundPace& operator=(const BackgroundPace&) = delete;

  // Call on a thread of background work between two pieces of it, as often as one likes; returns at
  // once on idle cores, while somebody hurries it, and after Stop.
  void Rest();

  // While one lives, background work goes as fast as it can, because somebody waits for it.
  class Hurry {
   public:
    explicit Hurry(BackgroundPace* pace) : pace_(pace) {  // null: none
      if (pace_) pace_->AddHurry(1);
    }
    ~Hurry() {
      if (pace_) pace_->AddHurry(-1);
    }
    Hurry(const Hurry&) = delete;
    Hurry& operator=(const Hurry&) = delete;

   private:
    BackgroundPace* const pace_;
  };

  // Ends all rests, for good.
  void Stop() { AddHurry(1); }

  // Returns how long one of the threads rests that has run and waited for a core for so long,
  // beside other programs.
  uint64_t RestAfter(const SchedTimes& times) const;

 private:
  void AddHurry(int n);

  // Whether other programs use the cores, of late. mutex_ is held.
  bool OthersWork();

  const uint32_t busy_percent_, threads_;
  std::condition_variable hurried_;
  std::mutex mutex_;
  // mutex_ guards these.
  int hurries_ = 0;
  std::chrono::steady_clock::time_point looked_{};
  CoreTimes at_look_;
  bool others_work_ = false;
};

}  // namespace prefixd
