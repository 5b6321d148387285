// Implements the backend whose callers do their own I/O: for many threads that each wait for a
// small read, where handing it to another thread would take longer than the read.
#include <cerrno>

#include "storage/io/execute.h"
#include "storage/io/io_engine.h"

namespace prefixd::storage {
namespace {

constexpr int kAttempts = 16;

class InlineEngine final : public IoEngine {
 public:
  std::string_view name() const override { return "inline"; }

  void Submit(std::span<IoOp> ops, IoBatch& batch) override {
    batch.Add(ops.size());
    for (IoOp& op : ops) {
      for (int attempt = 0; attempt < kAttempts; ++attempt) {
        op.result = Execute(op);
        if (op.result != -EINTR && op.result != -EAGAIN) break;
      }
    }
    batch.Complete(ops.size());
  }

  void Cancel(IoBatch&, int) override {}  // nothing is outstanding when Submit returns
};

}  // namespace

std::unique_ptr<IoEngine> NewInlineEngine() { return std::make_unique<InlineEngine>(); }

}  // namespace prefixd::storage
