#include "runtime/derived/blob_pack.h"

#include <cstdint>
#include <cstring>

namespace prefixd {
namespace {

constexpr uint32_t kPackMagic = 0x50425850;  // "PXBP"
constexpr uint32_t kPackVersion = 1;
constexpr size_t kPackHeaderBytes = 16;

Error MalformedPack(const char* what) {
  return {Code::kCorrupt, std::string("a stored summary blob is malformed: ") + what};
}

}  // namespace

std::vector<std::byte> PackBlob(std::span<const std::vector<std::byte>> entries) {
  size_t total = kPackHeaderBytes + entries.size() * sizeof(uint64_t);
  for (const auto& entry : entries) total += entry.size();
  std::vector<std::byte> blob(total);
  const uint32_t header[4] = {kPackMagic, kPackVersion, static_cast<uint32_t>(entries.size()), 0};
  std::memcpy(blob.data(), header, kPackHeaderBytes);
  std::byte* sizes = blob.data() + kPackHeaderBytes;
  std::byte* out = sizes + entries.size() * sizeof(uint64_t);
  for (const auto& entry : entries) {
    const uint64_t size = entry.size();
    std::memcpy(sizes, &size, sizeof(size));
    sizes += sizeof(size);
    if (size > 0) std::memcpy(out, entry.data(), size);
    out += size;
  }
  return blob;
}

Result<std::vector<std::span<const std::byte>>> UnpackBlob(std::span<const std::byte> blob,
                                                           size_t count) {
  uint32_t header[4];
  if (blob.size() < kPackHeaderBytes) return MalformedPack("too short");
  std::memcpy(header, blob.data(), kPackHeaderBytes);
  if (header[0] != kPackMagic || header[1] != kPackVersion)
    return MalformedPack("unknown magic or version");
  if (header[3] != 0) return MalformedPack("unknown fields");
  if (header[2] != count) return MalformedPack("it is of another geometry");
  if ((blob.size() - kPackHeaderBytes) / sizeof(uint64_t) < count)
    return MalformedPack("too short");
  std::vector<std::span<const std::byte>> entries(count);
  size_t at = kPackHeaderBytes + count * sizeof(uint64_t);
  for (size_t i = 0; i < count; ++i) {
    uint64_t size = 0;
    std::memcpy(&size, blob.data() + kPackHeaderBytes + i * sizeof(size), sizeof(size));
    if (size > blob.size() - at) return MalformedPack("an entry runs past its end");
    entries[i] = blob.subspan(at, size);
    at += size;
  }
  if (at != blob.size()) return MalformedPack("bytes after the last entry");
  return entries;
}

}  // namespace prefixd
