#include "storage/backup/manifest.h"

#include <sodium.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "base/check.h"
#include "storage/catalog/store_dir.h"
#include "storage/io/crash_point.h"
#include "storage/segment/hex.h"

namespace prefixd::storage {
namespace fs = std::filesystem;
namespace {

using nlohmann::json;

constexpr std::string_view kWord = "prefixd-backup";

Error Corrupt(const std::string& what) { return {Code::kCorrupt, what}; }

// A plain file name, or one below catalog/ or segments/.
bool ValidName(std::string_view name) {
  for (const std::string_view folder : {"catalog/", "segments/"}) {
    if (name.starts_with(folder)) {
      name.remove_prefix(folder.size());
      break;
    }
  }
  return !name.empty() && name.size() <= 255 && name.find('/') == name.npos && name != "." &&
         name != ".." && name.find('\0') == name.npos;
}

Result<std::string> ReadSmall(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return Error{Code::kNotFound, "cannot read " + path.string()};
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

Result<BackupManifest> Parse(const json& j) {
  BackupManifest m;
  const auto malformed = [] { return Corrupt("a backup's manifest is malformed"); };
  if (!FromHex(j.at("store").get_ref<const std::string&>(), m.store)) return malformed();
  m.generation = j.at("generation").get<uint64_t>();
  m.created_unix_ms = j.at("created_unix_ms").get<int64_t>();
  for (const json& f : j.at("files")) {
    BackupFile file;
    file.name = f.at("name").get<std::string>();
    file.kept_as = f.at("kept_as").get<std::string>();
    file.bytes = f.at("bytes").get<uint64_t>();
    file.inode = f.at("inode").get<uint64_t>();
    file.changed_ns = f.at("changed_ns").get<int64_t>();
    const bool whole = FromHex(f.at("blake2b").get_ref<const std::string&>(), file.digest);
    if (!whole || !ValidName(file.name) || !ValidName(file.kept_as) ||
        file.kept_as.find('/') != file.kept_as.npos) {
      return malformed();
    }
    m.files.push_back(std::move(file));
  }
  return m;
}

}  // namespace

FileDigest DigestOf(std::string_view bytes) {
  FileDigest digest;
  PREFIXD_CHECK(sodium_init() >= 0);  // idempotent
  crypto_generichash(digest.data(), digest.size(),
                     reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), nullptr,
                     0);
  return digest;
}

std::string EncodeBackupManifest(const BackupManifest& m) {
  json files = json::array();
  for (const BackupFile& f : m.files) {
    files.push_back({{"name", f.name},
                     {"kept_as", f.kept_as},
                     {"bytes", f.bytes},
                     {"blake2b", ToHex(f.digest)},
                     {"inode", f.inode},
                     {"changed_ns", f.changed_ns}});
  }
  const json all = {{"store", ToHex(m.store)},
                    {"generation", m.generation},
                    {"created_unix_ms", m.created_unix_ms},
                    {"files", std::move(files)}};
  return all.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

Result<BackupManifest> DecodeBackupManifest(std::string_view bytes) {
  const json j = json::parse(bytes, nullptr, /*allow_exceptions=*/false);
  if (!j.is_object()) return Corrupt("a backup's manifest is malformed");
  try {
    return Parse(j);
  } catch (const json::exception&) {
    return Corrupt("a backup's manifest is malformed");
  }
}

fs::path BackupManifestPath(const fs::path& dir, uint64_t generation) {
  return dir / ("manifest-" + std::to_string(generation));
}

Result<BackupManifest> ReadBackup(const fs::path& dir) {
  const auto head = ReadSmall(dir / "BACKUP");
  if (!head.ok()) {
    // What cannot be looked at may be there: whoever takes it for nothing removes its files.
    std::error_code failed;
    if (fs::exists(dir / "BACKUP", failed) || failed) {
      return Error{Code::kIo, head.error().message + (failed ? ": " + failed.message() : "")};
    }
    return Error{Code::kNotFound, "there is no backup in " + dir.string()};
  }
  std::istringstream in(*head);
  std::string word, format_key, generation_key, digest_key, digest;
  uint32_t format = 0;
  uint64_t generation = 0;
  in >> word >> format_key >> format;
  if (!in || word != kWord || format_key != "format") {
    return Corrupt((dir / "BACKUP").string() + " is not the head of a prefixd backup");
  }
  if (format > kBackupFormatVersion) {
    return Error{Code::kFailedPrecondition,
                 "the backup in " + dir.string() + " has format version " + std::to_string(format) +
                     "; this prefixd knows up to " + std::to_string(kBackupFormatVersion) +
                     ". It was left unchanged"};
  }
  in >> generation_key >> generation >> digest_key >> digest;
  FileDigest expected;
  if (!in || generation_key != "generation" || digest_key != "manifest" ||
      !FromHex(digest, expected)) {
    return Corrupt((dir / "BACKUP").string() + " is damaged");
  }
  const fs::path path = BackupManifestPath(dir, generation);
  const auto bytes = ReadSmall(path);
  if (!bytes.ok() || DigestOf(*bytes) != expected) {
    return Corrupt(path.string() + " is missing or damaged");
  }
  PREFIXD_ASSIGN(BackupManifest manifest, DecodeBackupManifest(*bytes));
  if (manifest.generation != generation)
    return Corrupt(path.string() + " is of another generation");
  return manifest;
}

Status WriteBackupManifest(const fs::path& dir, const BackupManifest& manifest) {
  const std::string bytes = EncodeBackupManifest(manifest);
  PREFIXD_TRY(WriteFileAtomically(BackupManifestPath(dir, manifest.generation), bytes));
  CrashPoint("backup.manifest");
  return WriteFileAtomically(
      dir / "BACKUP", std::string(kWord) + "\nformat " + std::to_string(kBackupFormatVersion) +
                          "\ngeneration " + std::to_string(manifest.generation) + "\nmanifest " +
                          ToHex(DigestOf(bytes)) + "\n");
}

}  // namespace prefixd::storage
