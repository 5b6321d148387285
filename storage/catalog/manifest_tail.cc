#include "storage/catalog/manifest_tail.h"

#include <algorithm>
#include <boost/crc.hpp>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "storage/catalog/store_dir.h"

namespace prefixd::storage {
namespace {

constexpr size_t kBlock = 32768, kHeader = 7;
constexpr uint8_t kFull = 1, kLast = 4;  // the types of records in a MANIFEST: 1 to 4

using Crc32c = boost::crc_optimal<32, 0x1EDC6F41, 0xFFFFFFFF, 0xFFFFFFFF, true, true>;

// Returns the size in bytes of the record at `at` if it is sound, else 0.
size_t SoundRecord(std::span<const std::byte> bytes, size_t at) {
  const size_t room = std::min(bytes.size(), (at / kBlock + 1) * kBlock) - at;
  if (room < kHeader) return 0;
  const auto byte = [&](size_t i) { return std::to_integer<uint32_t>(bytes[at + i]); };
  const uint32_t masked = byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24;
  const size_t length = byte(4) | byte(5) << 8;
  const uint32_t type = byte(6);
  if (type < kFull || type > kLast || kHeader + length > room) return 0;
  Crc32c crc;
  crc.process_bytes(&bytes[at + kHeader - 1], 1 + length);  // the checksum covers the type too
  const uint32_t rotated = crc.checksum() >> 15 | crc.checksum() << 17;
  return rotated + 0xa282ead8u == masked ? kHeader + length : 0;
}

Result<std::vector<std::byte>> ReadAll(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in.good() && !in.eof()) return Error{Code::kIo, "cannot read '" + path.string() + "'"};
  const auto bytes = std::as_bytes(std::span(text));
  return std::vector<std::byte>(bytes.begin(), bytes.end());
}

Status Replace(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  return WriteFileAtomically(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

}  // namespace

std::optional<size_t> TornManifestTail(std::span<const std::byte> manifest) {
  size_t at = 0;
  while (at < manifest.size()) {
    const size_t left = kBlock - at % kBlock;
    if (left < kHeader) {  // a block's last bytes are padding
      at += left;
      continue;
    }
    const size_t record = SoundRecord(manifest, at);
    if (record == 0) break;
    at += record;
  }
  if (at >= manifest.size()) return std::nullopt;
  // A sound record further on means damage in the middle, which cutting would make worse.
  for (size_t later = at + 1; later + kHeader <= manifest.size(); ++later) {
    if (SoundRecord(manifest, later) > kHeader) return std::nullopt;
  }
  return at;
}

Result<std::optional<CutManifest>> CutTornManifest(const std::filesystem::path& dir) {
  PREFIXD_ASSIGN(const auto current, ReadAll(dir / "CURRENT"));
  std::string name(reinterpret_cast<const char*>(current.data()), current.size());
  while (name.ends_with('\n')) name.pop_back();
  if (!name.starts_with("MANIFEST-") || name.find('/') != std::string::npos) {
    return std::optional<CutManifest>();
  }
  CutManifest cut{dir / name, {}};
  PREFIXD_ASSIGN(cut.before, ReadAll(cut.file));
  const auto torn = TornManifestTail(cut.before);
  if (!torn || *torn == 0) return std::optional<CutManifest>();
  PREFIXD_TRY(Replace(cut.file, std::span(cut.before).first(*torn)));
  return std::optional(std::move(cut));
}

Status Restore(const CutManifest& cut) { return Replace(cut.file, cut.before); }

}  // namespace prefixd::storage
