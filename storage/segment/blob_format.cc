#include "storage/segment/blob_format.h"

#include <xxhash.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>

namespace prefixd::storage {
namespace {

constexpr char kMagic[8] = {'P', 'F', 'X', 'B', 'L', 'O', 'B', '\n'};
constexpr uint32_t kVersion = 1, kSealedVersion = 2;

// `checksum` (XXH3-64) covers the whole file with itself taken as zero.
struct BlobHeader {
  char magic[8];
  uint32_t version, name_bytes, producer_bytes;
  uint32_t cipher;  // 0 in version 1
  uint8_t segment[16];
  uint64_t payload_bytes;
  uint64_t reserved2;
  uint64_t checksum;
};
static_assert(sizeof(BlobHeader) == kBlobHeaderBytes, "the format changed: raise kVersion");

// Version 2 is encrypted: this follows the header, then name, producer and payload as one sealed
// run. The tag authenticates the header, too, with its checksum taken as zero.
struct SealedPart {
  uint8_t key[16], file[16], tag[kTagBytes];
};
static_assert(sizeof(BlobHeader) + sizeof(SealedPart) == kSealedBlobHeaderBytes);

uint64_t ChecksumOf(BlobHeader header, std::span<const std::byte> body) {
  header.checksum = 0;
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       XXH3_freeState);
  XXH3_64bits_reset(state.get());
  XXH3_64bits_update(state.get(), &header, sizeof(header));
  XXH3_64bits_update(state.get(), body.data(), body.size());
  return XXH3_64bits_digest(state.get());
}

Error DamagedBlob() { return {Code::kCorrupt, "is damaged"}; }

BlobHeader HeaderOf(const BlobContents& contents, uint32_t version) {
  BlobHeader header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = version;
  header.name_bytes = static_cast<uint32_t>(contents.name.size());
  header.producer_bytes = static_cast<uint32_t>(contents.producer.size());
  std::memcpy(header.segment, contents.segment.bytes.data(), contents.segment.bytes.size());
  header.payload_bytes = contents.payload.size();
  return header;
}

// Returns a file with `before` bytes of room for its header, then the contents.
std::vector<std::byte> FileOf(const BlobContents& contents, size_t before) {
  std::vector<std::byte> file(before);
  file.reserve(before + contents.name.size() + contents.producer.size() + contents.payload.size());
  const auto append = [&file](std::span<const std::byte> part) {
    file.insert(file.end(), part.begin(), part.end());
  };
  append(std::as_bytes(std::span(contents.name)));
  append(std::as_bytes(std::span(contents.producer)));
  append(contents.payload);
  return file;
}

void Finish(BlobHeader header, std::span<std::byte> file) {
  header.checksum = ChecksumOf(header, file.subspan(sizeof(header)));
  std::memcpy(file.data(), &header, sizeof(header));
}

// Returns the header of a file that is as it was written, of one of the versions.
Result<BlobHeader> CheckedHeader(std::span<const std::byte> file, uint32_t last_version) {
  if (file.size() < sizeof(BlobHeader)) return DamagedBlob();
  BlobHeader header;
  std::memcpy(&header, file.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 ||
      ChecksumOf(header, file.subspan(sizeof(header))) != header.checksum) {
    return DamagedBlob();
  }
  if (header.version < kVersion || header.version > last_version) {
    return Error{Code::kFailedPrecondition, "has format version " + std::to_string(header.version) +
                                                "; this prefixd reads version " +
                                                std::to_string(last_version)};
  }
  return header;
}

// What is authenticated beside the contents: the header, key and file.
std::array<std::byte, sizeof(BlobHeader) + 2 * kTagBytes> BesideOf(BlobHeader header,
                                                                   const SealedPart& part) {
  std::array<std::byte, sizeof(BlobHeader) + 2 * kTagBytes> beside;
  header.checksum = 0;
  std::memcpy(beside.data(), &header, sizeof(header));
  std::memcpy(beside.data() + sizeof(header), &part, 2 * kTagBytes);
  return beside;
}

Result<BlobContents> ContentsOf(const BlobHeader& header, std::span<const std::byte> body) {
  const uint64_t names = uint64_t{header.name_bytes} + header.producer_bytes;
  if (body.size() < names || body.size() - names != header.payload_bytes || header.reserved2 != 0) {
    return DamagedBlob();
  }
  BlobContents contents;
  std::memcpy(contents.segment.bytes.data(), header.segment, sizeof(header.segment));
  const auto* text = reinterpret_cast<const char*>(body.data());
  contents.name = {text, header.name_bytes};
  contents.producer = {text + header.name_bytes, header.producer_bytes};
  contents.payload = body.subspan(names);
  return contents;
}

}  // namespace

