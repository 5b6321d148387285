// Batched asynchronous file I/O behind one interface: io_uring, a thread pool, or a faulty wrapper
// in tests. Operations complete in any order; a caller waits for whole batches, as long as their
// deadlines allow.
//
// Thread-safety: all methods may be called from any thread. In-flight work is capped by operations
// and by bytes; what exceeds the caps waits in the engine, more urgent priorities first.
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

// Lower is served first. Less urgent ones still get a small part of what is moved (io_queue.h), and
// writes and scrub leave a part of the caps to the others.
enum class IoPriority : uint8_t { kStepRead = 0, kCommit = 1, kWrite = 2, kScrub = 3 };
inline constexpr size_t kIoPriorities = 4;

// As IoOp::offset: the descriptor has no positions (a pipe).
inline constexpr uint64_t kNoOffset = ~uint64_t{0};

// One operation. Owned by the caller and left alone by it, as are its buffers and descriptor, until
// its batch is done.
struct IoOp {
  IoKind kind = IoKind::kRead;
  IoPriority priority = IoPriority::kStepRead;
  int fd = -1;
  uint64_t offset = 0;
  boost::container::small_vector<iovec, 1> iov;  // at most 1024; empty for kDataSync
  int64_t result = 0;  // set on completion: bytes moved, or -errno. May be short

  uint64_t length() const;
};

// kUnavailable when the deadline passed first, kCancelled when it was cancelled, kIo or
// kResourceExhausted when it failed, kIo when it moved too few bytes.
Status CheckComplete(const IoOp& op, std::string_view what);

class IoEngine {
 public:
  // What still waits is cancelled; what is in flight is waited for. No call may be under way.
  virtual ~IoEngine() = default;
  virtual std::string_view name() const = 0;  // "io_uring" or "threads"

  // Starts all operations; returns at once. What comes back with EINTR or EAGAIN is started again
  // (at most 16 times, then reported); short transfers are reported as they are. An operation whose
  // turn comes after the batch's deadline completes with -ETIMEDOUT and never reaches the disk.
  virtual void Submit(std::span<IoOp> ops, IoBatch& batch) = 0;

  // Ends early what is outstanding in `batch`: what waits completes with -error (ECANCELED or
  // ETIMEDOUT) before this returns. For what is in flight the kernel is asked, where it can be
  // asked (io_uring; it refuses once the disk has the request): the result is then -error too,
  // otherwise whatever it comes to. Does not wait for that.
  virtual void Cancel(IoBatch& batch, int error) = 0;

  // Submit for callers that may give up. `owner` holds everything the operations touch (themselves,
  // buffers, descriptors, the batch) and is kept until the kernel is done with it. It may be
  // destroyed on a thread of the engine, so it must not own the engine.
  void SubmitOwned(std::span<IoOp> ops, IoBatch& batch, std::shared_ptr<const void> owner);

  // Waits for `batch` until its deadline, then cancels with ETIMEDOUT. False: something is still in
  // the kernel's hands, and the caller must look at neither operations nor buffers again and drop
  // its reference to the owner. A batch without an owner cannot be left behind: then this waits for
  // the kernel and returns true.
  [[nodiscard]] bool Finish(IoBatch& batch);

  // Submits and waits, without a deadline.
  void Run(std::span<IoOp> ops);
};

struct IoLimits {
  uint64_t max_inflight_bytes = 16ull << 20;
  uint32_t max_inflight_ops = 64;  // the thread pool has at most 16
};

// kUnavailable when the kernel refuses io_uring.
Result<std::unique_ptr<IoEngine>> NewUringEngine(const IoLimits& limits);
std::unique_ptr<IoEngine> NewThreadEngine(const IoLimits& limits);

// Chooses a backend; with kAuto io_uring must pass a real read of `probe_fd` (a file of at least
// 4096 bytes), and a fall-back to threads is logged. kUring fails with kUnavailable instead.
Result<std::unique_ptr<IoEngine>> NewEngine(IoBackend backend, const IoLimits& limits,
                                            int probe_fd);

// Reads or writes a contiguous run in operations of at most 1 MiB, waits, checks every length.
Status ReadFully(IoEngine& engine, int fd, uint64_t offset, std::span<std::byte> out,
                 IoPriority priority, std::string_view what);
Status WriteFully(IoEngine& engine, int fd, uint64_t offset, std::span<const std::byte> bytes,
                  IoPriority priority, std::string_view what);
// fdatasync. Never retry it after a failure: the kernel may have dropped the dirty pages.
Status DataSync(IoEngine& engine, int fd, std::string_view what);

}  // namespace prefixd::storage
