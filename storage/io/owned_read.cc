#include "storage/io/owned_read.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "storage/io/errors.h"

namespace prefixd::storage {
namespace {

constexpr uint64_t kMaxOpBytes = 1u << 20;

struct OwnedRead {
  std::shared_ptr<const UniqueFd> fd;
  AlignedBuffer buffer;
  std::vector<IoOp> ops;
  IoBatch batch;
};

}  // namespace

Result<AlignedBuffer> ReadOwned(IoEngine& engine, std::shared_ptr<const UniqueFd> fd,
                                uint64_t offset, uint64_t bytes, IoPriority priority,
                                std::chrono::milliseconds deadline, std::string_view what) {
  auto read = std::make_shared<OwnedRead>();
  read->fd = std::move(fd);
  read->buffer = AlignedBuffer(bytes);
  for (uint64_t at = 0; at < bytes; at += kMaxOpBytes) {
    const uint64_t n = std::min(kMaxOpBytes, bytes - at);
    read->ops.push_back({IoKind::kRead,
                         priority,
                         read->fd->get(),
                         offset + at,
                         {{read->buffer.data() + at, n}},
                         0});
  }
  if (deadline.count() > 0) read->batch.SetDeadline(IoBatch::Clock::now() + deadline);
  engine.SubmitOwned(read->ops, read->batch, read);
  const auto too_late = [&] {
    Error error{Code::kUnavailable, std::string(what) + ": the disk did not answer within " +
                                        std::to_string(deadline.count()) + " ms"};
    LogWarning(error.message);
    return error;
  };
  if (!engine.Finish(read->batch)) {
    PREFIXD_TRY(CheckCall());
    return too_late();
  }
  for (const IoOp& op : read->ops) {
    Status complete = CheckComplete(op, what);
    if (complete.ok()) continue;
    PREFIXD_TRY(CheckCall());
    if (complete.error().code == Code::kUnavailable) return too_late();
    return std::move(complete).error();
  }
  return std::move(read->buffer);
}

}  // namespace prefixd::storage
