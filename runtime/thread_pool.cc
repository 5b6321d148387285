#include "runtime/thread_pool.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "runtime/caught.h"

namespace prefixd {

struct ThreadPool::Job {
  const std::function<Status(size_t)>* body = nullptr;
  size_t n = 0;
  WorkPriority priority = WorkPriority::kStep;
  // All guarded by the pool's mutex.
  size_t next = 0;
  size_t finished = 0;
  Status status;
  std::condition_variable done;
};

void YieldToOthers() {
  // Linux keeps a nice value for each thread. One that may not be set is no reason to fail.
  static_cast<void>(::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19));
}

ThreadPool::ThreadPool(uint32_t threads) {
  if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
  for (uint32_t i = 1; i < threads; ++i) {
    for (const WorkPriority priority : {WorkPriority::kStep, WorkPriority::kBackground}) {
      workers_.emplace_back([this, priority] { WorkerLoop(priority); });
    }
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (std::condition_variable& work : work_) work.notify_all();
  for (std::thread& worker : workers_) worker.join();
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
  if (!skip) status = Caught([&] { return (*job->body)(item); });
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

Status ThreadPool::ParallelFor(size_t n, const std::function<Status(size_t)>& body,
                               WorkPriority priority) {
  if (n == 0) return {};
  if (n == 1) return Caught([&] { return body(0); });
  auto job = std::make_shared<Job>();
  job->body = &body;
  job->n = n;
  job->priority = priority;
  std::unique_lock lock(mutex_);
  queues_[static_cast<size_t>(priority)].push_back(job);
  work_[static_cast<size_t>(priority)].notify_all();
  while (job->next < job->n) RunOne(job, lock);
  job->done.wait(lock, [&] { return job->finished == job->n; });
  return job->status;
}

}  // namespace prefixd
