// Wraps an I/O engine and makes its disk slow: every read begins a given time late.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "storage/io/io_engine.h"

namespace prefixd::bench {

// Shared with the benchmark, which may change it at any time.
struct Slowness {
  std::atomic<int64_t> read_delay_us{0};
};

class SlowEngine final : public storage::IoEngine {
 public:
  SlowEngine(std::unique_ptr<storage::IoEngine> inner, std::shared_ptr<const Slowness> slowness)
      : inner_(std::move(inner)), slowness_(std::move(slowness)), thread_([this] { Work(); }) {}
  ~SlowEngine() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  std::string_view name() const override { return inner_->name(); }

  void Submit(std::span<storage::IoOp> ops, storage::IoBatch& batch) override {
    const auto delay = std::chrono::microseconds(slowness_->read_delay_us.load());
    batch.Add(1);  // keeps the batch open until all of it is submitted
    for (storage::IoOp& op : ops) {
      if (op.kind != storage::IoKind::kRead || delay.count() == 0) {
        inner_->Submit({&op, 1}, batch);
        continue;
      }
      batch.Add(1);
      std::lock_guard lock(mutex_);
      late_.push_back({Clock::now() + delay, &op, &batch});
      changed_.notify_one();
    }
    batch.Complete(1);
  }

  void Cancel(storage::IoBatch& batch, int error) override {
    size_t cancelled = 0;
    {
      std::lock_guard lock(mutex_);
      std::erase_if(late_, [&](const Late& late) {
        if (late.batch != &batch) return false;
        late.op->result = -error;
        ++cancelled;
        return true;
      });
    }
    inner_->Cancel(batch, error);
    if (cancelled > 0) batch.Complete(cancelled);
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Late {
    Clock::time_point due;
    storage::IoOp* op;
    storage::IoBatch* batch;
  };

  void Work() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (late_.empty()) {
        changed_.wait(lock);
      } else if (late_.front().due > Clock::now()) {
        changed_.wait_until(lock, late_.front().due);
      } else {
        const Late now = late_.front();
        late_.pop_front();
        lock.unlock();
        inner_->Submit({now.op, 1}, *now.batch);
        now.batch->Complete(1);
        lock.lock();
      }
    }
  }

  const std::unique_ptr<storage::IoEngine> inner_;
  const std::shared_ptr<const Slowness> slowness_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Late> late_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace prefixd::bench
