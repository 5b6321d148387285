#include "storage/crypt/key_ring.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "storage/io/errors.h"
#include "storage/io/file.h"

namespace prefixd::storage {
namespace {

constexpr size_t kMaxFileBytes = 16384;
constexpr size_t kMaxKeys = 64;

// What a key file contains; wiped at the end.
struct KeyText {
  SecretBytes memory;
  size_t size = 0;
  struct stat st {};
  std::string_view view() const { return {reinterpret_cast<const char*>(memory.data()), size}; }
};

// systemd lets the user of a service read a credential by an access list where the file system has
// them: the bits of the group are then the mask of that list, and the directory keeps others out.
bool IsCredential(const std::filesystem::path& file, const struct stat& st) {
  const char* dir = std::getenv("CREDENTIALS_DIRECTORY");
  return dir != nullptr && *dir != '\0' && file.parent_path() == std::filesystem::path(dir) &&
         st.st_uid == 0;
}

Status CheckOwnerAlone(const std::filesystem::path& file, const struct stat& st) {
  const auto refused = [&](const std::string& why) {
    return Error{Code::kFailedPrecondition, file.string() + " " + why};
  };
  if (!S_ISREG(st.st_mode)) return refused("is no file");
  if ((st.st_mode & (IsCredential(file, st) ? 037 : 077)) != 0) {
    std::array<char, 8> mode{};
    std::snprintf(mode.data(), mode.size(), "%04o", static_cast<unsigned>(st.st_mode & 07777));
    return refused(
        "holds the keys of the store, and others than its owner may read or change it "
        "(mode " +
        std::string(mode.data()) + "): chmod 600 " + file.string());
  }
  // Root looks after the daemon's files, whoever it runs as.
  if (st.st_uid != ::geteuid() && st.st_uid != 0 && ::geteuid() != 0) {
    return refused("belongs to user " + std::to_string(st.st_uid) +
                   ", who knows the keys of the store: it must belong to this user (" +
                   std::to_string(::geteuid()) + ") or to root");
  }
  return {};
}

Result<KeyText> ReadText(const std::filesystem::path& file) {
  const UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) {
    return Error{Code::kNotFound,
                 "cannot read the key file " + file.string() + ": " + std::strerror(errno)};
  }
  KeyText text;
  if (::fstat(fd.get(), &text.st) != 0) return ErrnoError(errno, "cannot look at " + file.string());
  PREFIXD_TRY(CheckOwnerAlone(file, text.st));
  PREFIXD_ASSIGN(text.memory, SecretBytes::Make(kMaxFileBytes));
  while (true) {
    const ssize_t n =
        ::read(fd.get(), text.memory.data() + text.size, text.memory.size() - text.size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError(errno, "cannot read the key file " + file.string());
    if (n == 0) return text;
    text.size += static_cast<size_t>(n);
    if (text.size == text.memory.size()) {
      return InvalidArgument("the key file " + file.string() + " has more than 16 KiB");
    }
  }
}

std::string_view Trimmed(std::string_view line) {
  line = line.substr(0, line.find('#'));
  const size_t first = line.find_first_not_of(" \t\r");
  if (first == line.npos) return {};
  return line.substr(first, line.find_last_not_of(" \t\r") - first + 1);
}

Result<std::vector<MasterKey>> ParseKeys(std::string_view text, const std::filesystem::path& file) {
  std::vector<MasterKey> keys;
  int number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = Trimmed(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    if (line.empty()) continue;
    const std::string where = file.string() + ":" + std::to_string(number) + ": ";
    auto key = MasterKey::FromHex(line);
    if (!key.ok()) return Error{key.error().code, where + key.error().message};
    const bool twice =
        std::ranges::any_of(keys, [&](const MasterKey& other) { return other.id() == key->id(); });
    if (twice) return InvalidArgument(where + "this key stands there twice");
    if (keys.size() == kMaxKeys) return InvalidArgument(where + "there are more than 64 keys");
    keys.push_back(*std::move(key));
  }
  if (keys.empty()) {
    return InvalidArgument("the key file " + file.string() +
                           " has no key; `prefixctl key new` makes one");
  }
  return keys;
}

Status WriteAndSync(int fd, std::string_view text, const std::filesystem::path& file) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoError(n < 0 ? errno : ENOSPC, "cannot write " + file.string());
    done += static_cast<size_t>(n);
  }
  if (::fsync(fd) != 0) return ErrnoError(errno, "cannot sync " + file.string());
  return {};
}

Status SyncFolderOf(const std::filesystem::path& file) {
  const std::filesystem::path parent = file.parent_path();
  return SyncDirectory(parent.empty() ? std::filesystem::path(".") : parent);
}

