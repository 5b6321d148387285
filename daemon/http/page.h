// Holds the status page (page.html), which the build compiles in.
//
// Thread-safety: a free function.
#pragma once

#include "daemon/http/message.h"

namespace prefixd::daemon {

// The page with a policy that lets its own script and style run, and nothing else.
HttpAnswer StatusPage();

}  // namespace prefixd::daemon
