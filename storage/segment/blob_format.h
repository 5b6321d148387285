// Encodes and decodes the bytes of a blob file (docs/format.md): header, name, producer and payload
// under one checksum. In an encrypted store all but the header is encrypted, under a key that each
// file has of its own: a blob that is replaced is another file.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "prefixd/result.h"
#include "storage/crypt/key_ring.h"
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
// Encodes it encrypted, under the ring's newest key.
Result<std::vector<std::byte>> SealBlob(const BlobContents& contents, const KeyRing& keys);
inline constexpr size_t kSealedBlobHeaderBytes = kBlobHeaderBytes + 3 * kTagBytes;

// Decodes a whole file that is not encrypted. kCorrupt unless every byte is as EncodeBlob wrote it;
// kFailedPrecondition for another format version.
Result<BlobContents> DecodeBlob(std::span<const std::byte> file);
// Decodes either kind, an encrypted one in place. keys: null where there are none.
// kFailedPrecondition: they lack the file's.
Result<BlobContents> OpenBlob(std::span<std::byte> file, const KeyRing* keys);
// Returns the key that a file of which these are the first bytes is encrypted under, if it is.
std::optional<KeyId> KeyOfBlob(std::span<const std::byte> file);

}  // namespace prefixd::storage
