// An engine that spoils chosen operations of the one it wraps.
#pragma once

#include <atomic>
#include <cerrno>
#include <memory>

#include "storage/io_engine.h"

namespace prefixd::storage {

enum class Fault : uint8_t { kEio, kEnospc, kShort, kFlip };

// Shared with the test. Operations are counted from 1 since the last Arm.
struct FaultPlan {
  void Arm(Fault what, uint64_t first_op, bool until_disarmed) {
    fault = what;
    sticky = until_disarmed;
    counted = 0;
    injected = 0;
    first = first_op;
  }
  void Disarm() { first = 0; }

  std::atomic<Fault> fault{Fault::kEio};
  std::atomic<bool> sticky{false};
  std::atomic<uint64_t> first{0};  // 0: no faults
  std::atomic<uint64_t> counted{0}, injected{0};
};

class FaultyEngine final : public IoEngine {
 public:
  FaultyEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}

  std::string_view name() const override { return inner_->name(); }

  void Submit(std::span<IoOp> ops, IoBatch& batch) override {
    for (IoOp& op : ops) {
      const uint64_t n = ++plan_->counted;
      const bool hit =
          plan_->first != 0 && (n == plan_->first || (plan_->sticky && n > plan_->first));
      if (!hit) {
        inner_->Submit({&op, 1}, batch);
        continue;
      }
      ++plan_->injected;
      batch.Add(1);
      Spoil(op);
      batch.Complete(1);
    }
  }

 private:
  void Spoil(IoOp& op) {
    switch (plan_->fault) {
      case Fault::kEio:
        op.result = -EIO;
        return;
      case Fault::kEnospc:
        op.result = op.kind == IoKind::kRead ? -EIO : -ENOSPC;
        return;
      case Fault::kShort:
        if (op.kind == IoKind::kDataSync) {
          op.result = -EIO;
        } else {
          inner_->Run({&op, 1});
          op.result = op.result > 1 ? op.result / 2 : -EIO;
        }
        return;
      case Fault::kFlip:
        // A read that comes back wrong; a write or sync fails honestly.
        if (op.kind != IoKind::kRead) {
          op.result = -EIO;
          return;
        }
        inner_->Run({&op, 1});
        static_cast<uint8_t*>(op.iov[0].iov_base)[op.iov[0].iov_len / 2] ^= 0x10;
        return;
    }
  }

  const std::unique_ptr<IoEngine> inner_;
  const std::shared_ptr<FaultPlan> plan_;
};

}  // namespace prefixd::storage
