#include "storage/recover/recover_scan.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <system_error>

#include "base/capture_errors.h"
#include "storage/catalog/segment_inspect.h"
#include "storage/catalog/store_dir.h"
#include "storage/io/file.h"
#include "storage/io/together.h"
#include "storage/read/page_reader.h"

namespace prefixd::storage {
namespace fs = std::filesystem;
namespace {

constexpr size_t kFilesAtOnce = 128;  // between two reports of progress
// Of the files that are looked at together. While one is, its checksum table is in memory twice, a
// 512th of the file (a 256th if it is encrypted), and its token ids are.
constexpr uint64_t kBytesAtOnce = 32ull << 30;
// What lies before and behind the rows of a short prompt is read with them, in one piece.
constexpr off_t kSmallFile = 128 << 10;

// Has the file read anew, and a small one at once: its parts are then many reads of the page cache
// and one of the disk.
void ReadAnew(const fs::path& path) {
  const auto fd = OpenMaybeDirect(path, O_RDONLY, false);
  struct stat info {};
  if (!fd.ok() || ::fstat(fd->get(), &info) != 0) return;  // inspecting it tells
  ::posix_fadvise(fd->get(), 0, 0, POSIX_FADV_DONTNEED);
  if (info.st_size <= kSmallFile) ::posix_fadvise(fd->get(), 0, 0, POSIX_FADV_WILLNEED);
}

class Scanner {
 public:
  Scanner(IoEngine& engine, const fs::path& dir, bool verify_data, const KeyRing* keys,
          const Progress& progress)
      : engine_(engine), dir_(dir), verify_data_(verify_data), keys_(keys), progress_(progress) {}

  Result<SegmentScan> Run() {
    PREFIXD_TRY(List());
    std::vector<Inspected> inspected(std::min(files_.size(), kFilesAtOnce));
    for (size_t begin = 0; begin < files_.size();) {
      const size_t n = BatchFrom(begin);
      PREFIXD_TRY(Together(n, kReadsAtOnce, [&](size_t i) -> Status {
        inspected[i] = Inspect(files_[begin + i].path);
        return {};
      }));
      for (size_t i = 0; i < n; ++i) {
        const Listed& file = files_[begin + i];
        const uint64_t before = done_pages_;
        PREFIXD_TRY(Take(std::move(inspected[i]), file));
        done_pages_ = before + file.bytes / kPageBytes;
        PREFIXD_TRY(Report());
      }
      begin += n;
    }
    return std::move(scan_);
  }

 private:
  struct Listed {
    fs::path path;
    Uuid name{};
    uint64_t bytes = 0;  // 0, too, where the size cannot be read: inspecting it tells
  };
  struct Inspected {
    Result<FoundSegment> found = FoundSegment{};
    std::shared_ptr<const SegmentFile> file;  // of sound ones whose rows are to be verified
    bool unfinished = false;
  };

  Status List() {
    PREFIXD_ASSIGN(const auto entries, ListDirectory(dir_ / "segments"));
    for (const fs::directory_entry& entry : entries) {
      const auto parsed = ParseSegmentsEntry(entry.path().filename().string());
      if (parsed && parsed->blob.empty()) files_.push_back({entry.path(), parsed->id});
    }
    PREFIXD_TRY(Together(files_.size(), kReadsAtOnce, [&](size_t i) -> Status {
      std::error_code error;
      const uint64_t bytes = fs::file_size(files_[i].path, error);
      if (!error) files_[i].bytes = bytes;
      return {};
    }));
    for (const Listed& file : files_) total_pages_ += file.bytes / kPageBytes;
    return {};
  }

  // Returns how many files from this one on are looked at together, one at least.
  size_t BatchFrom(size_t begin) const {
    uint64_t bytes = 0;
    size_t end = begin;
    for (; end < files_.size() && end - begin < kFilesAtOnce; ++end) {
      bytes += files_[end].bytes;
      if (end > begin && bytes > kBytesAtOnce) break;
    }
    return end - begin;
  }

