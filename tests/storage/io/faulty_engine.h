// Wraps an engine and spoils, or holds, chosen operations.
#pragma once

#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "storage/io/io_engine.h"

namespace prefixd::storage {

enum class Fault : uint8_t {
  kEio,
  kEnospc,     // writes and syncs; reads fail with EIO
  kEintr,      // interrupted more often than an engine tries again
  kShort,      // half of the bytes move
  kFlip,       // a read comes back wrong; writes and syncs fail
  kFlipWrite,  // a write reaches the disk wrong and succeeds; reads and syncs are honest
  kSync,       // fdatasync fails; only syncs are counted
  kHang,       // the disk does not answer until Release
};

// The engine shares a FaultPlan with the test. Operations are counted from 1 since the last Arm.
struct FaultPlan {
  void Arm(Fault what, uint64_t first_op, bool until_disarmed) {
    fault = what;
    sticky = until_disarmed;
    counted = 0;
    injected = 0;
    bytes = 0;
    first = first_op;
  }
  void Disarm() { first = 0; }
  // Waits until the disk holds an operation.
  void AwaitInjected() const {
    while (injected == 0) std::this_thread::yield();
  }

  std::atomic<Fault> fault{Fault::kEio};
  std::atomic<bool> sticky{false};
  std::atomic<bool> reads_only{false};  // only reads are counted
  std::atomic<uint64_t> first{0};       // 0: no faults
  std::atomic<uint64_t> counted{0}, injected{0};
  std::atomic<uint64_t> bytes{0};  // of the counted operations
  // A place, in bytes of a file, that no read gets past with EIO: a bad sector in every file.
  // Below 0: none. Reads of it are not counted.
  std::atomic<int64_t> bad_sector{-1};
};

class FaultyEngine final : public IoEngine {
 public:
  FaultyEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}
  ~FaultyEngine() override { Release(); }

  std::string_view name() const override { return inner_->name(); }

  void Submit(std::span<IoOp> ops, IoBatch& batch) override {
    batch.Add(1);  // keeps the batch open until all of it is submitted
    for (IoOp& op : ops) {
      if (OnBadSector(op)) {
        batch.Add(1);
        op.result = -EIO;
        batch.Complete(1);
        continue;
      }
      if (!Hit(op)) {
        inner_->Submit({&op, 1}, batch);
        continue;
      }
      batch.Add(1);
      if (plan_->fault == Fault::kHang) {
        std::lock_guard lock(mutex_);
        held_.emplace_back(&op, &batch);
        ++plan_->injected;
      } else {
        ++plan_->injected;
        Spoil(op);
        batch.Complete(1);
      }
    }
    batch.Complete(1);
  }

  // The disk has the held operations: they cannot be taken back.
  void Cancel(IoBatch& batch, int error) override { inner_->Cancel(batch, error); }

  // The disk answers: this carries out the held operations.
  void Release() {
    std::vector<std::pair<IoOp*, IoBatch*>> held;
    {
      std::lock_guard lock(mutex_);
      held.swap(held_);
    }
    for (const auto& [op, batch] : held) {
      inner_->Run({op, 1});
      batch->Complete(1);
    }
  }

  size_t held() const {
    std::lock_guard lock(mutex_);
    return held_.size();
  }

 private:
  bool OnBadSector(const IoOp& op) const {
    const int64_t bad = plan_->bad_sector;
    const auto begin = static_cast<int64_t>(op.offset);
    return op.kind == IoKind::kRead && bad >= begin &&
           bad < begin + static_cast<int64_t>(op.length());
  }

  bool Hit(const IoOp& op) {
    if (plan_->fault == Fault::kSync && op.kind != IoKind::kDataSync) return false;
    if (plan_->reads_only && op.kind != IoKind::kRead) return false;
    const uint64_t n = ++plan_->counted;
    plan_->bytes += op.length();
    return plan_->first != 0 && (n == plan_->first || (plan_->sticky && n > plan_->first));
  }

  void Spoil(IoOp& op) {
    const bool is_read = op.kind == IoKind::kRead, is_sync = op.kind == IoKind::kDataSync;
    switch (plan_->fault) {
      case Fault::kEio:
      case Fault::kSync:
      case Fault::kHang:
        op.result = -EIO;
        return;
      case Fault::kEnospc:
        op.result = is_read ? -EIO : -ENOSPC;
        return;
      case Fault::kEintr:
        op.result = -EINTR;
        return;
      case Fault::kShort:
        if (is_sync) {
          op.result = -EIO;
        } else {
          inner_->Run({&op, 1});
          op.result = op.result > 1 ? op.result / 2 : -EIO;
        }
        return;
      case Fault::kFlip:
        if (!is_read) {
          op.result = -EIO;
          return;
        }
        inner_->Run({&op, 1});
        Flip(op);
        return;
      case Fault::kFlipWrite:
        if (op.kind == IoKind::kWrite) Flip(op);
        inner_->Run({&op, 1});
        if (op.kind == IoKind::kWrite) Flip(op);  // the caller's memory stays as it was
        return;
    }
  }

  static void Flip(const IoOp& op) {
    static_cast<uint8_t*>(op.iov[0].iov_base)[op.iov[0].iov_len / 2] ^= 0x10;
  }

  const std::unique_ptr<IoEngine> inner_;
  const std::shared_ptr<FaultPlan> plan_;
  mutable std::mutex mutex_;  // guards held_
  std::vector<std::pair<IoOp*, IoBatch*>> held_;
};

}  // namespace prefixd::storage
