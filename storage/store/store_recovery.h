// Recovers a directory that may have been left at any moment, when the store opens and before
// anyone else uses it: so it takes no lock but those of the parts that it calls.
#pragma once

#include <functional>
#include <set>

#include "storage/core/store_core.h"
#include "storage/store/opening_log.h"

namespace prefixd::storage {

Status RecoverStore(StoreCore& core);

// Implements PrefixStore::CheckEnds; runs beside everything else.
Status CheckEnds(StoreCore& core, const std::function<bool()>& go_on);

// A step of it (store_adopt.cc): commits again what the catalog lost. Returns the files that are
// neither known nor may be freed.
Result<std::set<Uuid>> AdoptLostCommits(StoreCore& core, OpeningLog& log);

}  // namespace prefixd::storage
