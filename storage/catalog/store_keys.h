// Brings the key ring of an encrypted store together with what its STORE file says: which keys its
// files may need, and the store's secret, which is wrapped under the newest of them.
//
// A key is in STORE before the first file is encrypted under it, and goes from there when no file
// needs it and the key file does not have it any more. So a store whose keys are not at hand is
// refused by a look at STORE alone.
//
// Thread-safety: free functions; the caller holds the store's lock.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>

#include "prefixd/result.h"
#include "storage/catalog/store_dir.h"
#include "storage/crypt/key_ring.h"
#include "storage/io/progress.h"

namespace prefixd::storage {

enum class KeyedFiles : uint8_t { kAll, kBlobs };

// Returns how many files in segments/ are encrypted under which key, by looking at their headers,
// several at a time; `progress` counts files. kCancelled: it returned false.
Result<std::map<KeyId, uint64_t>> KeysInUse(const std::filesystem::path& dir,
                                            KeyedFiles which = KeyedFiles::kAll,
                                            const Progress& progress = {});

// Refuses a store that needs a key which `keys` (null: none) lack, with a sentence that says how
// many files do: kFailedPrecondition, and nothing has changed. Then brings `identity` and STORE up
// to date. Returns the store's secret; null: its catalog lies in clear, because the store was made
// without a key.
Result<std::shared_ptr<const StoreSecret>> OpenStoreKeys(const std::filesystem::path& dir,
                                                         const KeyRing* keys,
                                                         StoreIdentity* identity);

// For a catalog that is made anew, of a store whose STORE may be lost. HasKeysOf returns whether no
// file can lack a key, if the store is the one that STORE speaks of; RefuseMissingKeys looks at the
// files and refuses those whose key is missing, as above. RecoverStoreKeys brings `identity` up to
// date, gives the store a secret if it has none that can be unwrapped, and returns it.
bool HasKeysOf(const KeyRing* keys, const StoreIdentity& identity);
Status RefuseMissingKeys(const std::filesystem::path& dir, const KeyRing* keys, KeyedFiles which,
                         const Progress& progress);
Result<std::shared_ptr<const StoreSecret>> RecoverStoreKeys(const KeyRing* keys,
                                                            StoreIdentity* identity);

}  // namespace prefixd::storage
