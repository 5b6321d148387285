// Reads for callers that may give up: memory and descriptor belong to the read until the kernel is
// done with both, however long that takes.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>

#include "prefixd/result.h"
#include "storage/io/file.h"
#include "storage/io/io_engine.h"

namespace prefixd::storage {

// Reads [offset, offset + bytes) of the file, in operations of at most 1 MiB, and checks every
// length. kUnavailable when the disk did not answer within `deadline`; 0 means no deadline.
Result<AlignedBuffer> ReadOwned(IoEngine& engine, std::shared_ptr<const UniqueFd> fd,
                                uint64_t offset, uint64_t bytes, IoPriority priority,
                                std::chrono::milliseconds deadline, std::string_view what);

}  // namespace prefixd::storage
