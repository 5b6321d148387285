// Carries out `prefixctl recover` on a store's directory, without a daemon.
#pragma once

#include "prefixctl/commands/commands.h"
#include "prefixd/result.h"

namespace prefixd::ctl {

// Prints to stdout. kCorrupt when segments had to be set aside or quarantined; the store is usable.
Status RecoverStore(const Options& options);

}  // namespace prefixd::ctl
