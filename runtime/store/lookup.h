// Finds what calls name: models, prefixes, derived rows.
//
// Thread-safety: these functions may be called concurrently with everything else.
#pragma once

#include <string_view>

#include "prefixd/result.h"
#include "runtime/store/core.h"
#include "storage/segment/prefix_info.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

Status KnownModel(const Core& core, std::string_view model);  // kNotFound
// kNotFound, also for what is no id.
Result<storage::PrefixInfo> FindPrefix(const Core& core, std::string_view prefix);

// Returns which rows a spec takes beside exact ones. A put continues no compressed prefix: who adds
// to one needs all of its rows.
template <typename Spec>
Result<storage::Acceptance> AcceptanceOf(const Spec& spec) {
  PREFIXD_ASSIGN(const storage::Lineage lineage, storage::ParseLineage(spec.lineage));
  storage::Acceptance accept{spec.accept_approximate, lineage};
  if constexpr (requires { spec.accept_compressed; }) accept.compressed = spec.accept_compressed;
  return accept;
}

}  // namespace prefixd
