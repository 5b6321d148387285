// Implements the io_uring backend: one ring, which one thread of its own fills and reaps. Callers
// must not submit themselves: when a thread ends, the kernel cancels what it submitted and waits
// for it, so a caller that gave up on a silent disk would hang in its exit. The hop costs less than
// 1 us per operation. SQPOLL (it collapses on few cores), registration and deferred task work (no
// measurable gain) are not used.
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "storage/io/errors.h"
#include "storage/io/file.h"
#include "storage/io/io_engine.h"
#include "storage/io/io_queue.h"

namespace prefixd::storage {
namespace {

// kWakeMark is the user data of a wake; operations have the number of their slot.
constexpr uint64_t kWakeMark = ~uint64_t{0};
constexpr uint64_t kCancelMark = kWakeMark - 1;
constexpr uint64_t kMaxPlainBytes = 1u << 30;  // lengths of plain reads have 32 bits
// The thread takes and submits operations in portions. Disks, virtual ones above all, answer many
// together and then idle, so the thread submits the first of the next operations before it has
// looked at all that ended.
constexpr unsigned kPortion = 8;

class UringEngine final : public IoEngine {
 public:
  static Result<std::unique_ptr<IoEngine>> Open(const IoLimits& limits) {
    auto engine = std::unique_ptr<UringEngine>(new UringEngine(limits));
    PREFIXD_TRY(engine->Start());
    return std::unique_ptr<IoEngine>(std::move(engine));
  }

  ~UringEngine() override {
    if (!ring_thread_.joinable()) return;
    Completions done;
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      CancelLocked(nullptr, ECANCELED, done);
    }
    done.Tell();
    Wake();
    ring_thread_.join();
  }

  std::string_view name() const override { return "io_uring"; }

  void Submit(std::span<IoOp> ops, IoBatch& batch) override {
    batch.Add(ops.size());
    bool wake = false;
    Completions failed;
    {
      std::lock_guard lock(mutex_);
      queue_.Push(ops, batch, failed);
      wake = asleep_ && queue_.Ready();
      if (wake) asleep_ = false;
    }
    if (wake) Wake();
    failed.Tell();
  }

  void Cancel(IoBatch& batch, int error) override {
    Completions done;
    bool wake = false;
    {
      std::lock_guard lock(mutex_);
      CancelLocked(&batch, error, done);
      wake = cancels_wanted_;
    }
    done.Tell();
    if (wake) Wake();
  }

 private:
  enum class Next : uint8_t { kTurn, kWait, kEnd };
  struct Slot {
    QueuedOp queued;  // op is null: the slot is free
    bool cancel_wanted = false;
  };

  explicit UringEngine(const IoLimits& limits)
      : queue_(limits), slots_(std::clamp(limits.max_inflight_ops, 1u, 4096u)) {
    for (size_t i = slots_.size(); i > 0; --i) free_slots_.push_back(i - 1);
  }

  Status Start() {
    wake_fd_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
    if (!wake_fd_.valid()) return Error{Code::kUnavailable, ErrnoError(errno, "eventfd").message};
    std::promise<int> opened;
    ring_thread_ = std::thread([this, &opened] {
      const int rc = OpenRing();
      opened.set_value(rc);
      if (rc < 0) return;
      while (Round()) {
      }
      io_uring_queue_exit(&ring_);
    });
    const int rc = opened.get_future().get();
    if (rc >= 0) return {};
    ring_thread_.join();
    return Error{Code::kUnavailable, ErrnoError(-rc, "io_uring_queue_init").message};
  }

  // The submission queue has room for every slot, a cancellation of each, and the wake.
  int OpenRing() {
    const unsigned entries = std::bit_ceil(2 * static_cast<unsigned>(slots_.size()) + 1);
    return io_uring_queue_init(entries, &ring_, 0);
  }

