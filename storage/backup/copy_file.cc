#include "storage/backup/copy_file.h"

#include <fcntl.h>
#include <sodium.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

#include "base/check.h"
#include "storage/io/errors.h"
#include "storage/io/file.h"

namespace prefixd::storage {
namespace {

constexpr size_t kCopyBytes = 1 << 20;

// Reads the file from its start to its end, and hands each piece on.
Result<Copied> ReadThrough(int fd, const std::filesystem::path& path,
                           const std::function<Status(const char*, size_t)>& piece) {
  std::vector<char> buffer(kCopyBytes);
  crypto_generichash_state state;
  Copied out;
  PREFIXD_CHECK(sodium_init() >= 0);  // idempotent
  crypto_generichash_init(&state, nullptr, 0, out.digest.size());
  while (true) {
    const ssize_t n = ::read(fd, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError(errno, "cannot read " + path.string());
    if (n == 0) break;
    const auto bytes = static_cast<size_t>(n);
    crypto_generichash_update(&state, reinterpret_cast<unsigned char*>(buffer.data()), bytes);
    out.bytes += bytes;
    PREFIXD_TRY(piece(buffer.data(), bytes));
  }
  crypto_generichash_final(&state, out.digest.data(), out.digest.size());
  return out;
}

Status WriteWhole(int fd, const char* data, size_t bytes, const std::filesystem::path& path) {
  while (bytes > 0) {
    const ssize_t n = ::write(fd, data, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoError(n < 0 ? errno : ENOSPC, "cannot write " + path.string());
    data += n;
    bytes -= static_cast<size_t>(n);
  }
  return {};
}

}  // namespace

Result<Copied> CopyFile(const std::filesystem::path& from, const std::filesystem::path& to,
                        const BytesDone& done, bool* unreadable) {
  auto in = OpenFile(from, O_RDONLY);
  if (unreadable) *unreadable = !in.ok();
  if (!in.ok()) return std::move(in).error();
  PREFIXD_ASSIGN(const UniqueFd out, OpenFile(to, O_WRONLY | O_CREAT | O_TRUNC));
  Status taken;
  auto copied = ReadThrough(in->get(), from, [&](const char* data, size_t bytes) -> Status {
    taken = WriteWhole(out.get(), data, bytes, to);
    if (taken.ok() && done && !done(bytes)) {
      taken = Error{Code::kCancelled, "stopped; what was there before is unchanged"};
    }
    return taken;
  });
  if (unreadable) *unreadable = !copied.ok() && taken.ok();
  if (!copied.ok()) return copied;
  if (::fsync(out.get()) != 0) return ErrnoError(errno, "cannot sync " + to.string());
  return copied;
}

Result<Copied> DigestFile(const std::filesystem::path& path) {
  PREFIXD_ASSIGN(const UniqueFd in, OpenFile(path, O_RDONLY));
  (void)::posix_fadvise(in.get(), 0, 0, POSIX_FADV_DONTNEED);
  return ReadThrough(in.get(), path, [](const char*, size_t) { return Status(); });
}

}  // namespace prefixd::storage
