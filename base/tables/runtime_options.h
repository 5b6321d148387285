// Declares the table of a store's options: every member of RuntimeOptions, once. Embedded stores,
// the daemon's file and command line, and the reference page follow from it.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <vector>

#include "base/tables/option.h"
#include "prefixd/options.h"

namespace prefixd {

// The returned options point into `options`, which must outlive them.
std::vector<Option> OptionsOf(RuntimeOptions& options);

// kInvalidArgument names the first option that is out of its bounds.
Status CheckOptions(RuntimeOptions options);

}  // namespace prefixd
