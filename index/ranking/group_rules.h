// How the query heads of one KV head choose the set they share (spec §2, §4): three rankings of the
// mid tokens, of which the k best are read. The budget is the number of distinct tokens read,
// whichever rule chose them.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "prefixd/result.h"
#include "prefixd/selection.h"

namespace prefixd {

// The k best of n candidates, as positions `first_id` + index, ascending; of equal rank those with
// the lowest index. Cuts: with kMax and kSum from the largest rank left out, L_g + theta and
// L_g + log theta; with kUnion the largest score of head g left out. k >= n selects everything.
//   scores: [group][n], natural. NaN ranks first, so that the step can name the row
//   lse: [group] L_g over all candidates; empty: those of `scores`
//   scores_complete: false when scores are of a subset or approximate; cuts are then marked so
Selection SelectByGroup(GroupRule rule, std::span<const float> scores, uint32_t group, uint32_t n,
                        uint32_t k, uint32_t first_id, bool scores_complete,
                        std::span<const double> lse = {});

}  // namespace prefixd
