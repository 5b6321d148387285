#include "storage/files/blob_store.h"

#include <fcntl.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <thread>

#include "storage/catalog/store_dir.h"
#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/io/file.h"
#include "storage/io/owned_read.h"
#include "storage/segment/blob_format.h"

namespace prefixd::storage {

namespace {

// Pauses before a blob that the system could not read is read again: a disk under load, or a kernel
// short of memory, mostly answers by then.
constexpr std::chrono::milliseconds kPauses[] = {
    std::chrono::milliseconds(2), std::chrono::milliseconds(10), std::chrono::milliseconds(50)};

}  // namespace

uint64_t BlobStore::BytesFor(std::string_view name, std::string_view producer,
                             size_t payload) const {
  return (keys_ ? kSealedBlobHeaderBytes : kBlobHeaderBytes) + name.size() + producer.size() +
         payload;
}

Status BlobStore::Put(const SegmentId& id, const std::string& tenant, std::string_view name,
                      std::string_view producer, std::span<const std::byte> bytes) {
  const auto written = Write(id, tenant, name, producer, bytes, 0);
  return written.ok() ? Status() : written.error();
}

Result<bool> BlobStore::Write(const SegmentId& id, const std::string& tenant, std::string_view name,
                              std::string_view producer, std::span<const std::byte> bytes,
                              uint64_t version) {
  std::vector<std::byte> file;
  if (keys_) {
    PREFIXD_ASSIGN(file, SealBlob({id, name, producer, bytes}, *keys_));
  } else {
    file = EncodeBlob({id, name, producer, bytes});
  }
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
    return written.error();
  }
  CrashPoint("blob.before_rename");
  {
    // When two puts of one name race, the later rename wins; the lock makes the map hold its size.
    std::lock_guard lock(mutex_);
    if (version != 0 && VersionOf(id, name) != version) {
      PREFIXD_TRY(RemoveFile(temp));
      return false;
    }
    if (std::rename(temp.c_str(), path.c_str()) != 0) {
      return ErrnoError(errno, "cannot rename " + temp.string());
    }
    Note(id, tenant, name, file.size());
  }
  CrashPoint("blob.before_directory_sync");
  PREFIXD_TRY(SyncDirectory(path.parent_path()));
  return true;
}

uint64_t BlobStore::VersionOf(const SegmentId& id, std::string_view name) const {
  const auto it = files_.find(id);
  if (it == files_.end()) return 0;
  const auto file = it->second.blobs.find(name);
  return file == it->second.blobs.end() ? 0 : file->second.version;
}

Result<bool> BlobStore::Reencrypt(const SegmentId& id, const std::string& tenant,
                                  std::string_view name) {
  uint64_t before = 0;
  {
    std::lock_guard lock(mutex_);
    before = VersionOf(id, name);
  }
  const auto blob = ReadPatiently(id, name, IoPriority::kScrub);
  if (!blob.ok()) {
    const bool gone = blob.error().code == Code::kNotFound || blob.error().code == Code::kCorrupt;
    return gone ? Result<bool>(false) : blob.error();
  }
  // Who replaced it meanwhile encrypted it.
  if (before == 0 || blob->key == keys_->newest().id()) return false;
  return Write(id, tenant, name, blob->producer, blob->payload, before);
}

Result<BlobStore::Blob> BlobStore::Read(const SegmentId& id, std::string_view name,
                                        IoPriority priority) const {
  const std::filesystem::path path = BlobPath(dir_, id, name);
  PREFIXD_ASSIGN(UniqueFd opened, OpenFile(path, O_RDONLY));
  const auto fd = std::make_shared<const UniqueFd>(std::move(opened));
  PREFIXD_ASSIGN(const uint64_t bytes, FileBytes(fd->get(), path));
  const auto deadline =
      priority == IoPriority::kScrub ? std::chrono::milliseconds(0) : read_deadline_;
  PREFIXD_ASSIGN(const AlignedBuffer file,
                 ReadOwned(engine_, fd, 0, bytes, priority, deadline, "reading " + path.string()));
  const auto key = KeyOfBlob(file.span());
  const auto decoded = OpenBlob(file.span(), keys_.get());
  if (!decoded.ok()) {
    return Error{decoded.error().code, "blob " + path.string() + " " + decoded.error().message};
  }
  if (decoded->segment != id || decoded->name != name) {
    return Error{Code::kCorrupt, "blob " + path.string() + " is that of another segment or name"};
  }
  Blob blob;
  blob.producer = decoded->producer;
  blob.file_bytes = bytes;
  blob.key = key;
  blob.payload.assign(decoded->payload.begin(), decoded->payload.end());
  return blob;
}

