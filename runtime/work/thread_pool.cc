#include "runtime/work/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>

#include "base/call_scope.h"
#include "base/capture_errors.h"

namespace prefixd {

struct ThreadPool::Job {
  const std::function<Status(size_t)>* body = nullptr;
  size_t n = 0;
  WorkPriority priority = WorkPriority::kStep;
  const CallLimits* limits = nullptr;  // of the caller, who waits
  // The pool's mutex guards all of these; `finished` may be read without it.
  size_t next = 0;
  std::atomic<size_t> finished{0};
  Status status;
  std::condition_variable done;
};

void YieldToOthers() {
  // Linux keeps a nice value per thread. A thread that may not set it works all the same.
  static_cast<void>(::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19));
}

namespace {

// Runs an item, unless its call is to end.
template <typename Item>
Status InCall(const Item& item) {
  PREFIXD_TRY(CheckCall());
  return CaptureErrors(item);
}

// Spins until `done` or for a little while: the other threads' last pieces mostly end soon after
// the caller's own, and sleeping and waking takes longer.
template <typename Done>
void WaitAwake(const Done& done) {
  constexpr auto kWhile = std::chrono::microseconds(100);
  const auto end = std::chrono::steady_clock::now() + kWhile;
  while (!done() && std::chrono::steady_clock::now() < end) {
#if defined(__SSE2__)
    for (int i = 0; i < 16; ++i) _mm_pause();
#else
    std::this_thread::yield();
#endif
  }
}

}  // namespace

ThreadPool::ThreadPool(uint32_t threads) {
  if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
  for (uint32_t i = 1; i < threads; ++i) {
    workers_.emplace_back([this] { WorkerLoop(WorkPriority::kStep); });
    background_.emplace_back([this] { WorkerLoop(WorkPriority::kBackground); });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (std::condition_variable& work : work_) work.notify_all();
  for (auto* workers : {&workers_, &background_}) {
    for (std::thread& worker : *workers) worker.join();
  }
}

void ThreadPool::RunOne(std::shared_ptr<Job> job, std::unique_lock<std::mutex>& lock) {
  const size_t item = job->next++;
  if (job->next == job->n) {
    auto& queue = queues_[static_cast<size_t>(job->priority)];
    queue.erase(std::find(queue.begin(), queue.end(), job));
  }
  const bool skip = !job->status.ok();
  lock.unlock();
  Status status;
  if (!skip) {
    const CarriedScope scope(job->limits);
    status = InCall([&] { return (*job->body)(item); });
  }
  lock.lock();
  if (!status.ok() && job->status.ok()) job->status = std::move(status);
  if (++job->finished == job->n) job->done.notify_all();
}

void ThreadPool::WorkerLoop(WorkPriority priority) {
  if (priority == WorkPriority::kBackground) YieldToOthers();
  const auto& queue = queues_[static_cast<size_t>(priority)];
  std::unique_lock lock(mutex_);
  while (true) {
    work_[static_cast<size_t>(priority)].wait(lock, [&] { return stopping_ || !queue.empty(); });
    if (stopping_) return;  // callers finish their own items
    RunOne(queue.front(), lock);
  }
}

// Schedulers may wake a thread on the core of the thread that wakes it, and run the two in turn for
// milliseconds, as long as a whole step, while another core is idle: Linux on a virtual machine
// does so when it takes idle cores for ones that the host has given to others. The calls below take
// a microsecond or two per worker, when a caller comes from another core than the last one.
void ThreadPool::KeepOff(int core) {
  constexpr size_t kFewWorkers = 15;  // one step does not need more
  cpu_set_t allowed;
  if (core < 0 || workers_.empty() || workers_.size() > kFewWorkers ||
      ::pthread_getaffinity_np(background_.front().native_handle(), sizeof allowed, &allowed) !=
          0) {
    return;
  }
  cpu_set_t cores = allowed;
  CPU_CLR(static_cast<size_t>(core), &cores);
  if (static_cast<size_t>(CPU_COUNT(&cores)) < workers_.size()) {
    cores = allowed;
    core = -1;
  }
  if (core == left_out_ && CPU_EQUAL(&allowed, &allowed_)) return;
  left_out_ = core;
  allowed_ = allowed;
  for (std::thread& worker : workers_) {
    // A worker that may not be moved works all the same.
    static_cast<void>(::pthread_setaffinity_np(worker.native_handle(), sizeof cores, &cores));
  }
}

Status ThreadPool::ParallelFor(size_t n, const std::function<Status(size_t)>& body,
                               WorkPriority priority) {
  if (n == 0) return {};
  if (n == 1) return InCall([&] { return body(0); });
  auto job = std::make_shared<Job>();
  job->body = &body;
  job->n = n;
  job->priority = priority;
  job->limits = CarriedScope::Current();
  const int core = ::sched_getcpu();
  std::unique_lock lock(mutex_);
  const bool step = priority == WorkPriority::kStep;
  queues_[static_cast<size_t>(priority)].push_back(job);
  if (step && ++running_ == 1) KeepOff(core);
  work_[static_cast<size_t>(priority)].notify_all();
  while (job->next < job->n) RunOne(job, lock);
  // Spins only when no other loop runs, because other callers need the core.
  if (step && running_ == 1 && core >= 0 && left_out_ == core && job->finished < n) {
    lock.unlock();
    // The thread that finished last still holds the lock, and would leave a thread asleep that
    // waits for it.
    WaitAwake([&] { return job->finished == n && lock.try_lock(); });
    if (!lock.owns_lock()) lock.lock();
  }
  job->done.wait(lock, [&] { return job->finished == job->n; });
  if (step) --running_;
  return job->status;
}

}  // namespace prefixd
