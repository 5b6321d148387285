// Does batched asynchronous file I/O behind one interface: io_uring, a thread pool, or a faulty
// wrapper in tests. Operations complete in any order; a caller waits for whole batches, up to their
// deadlines.
//
// Thread-safety: all methods may be called from any thread. Caps on operations and bytes bound the
// in-flight work; operations beyond the caps wait in the engine, more urgent priorities first.
#pragma once

#include <sys/uio.h>

#include <boost/container/small_vector.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "prefixd/result.h"
#include "storage/io/io_batch.h"

namespace prefixd::storage {

enum class IoBackend : uint8_t { kAuto, kUring, kThreads };

enum class IoKind : uint8_t { kRead, kWrite, kDataSync };

// The engine serves lower values first. Less urgent priorities still get a small part of the bytes
// moved (io_queue.h), and writes and scrub leave a part of the caps to the others.
enum class IoPriority : uint8_t { kStepRead = 0, kCommit = 1, kWrite = 2, kScrub = 3 };
inline constexpr size_t kIoPriorities = 4;

// An IoOp::offset of kNoOffset means that the descriptor has no positions (a pipe).
inline constexpr uint64_t kNoOffset = ~uint64_t{0};

// An IoOp is one operation. The caller owns it and leaves it, its buffers and its descriptor alone
// until its batch is done.
struct IoOp {
  IoKind kind = IoKind::kRead;
  IoPriority priority = IoPriority::kStepRead;
  int fd = -1;
  uint64_t offset = 0;
  boost::container::small_vector<iovec, 1> iov;  // at most 1024; empty for kDataSync
  int64_t result = 0;  // set on completion: bytes moved, or -errno. May be short

  uint64_t length() const;
};

// Returns kUnavailable when the deadline passed first, kCancelled when the operation was cancelled,
// kIo or kResourceExhausted when it failed, kIo when it moved too few bytes.
Status CheckComplete(const IoOp& op, std::string_view what);

class IoEngine {
 public:
  // Cancels queued operations and waits for those in flight. REQUIRES: no call is under way.
  virtual ~IoEngine() = default;
  virtual std::string_view name() const = 0;  // "io_uring", "threads" or "inline"

  // Starts all operations and returns at once. Operations that end with EINTR or EAGAIN are started
  // again (at most 16 times, then reported); short transfers are reported as they are. An operation
  // whose turn comes after the batch's deadline completes with -ETIMEDOUT and never reaches the
  // disk.
  virtual void Submit(std::span<IoOp> ops, IoBatch& batch) = 0;

  // Ends early what is outstanding in `batch`: queued operations complete with -error (ECANCELED or
  // ETIMEDOUT) before this returns. Where the kernel can cancel operations in flight (io_uring; it
  // refuses once the disk has the request), their result is -error too, otherwise the operation's
  // own result. Cancel does not wait for that.
  virtual void Cancel(IoBatch& batch, int error) = 0;

  // Submits for callers that may give up. `owner` holds everything the operations touch
  // (themselves, buffers, descriptors, the batch) and is kept until the kernel is done with it. It
  // may be destroyed on a thread of the engine, so it must not own the engine.
  void SubmitOwned(std::span<IoOp> ops, IoBatch& batch, std::shared_ptr<const void> owner);

  // Waits for `batch` until its deadline, then cancels with ETIMEDOUT; with ECANCELED when this
  // thread's call ends before (base/call_scope.h). False: the kernel still holds an operation, and
  // the caller must look at neither operations nor buffers again and drop its reference to the
  // owner. A batch without an owner cannot be left behind: then this waits for the kernel and
  // returns true.
  [[nodiscard]] bool Finish(IoBatch& batch);

  // Submits and waits, without a deadline.
  void Run(std::span<IoOp> ops);
};

struct IoLimits {
  uint64_t max_inflight_bytes = 16ull << 20;
  uint32_t max_inflight_ops = 64;  // the thread pool has at most 16
};

// Returns kUnavailable when the kernel refuses io_uring.
Result<std::unique_ptr<IoEngine>> NewUringEngine(const IoLimits& limits);
std::unique_ptr<IoEngine> NewThreadEngine(const IoLimits& limits);
// Submit does the operations itself, one after the other, whatever the deadline and the limits.
std::unique_ptr<IoEngine> NewInlineEngine();

// Chooses a backend; with kAuto io_uring must pass a real read of `probe_fd` (a file of at least
// 4096 bytes), and a fall-back to threads is logged. kUring fails with kUnavailable instead.
Result<std::unique_ptr<IoEngine>> NewEngine(IoBackend backend, const IoLimits& limits,
                                            int probe_fd);

// These read or write a contiguous run in operations of at most 1 MiB, wait, and check every
// length.
Status ReadFully(IoEngine& engine, int fd, uint64_t offset, std::span<std::byte> out,
                 IoPriority priority, std::string_view what);
Status WriteFully(IoEngine& engine, int fd, uint64_t offset, std::span<const std::byte> bytes,
                  IoPriority priority, std::string_view what);
// Calls fdatasync. Never retry it after a failure: the kernel may have dropped the dirty pages.
Status DataSync(IoEngine& engine, int fd, std::string_view what);

}  // namespace prefixd::storage
