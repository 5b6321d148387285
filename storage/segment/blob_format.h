// Encodes and decodes the bytes of a blob file (docs/format.md): header, name, producer and payload
// under one checksum.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "prefixd/result.h"
#include "storage/segment/prefix_info.h"

namespace prefixd::storage {

inline constexpr size_t kBlobHeaderBytes = 64;

// BlobContents borrow from the decoded bytes.
struct BlobContents {
  SegmentId segment;
  std::string_view name, producer;
  std::span<const std::byte> payload;
};

std::vector<std::byte> EncodeBlob(const BlobContents& contents);
// Decodes the whole file. kCorrupt unless every byte is as EncodeBlob wrote it; kFailedPrecondition
// for another format version.
Result<BlobContents> DecodeBlob(std::span<const std::byte> file);

}  // namespace prefixd::storage
