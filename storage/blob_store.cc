#include "storage/blob_store.h"

#include <fcntl.h>
#include <xxhash.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "storage/crash_point.h"
#include "storage/errors.h"
#include "storage/file.h"
#include "storage/store_dir.h"

namespace prefixd::storage {
namespace {

constexpr char kMagic[8] = {'P', 'F', 'X', 'B', 'L', 'O', 'B', '\n'};
constexpr uint32_t kVersion = 1;

// docs/format.md. Followed by name, producer and payload; `checksum` (XXH3-64) covers the whole
// file with itself taken as zero.
struct BlobHeader {
  char magic[8];
  uint32_t version, name_bytes, producer_bytes, reserved;
  uint8_t segment[16];
  uint64_t payload_bytes;
  uint64_t reserved2;
  uint64_t checksum;
};
static_assert(sizeof(BlobHeader) == 64, "the format changed: raise kVersion");

uint64_t ChecksumOf(std::vector<std::byte>& file) {
  std::memset(file.data() + offsetof(BlobHeader, checksum), 0, sizeof(uint64_t));
  return XXH3_64bits(file.data(), file.size());
}

}  // namespace

Status BlobStore::Put(const SegmentId& id, std::string_view name, std::string_view producer,
                      std::span<const std::byte> bytes) {
  BlobHeader header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.name_bytes = static_cast<uint32_t>(name.size());
  header.producer_bytes = static_cast<uint32_t>(producer.size());
  std::memcpy(header.segment, id.bytes.data(), id.bytes.size());
  header.payload_bytes = bytes.size();
  std::vector<std::byte> file;
  file.reserve(sizeof(header) + name.size() + producer.size() + bytes.size());
  const auto append = [&file](std::span<const std::byte> part) {
    file.insert(file.end(), part.begin(), part.end());
  };
  append(std::as_bytes(std::span(&header, 1)));
  append(std::as_bytes(std::span(name)));
  append(std::as_bytes(std::span(producer)));
  append(bytes);
  const uint64_t sum = ChecksumOf(file);
  std::memcpy(file.data() + offsetof(BlobHeader, checksum), &sum, sizeof(sum));

  const std::filesystem::path path = BlobPath(dir_, id, name);
  std::filesystem::path temp = path;
  temp += "." + std::to_string(temp_counter_++) + ".tmp";
  Status written = [&]() -> Status {
    PREFIXD_ASSIGN(UniqueFd fd, OpenFile(temp, O_WRONLY | O_CREAT | O_EXCL));
    CrashPoint("blob.created");
    PREFIXD_TRY(
        WriteFully(engine_, fd.get(), 0, file, IoPriority::kWrite, "writing " + temp.string()));
    CrashPoint("blob.before_sync");
    return DataSync(engine_, fd.get(), "syncing " + temp.string());
  }();
  if (!written.ok()) {
    if (Status removed = RemoveFile(temp); !removed.ok()) LogWarning(removed.error().message);
    return written;
  }
  CrashPoint("blob.before_rename");
  {
    // Two puts of one name: the later rename wins, and the map says its size.
    std::lock_guard lock(mutex_);
    if (std::rename(temp.c_str(), path.c_str()) != 0) {
      return ErrnoError(errno, "cannot rename " + temp.string());
    }
    uint64_t& size = files_[id][std::string(name)];
    total_bytes_ += file.size() - size;
    size = file.size();
  }
  CrashPoint("blob.before_directory_sync");
  return SyncDirectory(path.parent_path());
}

Result<BlobStore::Blob> BlobStore::Read(const SegmentId& id, std::string_view name) const {
  const std::filesystem::path path = BlobPath(dir_, id, name);
  PREFIXD_ASSIGN(UniqueFd fd, OpenFile(path, O_RDONLY));
  PREFIXD_ASSIGN(const uint64_t bytes, FileBytes(fd.get(), path));
  const Error damaged{Code::kCorrupt, "blob " + path.string() + " is damaged"};
  if (bytes < sizeof(BlobHeader)) return damaged;
  std::vector<std::byte> file(bytes);
  PREFIXD_TRY(
      ReadFully(engine_, fd.get(), 0, file, IoPriority::kStepRead, "reading " + path.string()));
  BlobHeader header;
  std::memcpy(&header, file.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 ||
      ChecksumOf(file) != header.checksum) {
    return damaged;
  }
  if (header.version != kVersion) {
    return Error{Code::kFailedPrecondition, "blob " + path.string() + " has format version " +
                                                std::to_string(header.version) +
                                                "; this prefixd reads version 1"};
  }
  const uint64_t names = uint64_t{header.name_bytes} + header.producer_bytes;
  if (bytes - sizeof(header) < names || bytes - sizeof(header) - names != header.payload_bytes ||
      header.name_bytes != name.size() ||
      std::memcmp(file.data() + sizeof(header), name.data(), name.size()) != 0 ||
      std::memcmp(header.segment, id.bytes.data(), id.bytes.size()) != 0) {
    return damaged;
  }
  Blob blob;
  const auto* producer =
      reinterpret_cast<const char*>(file.data()) + sizeof(header) + header.name_bytes;
  blob.producer.assign(producer, header.producer_bytes);
  blob.file_bytes = bytes;
  file.erase(file.begin(), file.begin() + static_cast<ptrdiff_t>(sizeof(header) + names));
  blob.payload = std::move(file);
  return blob;
}

Result<std::vector<std::byte>> BlobStore::Get(const SegmentId& id, std::string_view name,
                                              std::string_view producer) const {
  auto blob = Read(id, name);
  if (!blob.ok() && blob.error().code == Code::kCorrupt) blob = Read(id, name);
  if (!blob.ok()) {
    if (blob.error().code == Code::kNotFound) {
      return Error{Code::kNotFound,
                   "prefix " + id.ToString() + " has no blob '" + std::string(name) + "'"};
    }
    return blob.error();
  }
  if (blob->producer != producer) {
    return Error{Code::kNotFound, "blob '" + std::string(name) + "' of prefix " + id.ToString() +
                                      " was made by '" + blob->producer + "', not by '" +
                                      std::string(producer) + "'"};
  }
  return std::move(blob->payload);
}

Result<uint64_t> BlobStore::Check(const SegmentId& id, std::string_view name) const {
  PREFIXD_ASSIGN(const Blob blob, Read(id, name));
  return blob.file_bytes;
}

std::vector<std::string> BlobStore::List(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  if (const auto it = files_.find(id); it != files_.end()) {
    for (const auto& [name, bytes] : it->second) names.push_back(name);
  }
  return names;
}

uint64_t BlobStore::BytesOf(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  uint64_t sum = 0;
  if (const auto it = files_.find(id); it != files_.end()) {
    for (const auto& [name, bytes] : it->second) sum += bytes;
  }
  return sum;
}

uint64_t BlobStore::TotalBytes() const {
  std::lock_guard lock(mutex_);
  return total_bytes_;
}

void BlobStore::Register(const SegmentId& id, std::string_view name, uint64_t file_bytes) {
  std::lock_guard lock(mutex_);
  files_[id][std::string(name)] = file_bytes;
  total_bytes_ += file_bytes;
}

Status BlobStore::RemoveAll(const SegmentId& id) {
  std::map<std::string, uint64_t, std::less<>> names;
  {
    std::lock_guard lock(mutex_);
    const auto it = files_.find(id);
    if (it == files_.end()) return {};
    names = std::move(it->second);
    files_.erase(it);
    for (const auto& [name, bytes] : names) total_bytes_ -= bytes;
  }
  for (const auto& [name, bytes] : names) {
    CrashPoint("remove.before_blob");
    PREFIXD_TRY(RemoveFile(BlobPath(dir_, id, name)));
  }
  return {};
}

}  // namespace prefixd::storage
