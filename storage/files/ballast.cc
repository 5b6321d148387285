#include "storage/files/ballast.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <string>
#include <utility>

#include "storage/io/errors.h"
#include "storage/io/file.h"

namespace prefixd::storage {
namespace {

// Below this many free bytes the ballast goes. They suffice for a write-ahead log and a table file
// of the catalog.
constexpr uint64_t kCatalogRoom = 8ull << 20;
// Below this many free bytes nothing is written, ballast or not.
constexpr uint64_t kCatalogFloor = 1ull << 20;

}  // namespace

Ballast::Ballast(std::filesystem::path path, uint64_t bytes)
    : path_(std::move(path)), bytes_(bytes) {
  struct stat st {};
  const bool there = ::stat(path_.c_str(), &st) == 0;
  // A ballast file that a crash cut short, or that is sparse, holds nothing free.
  held_ = there && bytes_ > 0 && static_cast<uint64_t>(st.st_size) == bytes_ &&
          static_cast<uint64_t>(st.st_blocks) * 512 >= bytes_;
  if (there && !held_) (void)RemoveFile(path_);
}

Status Ballast::MakeRoom() {
  std::lock_guard lock(mutex_);
  PREFIXD_TRY(CheckWritable(path_.parent_path()));
  PREFIXD_ASSIGN(uint64_t free, FreeBytes(path_.parent_path()));
  if (free < kCatalogRoom && held_) {
    PREFIXD_TRY(RemoveFile(path_));
    held_ = false;
    LogWarning("the disk is full: the ballast of " + std::to_string(bytes_) +
               " bytes was given away so that prefixes can be removed");
    PREFIXD_ASSIGN(free, FreeBytes(path_.parent_path()));
  }
  if (free >= kCatalogFloor) return {};
  return Error{Code::kResourceExhausted,
               "the disk is full: " + std::to_string(free) + " bytes are free and the catalog " +
                   "needs " + std::to_string(kCatalogFloor) +
                   " to change anything; free space on the disk. Nothing was changed, and what is "
                   "stored is served"};
}

void Ballast::Restore(uint64_t keep_free) {
  std::lock_guard lock(mutex_);
  if (held_ || bytes_ == 0) return;
  const auto free = FreeBytes(path_.parent_path());
  if (!free.ok() || *free < bytes_ || *free - bytes_ < keep_free) return;
  auto file = OpenFile(path_, O_WRONLY | O_CREAT | O_TRUNC);
  // Unlike Preallocate this never leaves a file without blocks.
  const int error = file.ok() ? ::posix_fallocate(file->get(), 0, static_cast<off_t>(bytes_)) : EIO;
  held_ = error == 0;
  if (!held_) (void)RemoveFile(path_);  // the disk filled up meanwhile: a later call tries again
}

}  // namespace prefixd::storage
