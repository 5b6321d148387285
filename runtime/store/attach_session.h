// Attaches sessions to the stored prefixes of an open store.
//
// Thread-safety: may be called concurrently with everything else.
#pragma once

#include <memory>

#include "prefixd/attach.h"
#include "prefixd/result.h"
#include "prefixd/session.h"
#include "runtime/store/core.h"

namespace prefixd {

// Implements Store::Attach; the session keeps the core alive.
Result<std::shared_ptr<Session>> AttachSession(const std::shared_ptr<Core>& core,
                                               const AttachSpec& spec);

}  // namespace prefixd
