#include "prefixctl/commands/recover.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "prefixctl/show/output.h"
#include "storage/recover/recover.h"

namespace prefixd::ctl {
namespace {

constexpr const char* kNotInTheFiles =
    "Not in the segment files and therefore lost: pins, times to live, last uses, quarantines. "
    "Names that were removed while others continued their tokens are listed again, and so are "
    "prefixes whose files were about to be deleted.";

void PrintText(const storage::RecoverReport& r, bool prune) {
  PrintFields({{"models", std::to_string(r.models)},
               {"segments", std::to_string(r.segments) + ", " + Bytes(r.bytes)},
               {"prefixes", std::to_string(r.names)},
               {"superseded files freed", std::to_string(r.freed)},
               {prune ? "unfinished files freed" : "unfinished files (the next start frees them)",
                std::to_string(r.unfinished)},
               {"STORE file", r.identity_rebuilt ? "made anew" : "kept"},
               {"old catalog", r.old_catalog.empty() ? "none" : r.old_catalog.string()}});
  for (const std::string& what : r.quarantined) std::printf("quarantined: %s\n", what.c_str());
  for (const std::string& what : r.set_aside) {
    std::printf("moved to damaged/: %s\n", what.c_str());
  }
  std::printf("%s\n", kNotInTheFiles);
}

}  // namespace

Status RecoverStore(const Options& options) {
  storage::RecoverOptions recover;
  recover.dir = options.dir;
  recover.verify_data = options.verify_data;
  recover.prune = options.prune;
  recover.encryption_key_file = options.key_file;
  PREFIXD_ASSIGN(const storage::RecoverReport r,
                 storage::RecoverCatalog(recover, ShowProgress("recover", options.quiet)));
  if (options.json) {
    PrintJson({{"models", r.models},
               {"segments", r.segments},
               {"prefixes", r.names},
               {"bytes", r.bytes},
               {"freed", r.freed},
               {"unfinished", r.unfinished},
               {"identity_rebuilt", r.identity_rebuilt},
               {"old_catalog", r.old_catalog.string()},
               {"quarantined", r.quarantined},
               {"set_aside", r.set_aside}});
  } else {
    PrintText(r, options.prune);
  }
  const size_t bad = r.quarantined.size() + r.set_aside.size();
  if (bad == 0) return {};
  return Error{Code::kCorrupt, "the catalog is made anew, but " + std::to_string(bad) +
                                   " segments are not served; put their prompts again"};
}

}  // namespace prefixd::ctl
