// Returns whole lists, page by page, for tools and tests that want all of them.
//
// Thread-safety: as the store's.
#pragma once

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "prefixd/store.h"

namespace prefixd {

inline Result<std::vector<PrefixSummary>> EveryPrefix(Store& store, ListSpec spec = {}) {
  std::vector<PrefixSummary> all;
  do {
    PREFIXD_ASSIGN(PrefixPage page, store.ListPrefixes(spec));
    std::ranges::move(page.prefixes, std::back_inserter(all));
    spec.after = std::move(page.next);
  } while (!spec.after.empty());
  return all;
}

inline Result<std::vector<ModelSpec>> EveryModel(Store& store, ListSpec spec = {}) {
  std::vector<ModelSpec> all;
  do {
    PREFIXD_ASSIGN(ModelPage page, store.ListModels(spec));
    std::ranges::move(page.models, std::back_inserter(all));
    spec.after = std::move(page.next);
  } while (!spec.after.empty());
  return all;
}

}  // namespace prefixd
