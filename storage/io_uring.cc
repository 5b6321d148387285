// The io_uring backend: one ring. Callers fill it themselves (under a lock, no thread hop on the
// way in); one thread reaps completions and submits what the caps had held back. No SQPOLL (it
// collapses on few cores), no registration (it gained nothing measurable).
#include <liburing.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <thread>

#include "storage/errors.h"
#include "storage/io_engine.h"
#include "storage/io_queue.h"

namespace prefixd::storage {
namespace {

constexpr uint64_t kStopMark = ~uint64_t{0};

class UringEngine final : public IoEngine {
 public:
  static Result<std::unique_ptr<IoEngine>> Open(const IoLimits& limits) {
    auto engine = std::unique_ptr<UringEngine>(new UringEngine(limits));
    const unsigned entries = std::bit_ceil(std::clamp(limits.max_inflight_ops, 1u, 4096u) + 1);
    const int rc = io_uring_queue_init(entries, &engine->ring_, 0);
    if (rc < 0) {
      return Error{Code::kUnavailable, ErrnoError(-rc, "io_uring_queue_init").message};
    }
    engine->open_ = true;
    UringEngine* self = engine.get();
    engine->reaper_ = std::thread([self] { self->Reap(); });
    return std::unique_ptr<IoEngine>(std::move(engine));
  }

  ~UringEngine() override {
    if (!open_) return;
    {
      std::lock_guard lock(mutex_);
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      io_uring_prep_nop(sqe);
      io_uring_sqe_set_data64(sqe, kStopMark);
      SubmitRing();
    }
    reaper_.join();
    io_uring_queue_exit(&ring_);
  }

  std::string_view name() const override { return "io_uring"; }

  void Submit(std::span<IoOp> ops, IoBatch& batch) override {
    batch.Add(ops.size());
    std::lock_guard lock(mutex_);
    for (IoOp& op : ops) queue_.Push({&op, &batch, op.length(), 0});
    Pump();
  }

 private:
  explicit UringEngine(const IoLimits& limits)
      : queue_(limits), slots_(std::clamp(limits.max_inflight_ops, 1u, 4096u)) {
    for (size_t i = slots_.size(); i > 0; --i) free_slots_.push_back(i - 1);
  }

  // Moves waiting operations into the ring as far as the caps allow. Needs mutex_.
  void Pump() {
    bool added = false;
    while (!free_slots_.empty()) {
      const std::optional<QueuedOp> next = queue_.Pop();
      if (!next) break;
      const size_t slot = free_slots_.back();
      free_slots_.pop_back();
      slots_[slot] = *next;
      Prepare(*next->op, slot);
      added = true;
    }
    if (added) SubmitRing();
  }

  void Prepare(const IoOp& op, size_t slot) {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);  // never null: entries > slots
    const auto count = static_cast<unsigned>(op.iov.size());
    switch (op.kind) {
      case IoKind::kRead:
        io_uring_prep_readv(sqe, op.fd, op.iov.data(), count, op.offset);
        break;
      case IoKind::kWrite:
        io_uring_prep_writev(sqe, op.fd, op.iov.data(), count, op.offset);
        break;
      case IoKind::kDataSync:
        io_uring_prep_fsync(sqe, op.fd, IORING_FSYNC_DATASYNC);
        break;
    }
    io_uring_sqe_set_data64(sqe, slot);
  }

  void SubmitRing() {
    while (true) {
      const int rc = io_uring_submit(&ring_);
      if (rc >= 0) {
        if (io_uring_sq_ready(&ring_) == 0) return;
        continue;
      }
      if (rc != -EINTR && rc != -EAGAIN && rc != -EBUSY) {
        // The entries are in the ring and cannot be taken back: a broken ring is a bug here.
        LogWarning(ErrnoError(-rc, "io_uring_submit").message);
        std::abort();
      }
      std::this_thread::yield();
    }
  }

  void Reap() {
    std::vector<io_uring_cqe*> cqes(64);
    std::vector<std::pair<uint64_t, int>> completions;
    bool stop = false;
    while (!stop) {
      io_uring_cqe* first = nullptr;
      if (io_uring_wait_cqe(&ring_, &first) < 0) continue;  // interrupted
      completions.clear();
      const unsigned n =
          io_uring_peek_batch_cqe(&ring_, cqes.data(), static_cast<unsigned>(cqes.size()));
      for (unsigned i = 0; i < n; ++i) {
        completions.emplace_back(io_uring_cqe_get_data64(cqes[i]), cqes[i]->res);
      }
      io_uring_cq_advance(&ring_, n);
      stop = Finish(completions);
    }
  }

  // Returns true when the engine is being destroyed.
  bool Finish(const std::vector<std::pair<uint64_t, int>>& completions) {
    bool stop = false;
    std::vector<std::pair<IoBatch*, size_t>> done;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [slot, result] : completions) {
        if (slot == kStopMark) {
          stop = true;
          continue;
        }
        QueuedOp finished = slots_[slot];
        free_slots_.push_back(slot);
        queue_.Done(finished);
        if (ShouldRetry(result, finished.attempts)) {
          ++finished.attempts;
          queue_.Push(finished);
          continue;
        }
        finished.op->result = result;
        if (!done.empty() && done.back().first == finished.batch) {
          ++done.back().second;
        } else {
          done.emplace_back(finished.batch, 1);
        }
      }
      Pump();
    }
    for (const auto& [batch, n] : done) batch->Complete(n);
    return stop;
  }

  std::mutex mutex_;  // guards the submission side, queue_ and slots_
  IoQueue queue_;
  std::vector<QueuedOp> slots_;
  std::vector<size_t> free_slots_;
  io_uring ring_{};
  bool open_ = false;
  std::thread reaper_;
};

}  // namespace

Result<std::unique_ptr<IoEngine>> NewUringEngine(const IoLimits& limits) {
  return UringEngine::Open(limits);
}

}  // namespace prefixd::storage
