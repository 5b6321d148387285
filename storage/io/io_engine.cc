#include "storage/io/io_engine.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "storage/io/errors.h"
#include "storage/io/file.h"

namespace prefixd::storage {
namespace {

constexpr size_t kChunkBytes = 1u << 20;

Status RunContiguous(IoEngine& engine, IoKind kind, int fd, uint64_t offset, std::byte* data,
                     size_t bytes, IoPriority priority, std::string_view what) {
  std::vector<IoOp> ops;
  ops.reserve(bytes / kChunkBytes + 1);
  for (size_t at = 0; at < bytes; at += kChunkBytes) {
    const size_t n = std::min(kChunkBytes, bytes - at);
    ops.push_back({kind, priority, fd, offset + at, {{data + at, n}}, 0});
  }
  engine.Run(ops);
  for (const IoOp& op : ops) PREFIXD_TRY(CheckComplete(op, what));
  return {};
}

// Returns false when the batch is not done by its deadline, or when this thread's call ends.
bool AwaitInCall(IoBatch& batch) {
  if (CarriedScope::Current() == nullptr) return batch.WaitUntil(batch.deadline());
  while (true) {
    const auto now = IoBatch::Clock::now();
    if (batch.WaitUntil(std::min(batch.deadline(), now + kCallSlice))) return true;
    if (now >= batch.deadline() || !CheckCall().ok()) return false;
  }
}

Status Probe(IoEngine& engine, int probe_fd) {
  AlignedBuffer buffer(4096);
  return ReadFully(engine, probe_fd, 0, buffer.span(), IoPriority::kStepRead, "probing read");
}

}  // namespace

uint64_t IoOp::length() const {
  uint64_t sum = 0;
  for (const iovec& v : iov) sum += v.iov_len;
  return sum;
}

Status CheckComplete(const IoOp& op, std::string_view what) {
  if (op.result == -ETIMEDOUT) {
    return Error{Code::kUnavailable, std::string(what) + ": the disk did not answer in time"};
  }
  if (op.result == -ECANCELED) {
    return Error{Code::kCancelled, std::string(what) + ": the operation was cancelled"};
  }
  if (op.result < 0) return ErrnoError(static_cast<int>(-op.result), std::string(what));
  if (op.kind != IoKind::kDataSync && static_cast<uint64_t>(op.result) != op.length()) {
    return Error{Code::kIo, std::string(what) + ": " + std::to_string(op.result) + " of " +
                                std::to_string(op.length()) + " bytes moved at offset " +
                                std::to_string(op.offset)};
  }
  return {};
}

void IoEngine::SubmitOwned(std::span<IoOp> ops, IoBatch& batch, std::shared_ptr<const void> owner) {
  batch.Own(std::move(owner));
  Submit(ops, batch);
  batch.Complete(1);
}

bool IoEngine::Finish(IoBatch& batch) {
  if (AwaitInCall(batch)) return true;
  Cancel(batch, CheckCall().ok() ? ETIMEDOUT : ECANCELED);
  if (batch.WaitUntil(IoBatch::Clock::now())) return true;  // all operations were still queued
  if (batch.owned()) return false;
  batch.Wait();
  return true;
}

void IoEngine::Run(std::span<IoOp> ops) {
  IoBatch batch;
  Submit(ops, batch);
  batch.Wait();
}

Result<std::unique_ptr<IoEngine>> NewEngine(IoBackend backend, const IoLimits& limits,
                                            int probe_fd) {
  if (backend != IoBackend::kThreads) {
    auto uring = NewUringEngine(limits);
    Status usable = uring.ok() ? Probe(**uring, probe_fd) : Status(uring.error());
    if (usable.ok()) return uring;
    if (backend == IoBackend::kUring) {
      return Error{Code::kUnavailable, "io_uring does not work here (" + usable.error().message +
                                           "); choose the auto or threads backend"};
    }
    LogInfo("io_uring does not work here (" + usable.error().message +
            "); using a pool of threads");
  }
  std::unique_ptr<IoEngine> threads = NewThreadEngine(limits);
  PREFIXD_TRY(Probe(*threads, probe_fd));
  return threads;
}

Status ReadFully(IoEngine& engine, int fd, uint64_t offset, std::span<std::byte> out,
                 IoPriority priority, std::string_view what) {
  return RunContiguous(engine, IoKind::kRead, fd, offset, out.data(), out.size(), priority, what);
}

Status WriteFully(IoEngine& engine, int fd, uint64_t offset, std::span<const std::byte> bytes,
                  IoPriority priority, std::string_view what) {
  // iovec has no const variant; a write only reads the buffer.
  return RunContiguous(engine, IoKind::kWrite, fd, offset, const_cast<std::byte*>(bytes.data()),
                       bytes.size(), priority, what);
}

Status DataSync(IoEngine& engine, int fd, std::string_view what) {
  IoOp op{IoKind::kDataSync, IoPriority::kCommit, fd, 0, {}, 0};
  engine.Run({&op, 1});
  return CheckComplete(op, what);
}

}  // namespace prefixd::storage