  Status Report() const {
    if (!progress_ || progress_(std::min(done_pages_, total_pages_), total_pages_, "pages")) {
      return {};
    }
    return Error{Code::kCancelled, "recovery was stopped; nothing has changed"};
  }

  Result<InspectedSegment> Look(const fs::path& path, bool direct) const {
    Result<InspectedSegment> looked = InspectedSegment{};
    PREFIXD_TRY(CaptureErrors([&]() -> Status {
      looked = InspectSegment(engine_, path, direct, keys_);
      return {};
    }));
    return looked;
  }

  Inspected Inspect(const fs::path& path) const {
    if (!verify_data_) ReadAnew(path);
    Result<InspectedSegment> looked = Look(path, verify_data_);
    // A transient fault, which the page cache may keep, must not condemn the file.
    if (!looked.ok() && looked.error().code != Code::kFailedPrecondition) {
      looked = Look(path, /*direct=*/true);
    }
    Inspected out;
    if (!looked.ok()) {
      out.unfinished =
          looked.error().code == Code::kCorrupt && IsUnfinished(engine_, path, /*direct=*/true);
      out.found = std::move(looked).error();
      return out;
    }
    out.found = FoundSegment{path, looked->file->header().store, looked->file->record(),
                             std::move(looked->manifest), ""};
    if (verify_data_) out.file = std::move(looked->file);
    return out;
  }

  Status Take(Inspected inspected, const Listed& file) {
    if (!inspected.found.ok()) {
      const Error& error = inspected.found.error();
      if (error.code == Code::kFailedPrecondition) return error;
      if (error.code != Code::kCorrupt) return CannotRead(file.path, error);
      if (inspected.unfinished) {
        scan_.unfinished.push_back(file.path);
      } else {
        scan_.damaged.emplace_back(file.path, error.message);
      }
      return {};
    }
    FoundSegment found = *std::move(inspected.found);
    if (found.record.file != file.name) {
      scan_.damaged.emplace_back(file.path, "it carries the name of another file");
      return {};
    }
    scan_.stores[found.store].push_back(file.path);
    if (verify_data_) PREFIXD_TRY(VerifyRows(*inspected.file, found));
    scan_.found.push_back(std::move(found));
    return {};
  }

  Status VerifyRows(const SegmentFile& file, FoundSegment& found) {
    std::atomic<uint64_t> bytes_read{0}, failures{0};
    ReadServices services;
    services.engine = &engine_;
    services.bytes_read = &bytes_read;
    services.checksum_failures = &failures;
    services.on_corrupt = [](const SegmentId&, const std::string&) {};
    bool stopped = false;
    uint64_t verified = 0;
    const auto verify = [&] {
      return VerifyAllPages(
          services, file,
          [&](uint64_t n) {
            verified += n;
            done_pages_ += n;
            stopped = !Report().ok();
            return !stopped;
          },
          /*first_page=*/verified);
    };
    Status sound = verify();
    if (!sound.ok() && !stopped && sound.error().code != Code::kCorrupt) sound = verify();
    if (sound.ok()) return {};
    if (stopped) return sound;
    if (sound.error().code != Code::kCorrupt) return CannotRead(found.path, sound.error());
    found.damage = sound.error().message;
    return {};
  }

  IoEngine& engine_;
  const fs::path& dir_;
  const bool verify_data_;
  const KeyRing* const keys_;
  const Progress& progress_;
  std::vector<Listed> files_;
  uint64_t done_pages_ = 0, total_pages_ = 0;
  SegmentScan scan_;
};

}  // namespace

Error CannotRead(const fs::path& file, const Error& error) {
  return {error.code == Code::kNotFound ? Code::kIo : error.code,
          "the segment " + file.string() + " cannot be read: " + error.message +
              ". It may be sound, so recovery has ended and left the store as it was: remove what "
              "keeps the file from being read and recover again; if it is lost, move it out of the "
              "store first"};
}

Result<SegmentScan> ScanSegments(IoEngine& engine, const fs::path& dir, bool verify_data,
                                 const KeyRing* keys, const Progress& progress) {
  return Scanner(engine, dir, verify_data, keys, progress).Run();
}

}  // namespace prefixd::storage
