#include "storage/recover/recover_scan.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <system_error>

#include "storage/catalog/segment_inspect.h"
#include "storage/catalog/store_dir.h"
#include "storage/io/file.h"
#include "storage/io/together.h"
#include "storage/read/page_reader.h"

namespace prefixd::storage {
namespace fs = std::filesystem;
namespace {

constexpr size_t kFilesAtOnce = 128;  // open
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
    PREFIXD_ASSIGN(const auto entries, ListDirectory(dir_ / "segments"));
    std::vector<std::pair<fs::path, Uuid>> files;
    std::error_code ignored;
    for (const fs::directory_entry& entry : entries) {
      const auto parsed = ParseSegmentsEntry(entry.path().filename().string());
      if (!parsed || !parsed->blob.empty()) continue;
      files.emplace_back(entry.path(), parsed->id);
      total_pages_ += entry.file_size(ignored) / kPageBytes;
    }
    std::vector<Inspected> inspected(std::min(files.size(), kFilesAtOnce));
    for (size_t begin = 0; begin < files.size(); begin += kFilesAtOnce) {
      const size_t n = std::min(kFilesAtOnce, files.size() - begin);
      PREFIXD_TRY(Together(n, kReadsAtOnce, [&](size_t i) -> Status {
        inspected[i] = Inspect(files[begin + i].first);
        return {};
      }));
      for (size_t i = 0; i < n; ++i) {
        const auto& [path, name] = files[begin + i];
        const uint64_t before = done_pages_;
        PREFIXD_TRY(Take(std::move(inspected[i]), path, name));
        done_pages_ = before + fs::file_size(path, ignored) / kPageBytes;
        PREFIXD_TRY(Report());
      }
    }
    return std::move(scan_);
  }

 private:
  Status Report() const {
    if (!progress_ || progress_(std::min(done_pages_, total_pages_), total_pages_, "pages")) {
      return {};
    }
    return Error{Code::kCancelled, "recovery was stopped; nothing has changed"};
  }

  struct Inspected {
    Result<InspectedSegment> segment = InspectedSegment{};
    bool unfinished = false;
  };
  Inspected Inspect(const fs::path& path) const {
    if (!verify_data_) ReadAnew(path);
    Inspected out{InspectSegment(engine_, path, verify_data_, keys_), false};
    if (out.segment.ok() || out.segment.error().code != Code::kCorrupt) return out;
    // A transient fault that the page cache keeps must not condemn the file.
    if (!verify_data_) out.segment = InspectSegment(engine_, path, /*direct=*/true, keys_);
    out.unfinished = !out.segment.ok() && out.segment.error().code == Code::kCorrupt &&
                     IsUnfinished(engine_, path, /*direct=*/true);
    return out;
  }

  Status Take(Inspected looked, const fs::path& path, const Uuid& name) {
    Result<InspectedSegment>& inspected = looked.segment;
    if (!inspected.ok()) {
      const Error& error = inspected.error();
      if (error.code == Code::kFailedPrecondition) return error;
      if (looked.unfinished) {
        scan_.unfinished.push_back(path);
      } else {
        scan_.damaged.emplace_back(path, error.message);
      }
      return {};
    }
    FoundSegment found{path, inspected->file->header().store, inspected->file->record(),
                       std::move(inspected->manifest), ""};
    if (found.record.file != name) {
      scan_.damaged.emplace_back(path, "it carries the name of another file");
      return {};
    }
    scan_.stores[inspected->file->header().store].push_back(path);
    if (verify_data_) PREFIXD_TRY(VerifyRows(*inspected->file, found));
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
    Status sound = VerifyAllPages(services, file, [&](uint64_t n) {
      done_pages_ += n;
      stopped = !Report().ok();
      return !stopped;
    });
    if (stopped) return sound;
    if (!sound.ok()) found.damage = sound.error().message;
    return {};
  }

  IoEngine& engine_;
  const fs::path& dir_;
  const bool verify_data_;
  const KeyRing* const keys_;
  const Progress& progress_;
  uint64_t done_pages_ = 0, total_pages_ = 0;
  SegmentScan scan_;
};

}  // namespace

Result<SegmentScan> ScanSegments(IoEngine& engine, const fs::path& dir, bool verify_data,
                                 const KeyRing* keys, const Progress& progress) {
  return Scanner(engine, dir, verify_data, keys, progress).Run();
}

}  // namespace prefixd::storage
