// Implements damage to bytes of segments, and their repair.
#include "tests/reliability/workload/workload.h"

#include <fcntl.h>
#include <unistd.h>

#include "storage/catalog/store_dir.h"

namespace prefixd::storage::reliability {

void RepairSpoiled(const std::filesystem::path& dir, const Truth& truth) {
  for (const uint32_t number : truth.Spoiled()) {
    const SpoiledByte& spoiled = *truth.at(number).spoiled;
    const int fd = ::open(SegmentPath(dir, spoiled.id.bytes).c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) continue;
    (void)!::pwrite(fd, &spoiled.right, 1, spoiled.offset);
    ::close(fd);
  }
}

// Spoils one byte of a segment: it is read, verified, quarantined; then the byte is repaired.
bool Workload::Spoil() {
  const auto number = SomeSure();
  if (!number) return Put();
  const SegmentId id = *truth_.at(*number).id;
  const auto info = store_->GetPrefix(id);
  if (!info.ok()) return Refused("spoil", info.error());
  const auto path = SegmentPath(plan_.dir, info->file);
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  if (error) return Refused("spoil", Error{Code::kIo, error.message()});
  const auto offset = static_cast<uint32_t>(rng_() % bytes);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  uint8_t right = 0;
  if (fd < 0 || ::pread(fd, &right, 1, offset) != 1) return false;
  Event begin{EventKind::kSpoilBegin, {*number}};
  const auto words = IdWords({info->file});
  begin.words.insert(begin.words.end(), words.begin(), words.end());
  begin.words.push_back(offset);
  begin.words.push_back(right);
  Tell(begin);
  const auto wrong = static_cast<uint8_t>(right ^ (1 + rng_() % 255));
  (void)!::pwrite(fd, &wrong, 1, offset);
  if (rng_() % 2 == 0) (void)store_->Verify(&id, nullptr);
  if (rng_() % 4 == 0) {
    Close();
    if (!Open()) return false;
  }
  CheckRead(*number, true);
  (void)!::pwrite(fd, &right, 1, offset);
  ::close(fd);
  const auto report = store_->Verify(nullptr, nullptr);
  if (!report.ok()) return Refused("verify", report.error());
  Tell({EventKind::kSpoilEnd, {*number}});
  CheckRead(*number, false);
  return true;
}

}  // namespace prefixd::storage::reliability
