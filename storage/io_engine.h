// Batched asynchronous file I/O behind one interface: io_uring, a thread pool, or a faulty wrapper
// in tests. Operations complete in any order; a caller waits for whole batches.
//
// Thread-safety: Submit may be called from any thread. In-flight work is capped by operations and
// by bytes; what exceeds the caps waits in the engine, more urgent priorities first.
#pragma once

#include <sys/uio.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "attention/result.h"
#include "storage/prefix_store.h"

namespace prefixd::storage {

enum class IoKind : uint8_t { kRead, kWrite, kDataSync };

// Lower is served first.
enum class IoPriority : uint8_t { kStepRead = 0, kCommit = 1, kWrite = 2, kScrub = 3 };
inline constexpr size_t kIoPriorities = 4;

// One operation. Owned by the caller and left alone by it until its batch is done.
struct IoOp {
  IoKind kind = IoKind::kRead;
  IoPriority priority = IoPriority::kStepRead;
  int fd = -1;
  uint64_t offset = 0;
  std::vector<iovec> iov;  // at most 1024; empty for kDataSync
  int64_t result = 0;      // set on completion: bytes moved, or -errno. May be short

  uint64_t length() const;
};

// kIo or kResourceExhausted when the operation failed, kIo when it moved too few bytes.
Status CheckComplete(const IoOp& op, std::string_view what);

// Counts what is outstanding. Must outlive its operations; Wait before destroying it.
class IoBatch {
 public:
  IoBatch() = default;
  IoBatch(const IoBatch&) = delete;
  IoBatch& operator=(const IoBatch&) = delete;

  void Wait();
  // For engines.
  void Add(size_t n);
  void Complete(size_t n);

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  size_t pending_ = 0;
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual std::string_view name() const = 0;  // "io_uring" or "threads"
  // Starts all operations; returns at once. EINTR and EAGAIN are retried by the engine, short
  // transfers are reported as they are.
  virtual void Submit(std::span<IoOp> ops, IoBatch& batch) = 0;

  // Submits and waits.
  void Run(std::span<IoOp> ops);
};

struct IoLimits {
  uint64_t max_inflight_bytes = 16ull << 20;
  uint32_t max_inflight_ops = 64;
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
