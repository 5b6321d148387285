#include "storage/catalog/store_keys.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "storage/catalog/catalog.h"
#include "storage/io/errors.h"
#include "storage/io/together.h"
#include "storage/segment/blob_format.h"
#include "storage/segment/segment_format.h"

namespace prefixd::storage {
namespace fs = std::filesystem;
namespace {

constexpr size_t kFilesPerReport = 1024;  // of progress

// Returns the key of a file that says one. What cannot be read says none.
std::optional<KeyId> KeyOf(const fs::path& path, bool blob) {
  const auto fd = OpenFile(path, O_RDONLY);
  if (!fd.ok()) return std::nullopt;
  std::array<std::byte, kPageBytes> page{};
  const ssize_t n = ::pread(fd->get(), page.data(), page.size(), 0);
  if (n <= 0) return std::nullopt;
  if (blob) return KeyOfBlob(std::span(page).first(static_cast<size_t>(n)));
  const auto header = SegmentHeader::Decode(page);
  if (!header.ok() || !header->encrypted()) return std::nullopt;
  return header->key;
}

Error Refused(const fs::path& dir, const std::string& what, const KeyRing* keys, const KeyId& id) {
  return {Code::kFailedPrecondition, "the store " + dir.string() + " cannot be opened: " + what +
                                         " encrypted under " + LacksKey(keys, id) +
                                         ". It was left unchanged"};
}

// A file may need any key of the ring: one under an old key may come from a backup or a remote
// tier.
std::vector<KeyId> IdsOf(const KeyRing* keys) {
  std::vector<KeyId> ids;
  if (keys == nullptr) return ids;
  for (const MasterKey& key : keys->keys()) ids.push_back(key.id());
  return ids;
}

std::string Files(uint64_t n) {
  return std::to_string(n) + (n == 1 ? " file of it is" : " files of it are");
}

// Makes, or unwraps, the secret, and has it wrapped under the newest key.
Result<std::shared_ptr<const StoreSecret>> SecretOf(const KeyRing& keys, bool make,
                                                    StoreIdentity* identity) {
  if (identity->secret.empty() && !make) return std::shared_ptr<const StoreSecret>();
  auto secret = identity->secret.empty() ? StoreSecret::Make()
                                         : StoreSecret::Unwrap(*keys.Find(identity->secret_key),
                                                               identity->store, identity->secret);
  if (!secret.ok()) return std::move(secret).error();
  const KeyId& newest = keys.newest().id();
  if (identity->secret.empty() || identity->secret_key != newest) {
    PREFIXD_ASSIGN(identity->secret, secret->Wrap(keys.newest(), identity->store));
    identity->secret_key = newest;
  }
  return std::make_shared<const StoreSecret>(*std::move(secret));
}

}  // namespace

Result<std::map<KeyId, uint64_t>> KeysInUse(const fs::path& dir, KeyedFiles which,
                                            const Progress& progress) {
  std::map<KeyId, uint64_t> uses;
  PREFIXD_ASSIGN(const auto entries, ListDirectory(dir / "segments"));
  std::vector<std::pair<fs::path, bool>> files;  // path, whether it is a blob
  for (const fs::directory_entry& entry : entries) {
    const auto parsed = ParseSegmentsEntry(entry.path().filename().string());
    if (!parsed) continue;
    const bool blob = !parsed->blob.empty();
    if (blob || which == KeyedFiles::kAll) files.emplace_back(entry.path(), blob);
  }
  std::vector<std::optional<KeyId>> found(std::min(files.size(), kFilesPerReport));
  for (size_t begin = 0; begin < files.size();) {
    const size_t n = std::min(found.size(), files.size() - begin);
    PREFIXD_TRY(Together(n, kReadsAtOnce, [&](size_t i) -> Status {
      const auto& [path, blob] = files[begin + i];
      found[i] = KeyOf(path, blob);
      return {};
    }));
    for (size_t i = 0; i < n; ++i) {
      if (found[i]) ++uses[*found[i]];
    }
    begin += n;
    if (progress && !progress(begin, files.size(), "files")) {
      return Error{Code::kCancelled, "the look for keys was stopped; nothing has changed"};
    }
  }
  return uses;
}

Result<std::shared_ptr<const StoreSecret>> OpenStoreKeys(const fs::path& dir, const KeyRing* keys,
                                                         StoreIdentity* identity) {
  const auto has = [&](const KeyId& id) { return keys != nullptr && keys->Find(id) != nullptr; };
  std::vector<KeyId> missing = identity->keys;
  std::erase_if(missing, has);
  const bool catalog = !identity->secret.empty() && !has(identity->secret_key);
  if (!missing.empty() || catalog) {
    PREFIXD_ASSIGN(const auto uses, KeysInUse(dir));
    if (catalog) {
      const auto n = uses.find(identity->secret_key);
      return Refused(dir,
                     n == uses.end() ? "its catalog is" : "its catalog and " + Files(n->second),
                     keys, identity->secret_key);
    }
    for (const KeyId& id : missing) {
      if (const auto n = uses.find(id); n != uses.end()) {
        return Refused(dir, Files(n->second), keys, id);
      }
    }
  }
  StoreIdentity now = *identity;
  now.keys = IdsOf(keys);
  std::shared_ptr<const StoreSecret> secret;
  if (keys != nullptr) {
    // The hashes of a catalog that is there were made without a secret.
    std::error_code ignored;
    const bool fresh = !fs::exists(dir / "catalog" / "CURRENT", ignored);
    PREFIXD_ASSIGN(secret, SecretOf(*keys, fresh, &now));
  }
  now.format_version = now.keys.empty() ? kStoreFormatVersion : kEncryptedFormatVersion;
  if (now == *identity) return secret;
  PREFIXD_TRY(WriteIdentityFile(dir, now));
  *identity = std::move(now);
  return secret;
}

bool HasKeysOf(const KeyRing* keys, const StoreIdentity& identity) {
  return std::ranges::all_of(
      identity.keys, [&](const KeyId& id) { return keys != nullptr && keys->Find(id) != nullptr; });
}

Status RefuseMissingKeys(const fs::path& dir, const KeyRing* keys, KeyedFiles which,
                         const Progress& progress) {
  PREFIXD_ASSIGN(const auto uses, KeysInUse(dir, which, progress));
  for (const auto& [id, n] : uses) {
    if (keys == nullptr || keys->Find(id) == nullptr) return Refused(dir, Files(n), keys, id);
  }
  return {};
}

Result<std::shared_ptr<const StoreSecret>> RecoverStoreKeys(const KeyRing* keys,
                                                            StoreIdentity* identity) {
  identity->keys = IdsOf(keys);
  if (keys == nullptr) {
    if (identity->format_version != 1) identity->format_version = kStoreFormatVersion;
    identity->secret_key = {};
    identity->secret.clear();
    return std::shared_ptr<const StoreSecret>();
  }
  identity->format_version = kEncryptedFormatVersion;
  // All hashes are made anew, and so may the secret be.
  if (keys->Find(identity->secret_key) == nullptr) identity->secret.clear();
  auto secret = SecretOf(*keys, /*make=*/true, identity);
  if (secret.ok() || secret.error().code != Code::kCorrupt) return secret;
  identity->secret.clear();
  return SecretOf(*keys, /*make=*/true, identity);
}

}  // namespace prefixd::storage
