// Does an operation of an I/O engine in the calling thread.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "storage/io/io_engine.h"

namespace prefixd::storage {

// Returns what IoOp::result says.
inline int64_t Execute(const IoOp& op) {
  int64_t rc = 0;
  const auto count = static_cast<int>(op.iov.size());
  // The second generation of these calls takes -1 (kNoOffset) for descriptors without positions.
  const auto offset = static_cast<off_t>(op.offset);
  switch (op.kind) {
    case IoKind::kRead:
      rc = ::preadv2(op.fd, op.iov.data(), count, offset, 0);
      break;
    case IoKind::kWrite:
      rc = ::pwritev2(op.fd, op.iov.data(), count, offset, 0);
      break;
    case IoKind::kDataSync:
      rc = ::fdatasync(op.fd);
      break;
  }
  return rc < 0 ? -int64_t{errno} : rc;
}

}  // namespace prefixd::storage
