#include "storage/backup/backup.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "prefixctl/commands/operate.h"
#include "prefixctl/show/output.h"
#include "storage/catalog/store_dir.h"
#include "storage/store/prefix_store.h"

namespace prefixd::ctl {
namespace {

// Opens a store as it is: without a tier, and without evicting or making anything.
Result<std::unique_ptr<storage::PrefixStore>> OpenStore(const std::string& dir,
                                                        const std::string& key_file) {
  PREFIXD_TRY(storage::RefuseAsRoot(dir));
  if (!std::filesystem::exists(std::filesystem::path(dir) / "STORE")) {
    return Error{Code::kNotFound, "there is no prefixd store in " + dir};
  }
  storage::StoreOptions store;
  store.dir = dir;
  store.host_tier_bytes = 0;
  store.encryption_key_file = key_file;
  return storage::PrefixStore::Open(store);
}

Status BackUp(const Snapshot& snapshot, const Options& options) {
  std::shared_ptr<const storage::KeyRing> keys;
  if (!options.key_file.empty()) {
    PREFIXD_ASSIGN(keys, storage::KeyRing::Read(options.key_file));
  }
  PREFIXD_ASSIGN(
      const storage::BackupReport r,
      storage::WriteBackup(snapshot.dir(), options.file, ShowProgress("backup", options.quiet),
                           keys.get(), options.verify));
  if (options.json) {
    PrintJson({{"backup", options.file},
               {"generation", r.generation},
               {"files", r.files},
               {"bytes", r.bytes},
               {"new_files", r.new_files},
               {"new_bytes", r.new_bytes},
               {"dropped_files", r.dropped_files},
               {"damaged", r.damaged}});
  } else {
    std::printf("%s: %llu files, %s; %llu of them new, %s, copied and verified\n",
                Printable(options.file).c_str(), static_cast<unsigned long long>(r.files),
                Bytes(r.bytes).c_str(), static_cast<unsigned long long>(r.new_files),
                Bytes(r.new_bytes).c_str());
    for (const std::string& what : r.damaged) std::printf("damaged: %s\n", Printable(what).c_str());
  }
  if (r.damaged.empty()) return {};
  return Error{Code::kCorrupt,
               std::to_string(r.damaged.size()) +
                   " files of the store are damaged, unreadable or gone, and in the "
                   "backup only where it has an earlier copy; the rest is. Run "
                   "`prefixctl prefixes verify`, and put their prompts again"};
}

}  // namespace

Status BackUpDaemon(RemoteStore& client, const Options& options) {
  PREFIXD_ASSIGN(const auto snapshot, client.TakeSnapshot());
  return BackUp(*snapshot, options);
}

Status BackUpDirectory(const Options& options) {
  PREFIXD_ASSIGN(const auto store, OpenStore(options.dir, options.key_file));
  PREFIXD_ASSIGN(const auto snapshot, store->TakeSnapshot());
  return BackUp(*snapshot, options);
}

Status RestoreStore(const Options& options) {
  PREFIXD_ASSIGN(
      const storage::RestoreReport r,
      storage::RestoreBackup(options.file, options.dir, ShowProgress("restore", options.quiet)));
  PREFIXD_ASSIGN(const auto store, OpenStore(options.dir, options.key_file));
  const auto prefixes = store->ListPrefixes();
  size_t quarantined = 0;
  for (const storage::PrefixInfo& info : prefixes) quarantined += info.quarantined ? 1 : 0;
  if (options.json) {
    PrintJson({{"dir", options.dir},
               {"generation", r.generation},
               {"created_unix_ms", r.created_unix_ms},
               {"files", r.files},
               {"bytes", r.bytes},
               {"prefixes", prefixes.size()},
               {"quarantined", quarantined},
               {"damaged", r.damaged}});
  } else {
    std::printf("%s: %llu files, %s, of the backup of %s; it opens and has %zu prefixes\n",
                Printable(options.dir).c_str(), static_cast<unsigned long long>(r.files),
                Bytes(r.bytes).c_str(), Time(r.created_unix_ms).c_str(), prefixes.size());
    for (const std::string& what : r.damaged) std::printf("damaged: %s\n", Printable(what).c_str());
  }
  if (!r.damaged.empty()) {
    return Error{Code::kCorrupt,
                 std::to_string(r.damaged.size()) +
                     " files of the backup are damaged or unreadable, and left out: " +
                     std::to_string(quarantined) +
                     " prefixes are not served (put their prompts again), and what was derived is "
                     "made again. `prefixctl backup --verify` finds such files while the store "
                     "still has them"};
  }
  if (quarantined == 0) return {};
  return Error{Code::kCorrupt, std::to_string(quarantined) +
                                   " prefixes were damaged when the backup was made, and are not "
                                   "served; put their prompts again"};
}

}  // namespace prefixd::ctl