// A line of a key file with a new key.
struct NewLine {
  NewLine() : text(MasterKey::NewHex()) {
    const auto key = MasterKey::FromHex(text);
    if (key.ok()) id = key->id();
    text += '\n';
  }
  ~NewLine() { Wipe(text); }
  NewLine(const NewLine&) = delete;
  NewLine& operator=(const NewLine&) = delete;

  std::string text;
  KeyId id;
};

}  // namespace

Result<std::shared_ptr<KeyRing>> KeyRing::Read(const std::filesystem::path& file) {
  PREFIXD_ASSIGN(const KeyText text, ReadText(file));
  auto ring = std::make_shared<KeyRing>();
  ring->file_ = file;
  PREFIXD_ASSIGN(ring->keys_, ParseKeys(text.view(), file));
  ring->cipher_ = FastestCipher();
  return ring;
}

const MasterKey* KeyRing::Find(const KeyId& id) const {
  const auto key = std::ranges::find(keys_, id, [](const MasterKey& k) { return k.id(); });
  return key == keys_.end() ? nullptr : &*key;
}

std::string LacksKey(const KeyRing* keys, const KeyId& id) {
  const std::string key = "key " + id.ToString();
  if (keys == nullptr) {
    return key + ", and no key file is given (store.encryption_key_file, or --key-file)";
  }
  return key + ", which the key file " + keys->file().string() + " does not have (its first is " +
         keys->newest().id().ToString() + ")";
}

Result<std::shared_ptr<const FileCipher>> CipherOf(const KeyRing* keys, const KeyId& id,
                                                   CipherKind cipher, FileKind kind,
                                                   std::span<const uint8_t> file) {
  const MasterKey* key = keys != nullptr ? keys->Find(id) : nullptr;
  if (key != nullptr) return FileCipher::Of(*key, cipher, kind, file);
  return Error{Code::kFailedPrecondition, "it is encrypted under " + LacksKey(keys, id)};
}

Result<KeyId> MakeKeyFile(const std::filesystem::path& file) {
  UniqueFd fd(::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid() && errno == EEXIST) {
    return Error{Code::kAlreadyExists,
                 file.string() +
                     " exists, and is not overwritten: who loses a key loses all that "
                     "is encrypted under it. `prefixctl key add` adds a key to it"};
  }
  if (!fd.valid()) return ErrnoError(errno, "cannot make " + file.string());
  const NewLine line;
  Status written = WriteAndSync(fd.get(), line.text, file);
  if (written.ok()) written = SyncFolderOf(file);
  if (written.ok()) return line.id;
  (void)RemoveFile(file);  // half a key is none
  return std::move(written).error();
}

Result<KeyId> AddKeyToFile(const std::filesystem::path& file) {
  PREFIXD_ASSIGN(const KeyText before, ReadText(file));
  PREFIXD_ASSIGN(const auto keys, ParseKeys(before.view(), file));
  const NewLine line;
  if (keys.size() == kMaxKeys || before.size + line.text.size() >= kMaxFileBytes) {
    return Error{Code::kFailedPrecondition,
                 "the key file " + file.string() +
                     " is full (64 keys or 16 KiB): bring the store under its first key "
                     "(prefixctl prefixes encrypt --all-tenants), and delete the lines behind it"};
  }
  std::filesystem::path temp = file;
  temp += ".new";
  UniqueFd fd(::open(temp.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid() && errno == EEXIST) {
    return Error{Code::kAlreadyExists, temp.string() +
                                           " is there, which an interrupted call left; it is in "
                                           "use nowhere: remove it, and try again"};
  }
  if (!fd.valid()) return ErrnoError(errno, "cannot make " + temp.string());
  const Status written = [&]() -> Status {
    // Root adds to the daemon's file.
    if (before.st.st_uid != ::geteuid() &&
        ::fchown(fd.get(), before.st.st_uid, before.st.st_gid) != 0) {
      return ErrnoError(errno, "cannot give " + temp.string() + " to the owner of the key file");
    }
    PREFIXD_TRY(WriteAndSync(fd.get(), line.text, temp));
    PREFIXD_TRY(WriteAndSync(fd.get(), before.view(), temp));
    if (::rename(temp.c_str(), file.c_str()) != 0) {
      return ErrnoError(errno, "cannot rename " + temp.string());
    }
    return SyncFolderOf(file);
  }();
  if (written.ok()) return line.id;
  (void)RemoveFile(temp);
  return written.error();
}

}  // namespace prefixd::storage
