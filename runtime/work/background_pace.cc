#include "runtime/work/background_pace.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "storage/io/file.h"

namespace prefixd {
namespace {

// A thread's own file of /proc, kept open: a look at it takes about two microseconds.
class SchedFile {
 public:
  SchedTimes Read() const {
    char text[96];
    const ssize_t n = ::pread(fd_.get(), text, sizeof text, 0);
    SchedTimes times;
    if (n <= 0) return times;
    const auto ran = std::from_chars(text, text + n, times.ran_ns);
    if (ran.ec != std::errc() || ran.ptr == text + n) return {};
    const auto waited = std::from_chars(ran.ptr + 1, text + n, times.waited_ns);
    return waited.ec == std::errc() ? times : SchedTimes{};
  }

 private:
  const storage::UniqueFd fd_{::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)};
};

// What a thread knew at its last look.
struct LastLook {
  std::chrono::steady_clock::time_point at{};
  SchedTimes times;
};
thread_local LastLook last_look;

// Others' turns are a few milliseconds long: shorter pieces say nothing.
constexpr std::chrono::milliseconds kLookEvery{4};
// The machine counts in hundredths of a second. Others count if they work for a quarter of one
// core's time.
constexpr std::chrono::milliseconds kOthersOver{100};
constexpr int64_t kOthersPart = 4;
// A thread that waited very long says more of the scheduler than of who works now.
constexpr std::chrono::seconds kLongestRest{5};

}  // namespace

SchedTimes SchedTimes::OfThisThread() {
  thread_local const SchedFile file;
  return file.Read();
}

CoreTimes CoreTimes::Now() {
  CoreTimes times;
  timespec own{};
  if (::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own) == 0) {
    times.process_ns =
        static_cast<uint64_t>(own.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(own.tv_nsec);
  }
  // "cpu  user nice system idle iowait irq softirq ..." in ticks
  std::ifstream stat("/proc/stat");
  std::string cpu;
  uint64_t user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0;
  const long ticks = ::sysconf(_SC_CLK_TCK);
  if (ticks > 0 && stat >> cpu >> user >> nice >> system >> idle >> iowait >> irq >> softirq) {
    times.machine_ns =
        (user + nice + system + irq + softirq) * (1'000'000'000 / static_cast<uint64_t>(ticks));
  }
  return times;
}

uint64_t BackgroundPace::RestAfter(const SchedTimes& times) const {
  if (busy_percent_ >= 100) return 0;
  // On idle cores a thread waits now and then for one that wakes: that is not held against anybody.
  const uint64_t shared = std::min(times.ran_ns, times.waited_ns);
  if (shared < times.ran_ns / 16) return 0;
  const uint64_t rest = shared * threads_ * (100 - busy_percent_) / busy_percent_;
  return std::min<uint64_t>(rest, std::chrono::nanoseconds(kLongestRest).count());
}

void BackgroundPace::Rest() {
  const auto now = std::chrono::steady_clock::now();
  if (now - last_look.at < kLookEvery) return;
  const SchedTimes times = SchedTimes::OfThisThread();
  const LastLook before = std::exchange(last_look, {now, times});
  if (before.at == std::chrono::steady_clock::time_point{}) return;  // the thread's first look
  const uint64_t rest =
      RestAfter({times.ran_ns - before.times.ran_ns, times.waited_ns - before.times.waited_ns});
  if (rest == 0) return;
  const auto end = now + std::chrono::nanoseconds(rest);
  std::unique_lock lock(mutex_);
  // Cores that fall idle end a rest: an engine pauses between two requests.
  for (auto at = now; hurries_ == 0 && at < end && OthersWork();
       at = std::chrono::steady_clock::now()) {
    hurried_.wait_until(lock, std::min(end, at + kOthersOver));
  }
  lock.unlock();
  last_look = {std::chrono::steady_clock::now(), SchedTimes::OfThisThread()};
}

bool BackgroundPace::OthersWork() {
  const auto now = std::chrono::steady_clock::now();
  const auto since = now - looked_;
  if (since < kOthersOver) return others_work_;
  const CoreTimes times = CoreTimes::Now(), before = std::exchange(at_look_, times);
  looked_ = now;
  if (times.machine_ns == 0) return others_work_ = true;
  // What was long ago says nothing of now.
  if (since > 10 * kOthersOver) return others_work_ = false;
  const auto own = static_cast<int64_t>(times.process_ns - before.process_ns);
  const auto all = static_cast<int64_t>(times.machine_ns - before.machine_ns);
  return others_work_ = all - own > std::chrono::nanoseconds(since).count() / kOthersPart;
}

void BackgroundPace::AddHurry(int n) {
  std::lock_guard lock(mutex_);
  hurries_ += n;
  hurried_.notify_all();
}

}  // namespace prefixd
