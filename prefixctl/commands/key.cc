#include "prefixctl/commands/key.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "prefixctl/show/output.h"
#include "storage/crypt/key_ring.h"

namespace prefixd::ctl {
namespace {

void PrintMade(const Options& options, const storage::KeyId& id, const char* next) {
  if (options.json) {
    PrintJson({{"file", options.file}, {"key", id.ToString()}});
    return;
  }
  std::printf("%s: key %s\n%s\n", Printable(options.file).c_str(), id.ToString().c_str(), next);
}

}  // namespace

Status NewKeyFile(const Options& options) {
  PREFIXD_ASSIGN(const storage::KeyId id, storage::MakeKeyFile(options.file));
  PrintMade(options, id,
            "Keep a copy of the file apart from the store and its backups: without it nothing that "
            "is encrypted can be read again.");
  return {};
}

Status AddKey(const Options& options) {
  const auto added = storage::AddKeyToFile(options.file);
  if (!added.ok()) return OfLocalFile(added.error());
  const storage::KeyId id = *added;
  PrintMade(options, id,
            "Start the daemon anew: new files take this key. `prefixctl prefixes encrypt "
            "--all-tenants` brings the others under it; then the older lines may go.");
  return {};
}

Status CheckKeyFile(const Options& options) {
  const auto read = storage::KeyRing::Read(options.file);
  if (!read.ok()) return OfLocalFile(read.error());
  const auto& ring = *read;
  if (options.json) {
    nlohmann::json keys = nlohmann::json::array();
    for (const storage::MasterKey& key : ring->keys()) keys.push_back(key.id().ToString());
    PrintJson({{"keys", std::move(keys)}, {"cipher", storage::CipherName(ring->cipher())}});
    return {};
  }
  for (const storage::MasterKey& key : ring->keys()) {
    std::printf("key %s%s\n", key.id().ToString().c_str(),
                &key == &ring->newest() ? "  new files take it" : "");
  }
  std::printf("cipher %s\n", std::string(storage::CipherName(ring->cipher())).c_str());
  return {};
}

}  // namespace prefixd::ctl