Result<std::vector<std::byte>> BlobStore::Get(const SegmentId& id, std::string_view name,
                                              std::string_view producer) const {
  auto blob = ReadPatiently(id, name, IoPriority::kStepRead);
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

Result<BlobStore::Blob> BlobStore::ReadPatiently(const SegmentId& id, std::string_view name,
                                                 IoPriority priority) const {
  auto blob = Read(id, name, priority);
  for (const auto pause : kPauses) {
    // kUnavailable: the disk kept silent until the deadline, and the caller has waited long enough.
    const bool refused = !blob.ok() && (blob.error().code == Code::kIo ||
                                        blob.error().code == Code::kResourceExhausted);
    if (!refused) break;
    std::this_thread::sleep_for(pause);
    blob = Read(id, name, priority);
  }
  if (!blob.ok() && blob.error().code == Code::kCorrupt) return Read(id, name, priority);
  return blob;
}

Result<uint64_t> BlobStore::Check(const SegmentId& id, std::string_view name,
                                  IoPriority priority) const {
  PREFIXD_ASSIGN(const Blob blob, ReadPatiently(id, name, priority));
  return blob.file_bytes;
}

Result<bool> BlobStore::DropDamaged(const SegmentId& id, std::string_view name) {
  // Statistics and other blobs do not wait for the read. The version tells whether the file is
  // still the one that was read: renames take the lock.
  std::unique_lock lock(mutex_);
  const uint64_t before = VersionOf(id, name);
  lock.unlock();
  const auto blob = ReadPatiently(id, name, IoPriority::kStepRead);
  if (blob.ok() || blob.error().code != Code::kCorrupt) return false;
  lock.lock();
  if (before == 0 || VersionOf(id, name) != before) return false;
  PREFIXD_TRY(RemoveLocked(id, name));
  return true;
}

Status BlobStore::Remove(const SegmentId& id, std::string_view name) {
  std::lock_guard lock(mutex_);
  return RemoveLocked(id, name);
}

Status BlobStore::RemoveLocked(const SegmentId& id, std::string_view name) {
  PREFIXD_TRY(RemoveFile(BlobPath(dir_, id, name)));
  const auto it = files_.find(id);
  if (it == files_.end()) return {};
  Files& files = it->second;
  if (const auto file = files.blobs.find(name); file != files.blobs.end()) {
    usage_.Subtract(files.tenant, file->second.bytes);
    files.blobs.erase(file);
  }
  return {};
}

std::vector<std::string> BlobStore::List(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  if (const auto it = files_.find(id); it != files_.end()) {
    for (const auto& [name, file] : it->second.blobs) names.push_back(name);
  }
  return names;
}

uint64_t BlobStore::BytesOf(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  uint64_t sum = 0;
  if (const auto it = files_.find(id); it != files_.end()) {
    for (const auto& [name, file] : it->second.blobs) sum += file.bytes;
  }
  return sum;
}

TenantBytes BlobStore::Usage() const {
  std::lock_guard lock(mutex_);
  return usage_;
}

uint64_t BlobStore::TotalBytes() const {
  std::lock_guard lock(mutex_);
  return usage_.total();
}

void BlobStore::Note(const SegmentId& id, const std::string& tenant, std::string_view name,
                     uint64_t file_bytes) {
  Files& files = files_[id];
  files.tenant = tenant;
  File& file = files.blobs[std::string(name)];
  usage_.Subtract(tenant, file.bytes);
  usage_.Add(tenant, file_bytes);
  file = {file_bytes, ++last_version_};
}

void BlobStore::Register(const SegmentId& id, const std::string& tenant, std::string_view name,
                         uint64_t file_bytes) {
  std::lock_guard lock(mutex_);
  Note(id, tenant, name, file_bytes);
}

Status BlobStore::RemoveAll(const SegmentId& id) {
  Files files;
  {
    std::lock_guard lock(mutex_);
    const auto it = files_.find(id);
    if (it == files_.end()) return {};
    files = std::move(it->second);
    files_.erase(it);
    for (const auto& [name, file] : files.blobs) usage_.Subtract(files.tenant, file.bytes);
  }
  for (const auto& [name, file] : files.blobs) {
    CrashPoint("remove.before_blob");
    PREFIXD_TRY(RemoveFile(BlobPath(dir_, id, name)));
  }
  return {};
}

}  // namespace prefixd::storage
