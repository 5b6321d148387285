#include "storage/segment/blob_format.h"

#include <xxhash.h>

#include <cstring>
#include <memory>
#include <string>

namespace prefixd::storage {
namespace {

constexpr char kMagic[8] = {'P', 'F', 'X', 'B', 'L', 'O', 'B', '\n'};
constexpr uint32_t kVersion = 1;

// `checksum` (XXH3-64) covers the whole file with itself taken as zero.
struct BlobHeader {
  char magic[8];
  uint32_t version, name_bytes, producer_bytes, reserved;
  uint8_t segment[16];
  uint64_t payload_bytes;
  uint64_t reserved2;
  uint64_t checksum;
};
static_assert(sizeof(BlobHeader) == kBlobHeaderBytes, "the format changed: raise kVersion");

uint64_t ChecksumOf(BlobHeader header, std::span<const std::byte> body) {
  header.checksum = 0;
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       XXH3_freeState);
  XXH3_64bits_reset(state.get());
  XXH3_64bits_update(state.get(), &header, sizeof(header));
  XXH3_64bits_update(state.get(), body.data(), body.size());
  return XXH3_64bits_digest(state.get());
}

}  // namespace

std::vector<std::byte> EncodeBlob(const BlobContents& contents) {
  BlobHeader header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.name_bytes = static_cast<uint32_t>(contents.name.size());
  header.producer_bytes = static_cast<uint32_t>(contents.producer.size());
  std::memcpy(header.segment, contents.segment.bytes.data(), contents.segment.bytes.size());
  header.payload_bytes = contents.payload.size();
  std::vector<std::byte> file;
  file.reserve(sizeof(header) + contents.name.size() + contents.producer.size() +
               contents.payload.size());
  const auto append = [&file](std::span<const std::byte> part) {
    file.insert(file.end(), part.begin(), part.end());
  };
  append(std::as_bytes(std::span(&header, 1)));
  append(std::as_bytes(std::span(contents.name)));
  append(std::as_bytes(std::span(contents.producer)));
  append(contents.payload);
  header.checksum = ChecksumOf(header, std::span(file).subspan(sizeof(header)));
  std::memcpy(file.data(), &header, sizeof(header));
  return file;
}

Result<BlobContents> DecodeBlob(std::span<const std::byte> file) {
  const Error damaged{Code::kCorrupt, "is damaged"};
  if (file.size() < sizeof(BlobHeader)) return damaged;
  BlobHeader header;
  std::memcpy(&header, file.data(), sizeof(header));
  const std::span<const std::byte> body = file.subspan(sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 ||
      ChecksumOf(header, body) != header.checksum) {
    return damaged;
  }
  if (header.version != kVersion) {
    return Error{Code::kFailedPrecondition, "has format version " + std::to_string(header.version) +
                                                "; this prefixd reads version " +
                                                std::to_string(kVersion)};
  }
  const uint64_t names = uint64_t{header.name_bytes} + header.producer_bytes;
  if (body.size() < names || body.size() - names != header.payload_bytes || header.reserved != 0 ||
      header.reserved2 != 0) {
    return damaged;
  }
  BlobContents contents;
  std::memcpy(contents.segment.bytes.data(), header.segment, sizeof(header.segment));
  const auto* text = reinterpret_cast<const char*>(body.data());
  contents.name = {text, header.name_bytes};
  contents.producer = {text + header.name_bytes, header.producer_bytes};
  contents.payload = body.subspan(names);
  return contents;
}

}  // namespace prefixd::storage
