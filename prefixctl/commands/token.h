// Makes tokens for the daemon's file auth.tokens, and looks at such a file. No daemon is needed.
#pragma once

#include "prefixctl/commands/commands.h"
#include "prefixd/result.h"

namespace prefixd::ctl {

// Prints a new token for options.name and the lines for the file, or appends those to options.file.
Status NewToken(const Options& options);
// Says what options.file lets whom do, or why the daemon would refuse it.
Status CheckTokens(const Options& options);

}  // namespace prefixd::ctl
