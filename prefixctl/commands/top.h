// Shows how a daemon stands, again and again: `prefixctl top`.
//
// Thread-safety: free functions.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>

#include "prefixctl/commands/commands.h"

namespace prefixd::ctl {

struct TopLook {
  size_t columns = 0, lines = 0;  // of the terminal; 0: no bound
  bool plot = false;              // characters beyond ASCII may be printed
};
// One picture, lines with their ends. `now`: RemoteStore::Watch's; `before`: the one `seconds` ago,
// or null for the first. Whatever clients named is made printable.
std::string TopText(const nlohmann::json& now, const nlohmann::json& before, double seconds,
                    const TopLook& look);

// Until it is interrupted, or once (Options::once).
Status Top(RemoteStore& client, const Options& options);

}  // namespace prefixd::ctl
