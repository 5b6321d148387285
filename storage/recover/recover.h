// Rebuilds the catalog from the segment files alone, for a store whose catalog (or STORE file) is
// lost or damaged. Offline: takes the store's lock.
//
// Segments that verify are committed to a new catalog beside the old one, and the two directories
// change places at once; the old one is kept as catalog.lost-<n>. Interrupted at any point, the
// store has either catalog, and recovering again completes it. Segment files that do not verify are
// moved to damaged/, where nothing touches them; one that cannot be read ends the recovery. Facts
// that the files do not hold are lost: pins, times to live, last uses, quarantines, and which names
// were removed while others continued their tokens.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"
#include "storage/store/prefix_store.h"

namespace prefixd::storage {

struct RecoverOptions {
  std::filesystem::path dir;
  bool verify_data = false;  // read and verify every page, not only metadata
  bool prune = false;        // free unfinished files now; otherwise the next opening does
  // Of an encrypted store, whose files are not read without; one that was made without a key gets
  // keyed hashes and a sealed catalog. Empty: none.
  std::filesystem::path encryption_key_file;
  // Called before every change to the directory; returning false stops there (kCancelled), as a
  // crash would.
  std::function<bool(std::string_view step)> before_step;
};

struct RecoverReport {
  uint64_t models = 0, segments = 0, names = 0, bytes = 0;  // in the new catalog
  uint64_t freed = 0;                    // files whose rows a later file took over
  uint64_t unfinished = 0;               // files of puts that were never sealed
  bool identity_rebuilt = false;         // STORE was missing or damaged
  std::filesystem::path old_catalog;     // where it is kept; empty: there was none
  std::vector<std::string> quarantined;  // in the catalog but not served; one sentence each
  std::vector<std::string> set_aside;    // moved to damaged/; one sentence each
};

// Recovers; `progress` counts pages, and files where keys are looked for. kNotFound: no store
// there. kFailedPrecondition: the store is in use, a newer prefixd wrote parts of it, or files of
// it are encrypted under a key that is not given. kIo, kResourceExhausted: a segment file cannot be
// read, which does not mean that it is damaged. kCorrupt: the segments belong to more than one
// store and STORE does not say which. What is stored has not changed then. Other errors are of the
// disk while it is written; recovering again goes on from there.
Result<RecoverReport> RecoverCatalog(const RecoverOptions& options, const Progress& progress);

}  // namespace prefixd::storage
