// Lists what a store holds, page by page.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "prefixd/model.h"
#include "prefixd/prefix_summary.h"

namespace prefixd {

// One page of a list. Lists have a fixed order, and an item keeps its place for as long as it
// exists: what is added or removed between two pages neither skips nor repeats others.
struct ListSpec {
  std::string after;   // `next` of the page before; empty: the first page
  uint32_t limit = 0;  // items at most; 0, or more than kMaxListItems: as many as that
  std::optional<std::string> tenant;  // only this one's; absent: all that the caller may see
};
inline constexpr uint32_t kMaxListItems = 1000;

// A page may have fewer items than asked for, where they are large. `next` is empty behind the
// last.
struct PrefixPage {
  std::vector<PrefixSummary> prefixes;  // by tenant and id
  std::string next;
};
struct ModelPage {
  std::vector<ModelSpec> models;  // by name
  std::string next;
};

}  // namespace prefixd
