// Implements the plain backend: a few threads with preadv2, pwritev2 and fdatasync. A call under
// way cannot be cancelled.
#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "storage/io/execute.h"
#include "storage/io/io_engine.h"
#include "storage/io/io_queue.h"

namespace prefixd::storage {
namespace {

constexpr uint32_t kMaxThreads = 16;

// One thread carries one operation, so the operations in flight cannot outnumber the threads.
IoLimits WithinThreads(IoLimits limits) {
  limits.max_inflight_ops = std::clamp(limits.max_inflight_ops, 1u, kMaxThreads);
  return limits;
}

class ThreadEngine final : public IoEngine {
 public:
  explicit ThreadEngine(const IoLimits& limits)
      : queue_(limits), running_(limits.max_inflight_ops) {
    for (size_t i = 0; i < running_.size(); ++i) threads_.emplace_back([this, i] { Work(i); });
  }

  ~ThreadEngine() override {
    Completions done;
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      CancelLocked(nullptr, ECANCELED, done);
    }
    done.Tell();
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

  std::string_view name() const override { return "threads"; }

  void Submit(std::span<IoOp> ops, IoBatch& batch) override {
    batch.Add(ops.size());
    size_t wakes = 0;
    Completions failed;
    {
      std::lock_guard lock(mutex_);
      queue_.Push(ops, batch, failed);
      if (queue_.Ready()) wakes = std::min(ops.size(), idle_);
    }
    for (; wakes > 0; --wakes) wake_.notify_one();
    failed.Tell();
  }

  void Cancel(IoBatch& batch, int error) override {
    Completions done;
    {
      std::lock_guard lock(mutex_);
      CancelLocked(&batch, error, done);
    }
    done.Tell();
  }

 private:
  void CancelLocked(const IoBatch* batch, int error, Completions& done) {
    queue_.Cancel(batch, error, done);
    for (QueuedOp& running : running_) {
      if (running.op != nullptr && (batch == nullptr || running.batch == batch)) {
        running.cancel_error = error;  // an interrupted call is then not started again
      }
    }
  }

  void Work(size_t self) {
    QueuedOp& mine = running_[self];
    Completions done;
    std::unique_lock lock(mutex_);
    while (true) {
      const std::optional<QueuedOp> next = queue_.Pop(done);
      const auto held_until = queue_.HeldUntil();
      if (next) mine = *next;
      if (next && idle_ > 0 && queue_.Ready()) wake_.notify_one();
      if (next || !done.empty()) {
        lock.unlock();
        done.Tell();
        const int64_t result = next ? Execute(*next->op) : 0;
        lock.lock();
        if (next) queue_.Done(mine, result, done);
        mine.op = nullptr;
        continue;
      }
      if (stop_) return;
      ++idle_;
      if (held_until) {
        wake_.wait_until(lock, *held_until);
      } else {
        wake_.wait(lock);
      }
      --idle_;
    }
  }

  std::mutex mutex_;  // guards everything below except threads_
  std::condition_variable wake_;
  IoQueue queue_;
  std::vector<QueuedOp> running_;  // [thread]; op is null between operations
  size_t idle_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> NewThreadEngine(const IoLimits& limits) {
  return std::make_unique<ThreadEngine>(WithinThreads(limits));
}

}  // namespace prefixd::storage