std::vector<std::byte> EncodeBlob(const BlobContents& contents) {
  std::vector<std::byte> file = FileOf(contents, sizeof(BlobHeader));
  Finish(HeaderOf(contents, kVersion), file);
  return file;
}

Result<std::vector<std::byte>> SealBlob(const BlobContents& contents, const KeyRing& keys) {
  BlobHeader header = HeaderOf(contents, kSealedVersion);
  header.cipher = static_cast<uint32_t>(keys.cipher());
  SealedPart part{};
  const KeyId& id = keys.newest().id();
  std::memcpy(part.key, id.bytes.data(), id.bytes.size());
  RandomBytes(part.file);
  PREFIXD_ASSIGN(const auto cipher,
                 FileCipher::Of(keys.newest(), keys.cipher(), FileKind::kBlob, part.file));
  std::vector<std::byte> file = FileOf(contents, kSealedBlobHeaderBytes);
  const std::span body = std::span(file).subspan(kSealedBlobHeaderBytes);
  cipher->Seal(0, body, body.data(), reinterpret_cast<std::byte*>(part.tag),
               BesideOf(header, part));
  std::memcpy(file.data() + sizeof(header), &part, sizeof(part));
  Finish(header, file);
  return file;
}

Result<BlobContents> DecodeBlob(std::span<const std::byte> file) {
  PREFIXD_ASSIGN(const BlobHeader header, CheckedHeader(file, kVersion));
  if (header.cipher != 0) return DamagedBlob();
  return ContentsOf(header, file.subspan(sizeof(header)));
}

Result<BlobContents> OpenBlob(std::span<std::byte> file, const KeyRing* keys) {
  PREFIXD_ASSIGN(const BlobHeader header, CheckedHeader(file, kSealedVersion));
  if (header.version == kVersion) {
    if (header.cipher != 0) return DamagedBlob();
    return ContentsOf(header, file.subspan(sizeof(header)));
  }
  const auto key = KeyOfBlob(file);
  if (!key || header.cipher == 0) return DamagedBlob();
  if (!KnownCipher(header.cipher)) {
    return Error{Code::kFailedPrecondition, "is encrypted with a cipher of a newer prefixd"};
  }
  SealedPart part;
  std::memcpy(&part, file.data() + sizeof(header), sizeof(part));
  auto cipher =
      CipherOf(keys, *key, static_cast<CipherKind>(header.cipher), FileKind::kBlob, part.file);
  if (!cipher.ok()) {
    return Error{cipher.error().code, "cannot be read: " + cipher.error().message};
  }
  const std::span body = file.subspan(kSealedBlobHeaderBytes);
  if (!(*cipher)->Open(0, body, reinterpret_cast<const std::byte*>(part.tag),
                       BesideOf(header, part))) {
    return DamagedBlob();
  }
  return ContentsOf(header, body);
}

std::optional<KeyId> KeyOfBlob(std::span<const std::byte> file) {
  if (file.size() < kSealedBlobHeaderBytes) return std::nullopt;
  BlobHeader header;
  std::memcpy(&header, file.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.version != kSealedVersion) {
    return std::nullopt;
  }
  KeyId key;
  std::memcpy(key.bytes.data(), file.data() + sizeof(header), key.bytes.size());
  return key;
}

}  // namespace prefixd::storage
