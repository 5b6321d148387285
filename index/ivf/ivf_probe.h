// Which lists a search scans, and which of the scanned tokens need their exact score. Internal.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/ivf/ivf_lists.h"
#include "prefixd/partition.h"

namespace prefixd::index {

// Entries [begin, end) of one list.
struct ListSlice {
  uint32_t list = 0;
  size_t begin = 0, end = 0;
};

// The union over query heads of each head's best lists by q.centroid, `probe_fraction` of all;
// then further lists, best of any head first, until at least `at_least` rows are in (or all lists
// are). Slices hold only rows in `rows`; lists without any are left out. Ascending by list.
//   queries: [group][dim]
std::vector<ListSlice> ChooseLists(const IvfLists& lists, std::span<const float> queries,
                                   uint32_t group, float scale, float probe_fraction,
                                   TokenRange rows, size_t at_least);

// Columns below `n_codes`, ascending, that may be among the k + 1 best by the group ranking
// (SelectByGroupMax) once scores are exact, if every score there is within `error` of the truth.
//   scores: [group][n]
std::vector<uint32_t> WithinReach(std::span<const float> scores, uint32_t group, size_t n_codes,
                                  uint32_t k, double error);

}  // namespace prefixd::index
