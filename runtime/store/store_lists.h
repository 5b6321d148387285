// Lists stored prefixes, page by page, and describes one.
//
// Thread-safety: free functions, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "prefixd/lists.h"
#include "prefixd/result.h"
#include "runtime/store/core.h"

namespace prefixd {

inline constexpr uint64_t kMaxPageBytes = 4 << 20;  // about, but a page has at least one item
size_t PageLimit(const ListSpec& spec);

// kInvalidArgument when `after` is no page's `next`, or of a list of another tenant.
Result<PrefixPage> PrefixPageOf(const Core& core, const ListSpec& spec);
// As Store::Prefix.
Result<PrefixDetail> PrefixDetailOf(const Core& core, std::string_view prefix);

}  // namespace prefixd