  void Wake() {
    const uint64_t one = 1;
    while (::write(wake_fd_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

  // REQUIRES mutex_.
  void CancelLocked(const IoBatch* batch, int error, Completions& done) {
    queue_.Cancel(batch, error, done);
    for (Slot& slot : slots_) {
      QueuedOp& queued = slot.queued;
      if (queued.op == nullptr || (batch != nullptr && queued.batch != batch)) continue;
      queued.cancel_error = error;
      slot.cancel_wanted = cancels_wanted_ = true;
    }
  }

  // Takes what the kernel has finished, submits what may go next, and waits for more. False: the
  // engine is being destroyed and the kernel holds none of its operations any more.
  bool Round() {
    Next next = Next::kTurn;
    // The bound on `taken` lets the batches learn of finished operations however fast the disk is.
    for (size_t taken = 0; next == Next::kTurn && taken < slots_.size();) {
      next = Turn(taken);
      // An entry whose submission fails stays in the ring for the next call. A woken thread may
      // take this very core and verify for a while, so the disk gets its work first.
      if (next == Next::kTurn || done_.Wakes()) (void)io_uring_submit(&ring_);
    }
    done_.Tell();
    if (next == Next::kWait) SubmitAndWait();
    return next != Next::kEnd;
  }

  // Handles one portion and adds to `taken` how many operations ended.
  Next Turn(size_t& taken) {
    std::lock_guard lock(mutex_);
    unsigned head = 0, seen = 0, prepared = 0;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      if (seen == kPortion) break;
      ++seen;
      const uint64_t mark = io_uring_cqe_get_data64(cqe);
      if (mark == kWakeMark) wake_armed_ = false;
      if (mark < kCancelMark) Finished(mark, cqe->res);
    }
    io_uring_cq_advance(&ring_, seen);
    taken += seen;
    // Entries whose submission failed last time may still be there.
    while (prepared < kPortion && !free_slots_.empty() &&
           io_uring_sq_space_left(&ring_) > slots_.size() + 1) {
      const std::optional<QueuedOp> next = queue_.Pop(done_);
      if (!next) break;
      Prepare(*next);
      ++prepared;
    }
    // Cancellations are prepared even while more work keeps coming.
    if (cancels_wanted_) PrepareCancels();
    if (seen == kPortion || prepared == kPortion) return Next::kTurn;
    held_until_ = queue_.HeldUntil();
    if (!stop_ && !wake_armed_) PrepareWake();
    asleep_ = true;
    return !stop_ || wake_armed_ || queue_.inflight_ops() > 0 ? Next::kWait : Next::kEnd;
  }

  void Finished(uint64_t slot, int result) {
    queue_.Done(slots_[slot].queued, result, done_);
    slots_[slot] = {};
    free_slots_.push_back(slot);
  }

  void Prepare(const QueuedOp& queued) {
    const size_t slot = free_slots_.back();
    free_slots_.pop_back();
    slots_[slot] = {queued, false};
    const IoOp& op = *queued.op;
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    const auto count = static_cast<unsigned>(op.iov.size());
    const bool plain = count == 1 && queued.bytes <= kMaxPlainBytes;
    switch (op.kind) {
      case IoKind::kRead:
        if (plain) {
          io_uring_prep_read(sqe, op.fd, op.iov[0].iov_base, static_cast<unsigned>(queued.bytes),
                             op.offset);
        } else {
          io_uring_prep_readv(sqe, op.fd, op.iov.data(), count, op.offset);
        }
        break;
      case IoKind::kWrite:
        if (plain) {
          io_uring_prep_write(sqe, op.fd, op.iov[0].iov_base, static_cast<unsigned>(queued.bytes),
                              op.offset);
        } else {
          io_uring_prep_writev(sqe, op.fd, op.iov.data(), count, op.offset);
        }
        break;
      case IoKind::kDataSync:
        io_uring_prep_fsync(sqe, op.fd, IORING_FSYNC_DATASYNC);
        break;
    }
    io_uring_sqe_set_data64(sqe, slot);
  }

  void PrepareCancels() {
    cancels_wanted_ = false;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].cancel_wanted) continue;
      if (io_uring_sq_space_left(&ring_) <= 1) {  // the wake needs one
        cancels_wanted_ = true;
        return;
      }
      slots_[i].cancel_wanted = false;
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      io_uring_prep_cancel64(sqe, i, 0);
      io_uring_sqe_set_data64(sqe, kCancelMark);
    }
  }

  // Prepares a read of the event counter: Wake ends it, and with it the wait for completions.
  void PrepareWake() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_read(sqe, wake_fd_.get(), &wakes_, sizeof(wakes_), 0);
    io_uring_sqe_set_data64(sqe, kWakeMark);
    wake_armed_ = true;
  }

  int SubmitAndWaitFor(std::chrono::nanoseconds time) {
    const auto ns = std::max<int64_t>(0, time.count());
    __kernel_timespec timeout{ns / 1'000'000'000, ns % 1'000'000'000};
    io_uring_cqe* first = nullptr;
    return io_uring_submit_and_wait_timeout(&ring_, &first, 1, &timeout, nullptr);
  }

  void SubmitAndWait() {
    const int rc = held_until_ ? SubmitAndWaitFor(*held_until_ - IoBatch::Clock::now())
                               : io_uring_submit_and_wait(&ring_, 1);
    // Entries not submitted now stay in the ring and go with the next call.
    if (rc >= 0 || rc == -ETIME || rc == -EINTR || rc == -EBUSY) return;
    if (rc == -EAGAIN) {  // the kernel is short of memory
      std::this_thread::yield();
      return;
    }
    // The entries are in the ring and cannot be taken back: a broken ring is a bug here.
    LogWarning(ErrnoError(-rc, "io_uring_submit_and_wait").message);
    std::abort();
  }

  std::mutex mutex_;  // guards queue_ to stop_
  IoQueue queue_;
  std::vector<Slot> slots_;  // operations that the kernel holds
  std::vector<size_t> free_slots_;
  bool cancels_wanted_ = false;
  bool asleep_ = false;  // no call has woken the thread since it last looked
  bool stop_ = false;
  // The ring thread alone uses these.
  io_uring ring_{};
  Completions done_;
  bool wake_armed_ = false;
  std::optional<IoBatch::Clock::time_point> held_until_;
  uint64_t wakes_ = 0;
  UniqueFd wake_fd_;
  std::thread ring_thread_;
};

}  // namespace

Result<std::unique_ptr<IoEngine>> NewUringEngine(const IoLimits& limits) {
  return UringEngine::Open(limits);
}

}  // namespace prefixd::storage
