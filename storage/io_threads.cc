// The plain backend: a few threads with preadv, pwritev and fdatasync.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "storage/io_engine.h"
#include "storage/io_queue.h"

namespace prefixd::storage {
namespace {

constexpr uint32_t kMaxThreads = 16;

int64_t Execute(const IoOp& op) {
  int64_t rc = 0;
  const auto count = static_cast<int>(op.iov.size());
  const auto offset = static_cast<off_t>(op.offset);
  switch (op.kind) {
    case IoKind::kRead:
      rc = ::preadv(op.fd, op.iov.data(), count, offset);
      break;
    case IoKind::kWrite:
      rc = ::pwritev(op.fd, op.iov.data(), count, offset);
      break;
    case IoKind::kDataSync:
      rc = ::fdatasync(op.fd);
      break;
  }
  return rc < 0 ? -int64_t{errno} : rc;
}

class ThreadEngine final : public IoEngine {
 public:
  explicit ThreadEngine(const IoLimits& limits) : queue_(limits) {
    const uint32_t n = std::clamp(limits.max_inflight_ops, 1u, kMaxThreads);
    for (uint32_t i = 0; i < n; ++i) threads_.emplace_back([this] { Work(); });
  }

  ~ThreadEngine() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

  std::string_view name() const override { return "threads"; }

  void Submit(std::span<IoOp> ops, IoBatch& batch) override {
    batch.Add(ops.size());
    {
      std::lock_guard lock(mutex_);
      for (IoOp& op : ops) queue_.Push({&op, &batch, op.length(), 0});
    }
    ops.size() == 1 ? wake_.notify_one() : wake_.notify_all();
  }

 private:
  void Work() {
    std::unique_lock lock(mutex_);
    while (true) {
      const std::optional<QueuedOp> next = queue_.Pop();
      if (!next) {
        if (stop_) return;
        wake_.wait(lock);
        continue;
      }
      lock.unlock();
      int64_t result = Execute(*next->op);
      for (uint32_t tries = 0; ShouldRetry(result, tries); ++tries) result = Execute(*next->op);
      next->op->result = result;
      next->batch->Complete(1);
      lock.lock();
      queue_.Done(*next);
      wake_.notify_one();  // what the caps held back may fit now
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  IoQueue queue_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> NewThreadEngine(const IoLimits& limits) {
  return std::make_unique<ThreadEngine>(limits);
}

}  // namespace prefixd::storage
