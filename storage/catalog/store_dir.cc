#include "storage/catalog/store_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <sstream>

#include "storage/catalog/catalog.h"
#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/segment/hex.h"

namespace prefixd::storage {
namespace fs = std::filesystem;
namespace {

std::string ReadSmallFile(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

constexpr std::string_view kIdentityWord = "prefixd-store";

// Reads what an encrypted store's STORE says after its uuid; false: it is malformed.
bool ReadKeys(std::istream& in, StoreIdentity& identity) {
  std::string word, id, secret;
  while (in >> word) {
    const auto key = in >> id ? KeyId::Parse(id) : std::nullopt;
    if (!key) return false;
    if (word == "key") {
      identity.keys.push_back(*key);
      continue;
    }
    if (word != "secret" || !identity.secret.empty() || !(in >> secret)) return false;
    identity.secret_key = *key;
    identity.secret.resize(secret.size() / 2);
    const std::span bytes(reinterpret_cast<uint8_t*>(identity.secret.data()),
                          identity.secret.size());
    if (identity.secret.empty() || !FromHex(secret, bytes)) return false;
  }
  return !identity.keys.empty();
}

}  // namespace

Result<DirLock> DirLock::Acquire(const fs::path& dir) {
  const fs::path path = dir / "lock";
  DirLock lock;
  PREFIXD_ASSIGN(lock.fd_, OpenFile(path, O_RDWR | O_CREAT));
  if (::flock(lock.fd_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoError(errno, "cannot lock " + path.string());
    std::string pid = ReadSmallFile(path);
    std::erase(pid, '\n');
    return Error{Code::kFailedPrecondition, "the store " + dir.string() + " is in use by process " +
                                                (pid.empty() ? "(unknown)" : pid)};
  }
  const std::string pid = std::to_string(::getpid()) + "\n";
  // The pid only informs people: a full disk must not keep anyone from opening the store to shrink
  // it.
  const bool noted =
      ::ftruncate(lock.fd_.get(), 0) == 0 &&
      ::pwrite(lock.fd_.get(), pid.data(), pid.size(), 0) == static_cast<ssize_t>(pid.size());
  if (!noted && errno != ENOSPC) {
    return ErrnoError(errno, "cannot write " + path.string());
  }
  return lock;
}

Result<StoreIdentity> ReadIdentityFile(const fs::path& dir) {
  const fs::path path = dir / "STORE";
  std::istringstream in(ReadSmallFile(path));
  std::string word, format_key, uuid_key, uuid;
  StoreIdentity identity;
  in >> word >> format_key >> identity.format_version;
  if (!in || word != kIdentityWord || format_key != "format") {
    return Error{Code::kCorrupt, path.string() + " is not the identity of a prefixd store"};
  }
  if (identity.format_version > kEncryptedFormatVersion) {
    return Error{Code::kFailedPrecondition,
                 "the store " + path.parent_path().string() + " has format version " +
                     std::to_string(identity.format_version) + "; this prefixd knows up to " +
                     std::to_string(kEncryptedFormatVersion) + ". It was left unchanged"};
  }
  in >> uuid_key >> uuid;
  if (!in || uuid_key != "uuid" || !FromHex(uuid, identity.store)) {
    return Error{Code::kCorrupt, path.string() + " holds no store uuid"};
  }
  const bool encrypted = identity.format_version == kEncryptedFormatVersion;
  if (encrypted && !ReadKeys(in, identity)) {
    return Error{Code::kCorrupt, path.string() + " does not say how the store is encrypted"};
  }
  // With one byte of its number changed, the file of an encrypted store would be that of one in
  // clear: written anew, it would lose the secret.
  if (!encrypted && in >> word) {
    return Error{Code::kCorrupt, path.string() + " says more than a store of format " +
                                     std::to_string(identity.format_version) + " has to say"};
  }
  return identity;
}

Status WriteIdentityFile(const fs::path& dir, const StoreIdentity& identity) {
  std::string text = std::string(kIdentityWord) + "\nformat " +
                     std::to_string(identity.format_version) + "\nuuid " + ToHex(identity.store) +
                     "\n";
  for (const KeyId& key : identity.keys) text += "key " + key.ToString() + "\n";
  if (!identity.secret.empty()) {
    const std::span secret(reinterpret_cast<const uint8_t*>(identity.secret.data()),
                           identity.secret.size());
    text += "secret " + identity.secret_key.ToString() + " " + ToHex(secret) + "\n";
  }
  return WriteFileAtomically(dir / "STORE", text);
}

std::string HowToRecover(const fs::path& dir) {
  return "`prefixctl recover --dir " + dir.string() + "` makes it anew from the segment files";
}

Error WithHowToRecover(Error error, const fs::path& dir) {
  if (error.code == Code::kCorrupt || error.code == Code::kIo) {
    error.message += "; if the disk is well, " + HowToRecover(dir);
  }
  return error;
}

namespace {

// Who may write to a directory can replace what lies in it.
Status CheckOwnAlone(const fs::path& path, bool link_allowed) {
  struct stat st {};
  if ((link_allowed ? ::stat : ::lstat)(path.c_str(), &st) != 0) {
    return ErrnoError(errno, "cannot look at " + path.string());
  }
  const auto refused = [&](const std::string& why) {
    return Error{Code::kFailedPrecondition, path.string() + " " + why};
  };
  if (S_ISLNK(st.st_mode)) {
    return refused(
        "is a symbolic link, and none is followed in a store's directory: put the "
        "directory itself there, or link the store's directory as a whole");
  }
  if (!S_ISDIR(st.st_mode)) return refused("is no directory");
  if (st.st_uid != ::geteuid() && st.st_uid != 0) {
    return refused("belongs to user " + std::to_string(st.st_uid) +
                   ", who could replace what is stored: it must belong to this user (" +
                   std::to_string(::geteuid()) + ") or to root");
  }
  if ((st.st_mode & S_IWOTH) != 0) {
    return refused("may be written by everybody, who could replace what is stored: chmod o-w " +
                   path.string());
  }
  if ((st.st_mode & S_IWGRP) != 0) {
    LogWarning(path.string() + " may be written by group " + std::to_string(st.st_gid) +
               ", whose members could replace what is stored; chmod g-w unless they are to be "
               "trusted");
  }
  return {};
}

}  // namespace

Status CreateStoreDir(const fs::path& dir) {
  for (const fs::path& path : {dir, dir / "segments", dir / "catalog"}) {
    if (::mkdir(path.c_str(), 0700) == 0) {
      const fs::path parent = path.parent_path();
      PREFIXD_TRY(SyncDirectory(parent.empty() ? fs::path(".") : parent));
    } else if (errno != EEXIST) {
      return ErrnoError(errno, "cannot create the directory " + path.string());
    }
    PREFIXD_TRY(CheckOwnAlone(path, /*link_allowed=*/path == dir));
  }
  return {};
}

Status RefuseAsRoot(const fs::path& dir) {
  struct stat st {};
  if (::geteuid() != 0 || ::stat(dir.c_str(), &st) != 0 || st.st_uid == 0) return {};
  const std::string user = std::to_string(st.st_uid);
  return Error{Code::kFailedPrecondition,
               dir.string() + " belongs to user " + user +
                   ", whose daemon could not open what root makes in it: do this as that user "
                   "(setpriv --reuid " +
                   user + " --regid " + std::to_string(st.st_gid) +
                   " --clear-groups prefixctl ...)"};
}

Status RefuseLostCatalog(const fs::path& dir) {
  std::error_code error;
  if (fs::exists(dir / "catalog" / "CURRENT", error)) return {};
  if (error) return ErrnoError(error.value(), "cannot look into " + (dir / "catalog").string());
  for (auto it = fs::directory_iterator(dir / "segments", error);
       !error && it != fs::directory_iterator(); it.increment(error)) {
    const auto entry = ParseSegmentsEntry(it->path().filename().string());
    if (!entry || !entry->blob.empty()) continue;
    return Error{Code::kCorrupt, "the catalog of the store " + dir.string() +
                                     " is missing although segments are there; " +
                                     HowToRecover(dir)};
  }
  return {};
}

Result<StoreIdentity> ReadOrCreateIdentity(const fs::path& dir) {
  const fs::path path = dir / "STORE";
  std::error_code ignored;
  if (fs::exists(path, ignored)) {
    auto read = ReadIdentityFile(dir);
    if (!read.ok()) return WithHowToRecover(read.error(), dir);
    StoreIdentity identity = *read;
    if (identity.format_version < kStoreFormatVersion) {
      LogInfo("upgrading the store " + dir.string() + " from format " +
              std::to_string(identity.format_version) + " to " +
              std::to_string(kStoreFormatVersion));
      identity.format_version = kStoreFormatVersion;
      PREFIXD_TRY(WriteIdentityFile(dir, identity));
    }
    return identity;
  }
  if (fs::exists(dir / "catalog" / "CURRENT", ignored)) {
    return Error{
        Code::kCorrupt,
        path.string() + " is missing but there is a catalog; restore it, or " + HowToRecover(dir)};
  }
  StoreIdentity identity{kStoreFormatVersion, {}};
  RandomBytes(identity.store);
  PREFIXD_TRY(WriteIdentityFile(dir, identity));
  return identity;
}

fs::path SegmentPath(const fs::path& dir, const Uuid& file) {
  return dir / "segments" / (ToHex(file) + ".seg");
}

fs::path BlobPath(const fs::path& dir, const SegmentId& id, std::string_view name) {
  return dir / "segments" / (id.ToString() + "." + std::string(name) + ".blob");
}

bool ValidBlobName(std::string_view name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  };
  return !name.empty() && name.size() <= 64 && name.front() != '.' && name.back() != '.' &&
         std::all_of(name.begin(), name.end(), allowed);
}

std::optional<SegmentsEntry> ParseSegmentsEntry(std::string_view file) {
  constexpr size_t kHexDigits = 32;
  SegmentsEntry entry;
  if (file.size() < kHexDigits || !FromHex(file.substr(0, kHexDigits), entry.id)) {
    return std::nullopt;
  }
  std::string_view rest = file.substr(kHexDigits);
  if (rest == ".seg") return entry;
  constexpr std::string_view kSuffix = ".blob";
  if (rest.size() <= kSuffix.size() + 1 || rest[0] != '.' || !rest.ends_with(kSuffix)) {
    return std::nullopt;
  }
  entry.blob = rest.substr(1, rest.size() - kSuffix.size() - 1);
  if (!ValidBlobName(entry.blob)) return std::nullopt;
  return entry;
}

Result<std::vector<fs::directory_entry>> ListDirectory(const fs::path& dir) {
  std::error_code error;
  std::vector<fs::directory_entry> entries;
  for (auto it = fs::directory_iterator(dir, error); !error && it != fs::directory_iterator();
       it.increment(error)) {
    entries.push_back(*it);
  }
  if (error) return ErrnoError(error.value(), "cannot list " + dir.string());
  return entries;
}

Status WriteFileAtomically(const fs::path& path, std::string_view bytes) {
  fs::path temp = path;
  temp += ".tmp";
  {
    PREFIXD_ASSIGN(UniqueFd fd, OpenFile(temp, O_WRONLY | O_CREAT | O_TRUNC));
    const ssize_t n = ::pwrite(fd.get(), bytes.data(), bytes.size(), 0);
    if (n != static_cast<ssize_t>(bytes.size())) {
      return ErrnoError(n < 0 ? errno : ENOSPC, "cannot write " + temp.string());
    }
    if (::fsync(fd.get()) != 0) return ErrnoError(errno, "cannot sync " + temp.string());
  }
  CrashPoint("file.before_rename");
  if (::rename(temp.c_str(), path.c_str()) != 0) {
    return ErrnoError(errno, "cannot rename " + temp.string());
  }
  CrashPoint("file.before_directory_sync");
  return SyncDirectory(path.parent_path());
}

}  // namespace prefixd::storage
