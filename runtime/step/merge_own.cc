#include "runtime/step/merge_own.h"

#include "attention/rows/finite_check.h"
#include "base/call_scope.h"
#include "prefixd/merge.h"
#include "runtime/step/charges.h"

namespace prefixd {

Status MergeOwn(ScratchPool& scratch_pool, const SessionPlan& plan, size_t head, const OwnRows& own,
                uint32_t n, uint32_t after, std::span<const float> q, std::span<float> y,
                std::span<float> lse, Ledger& ledger) {
  const PreparedPrefix& prefix = *plan.prefix;
  const KvGeometry& geometry = prefix.model()->spec.geometry;
  const uint32_t of_layer = prefix.layer_of(head), group = geometry.group_size(of_layer);
  const LayerGeometry& layer = geometry.layers[of_layer];
  const RowShape row = geometry.row(of_layer);
  const auto scratch = scratch_pool.Acquire();
  StageTimer timer(ledger.compute_ns);
  // The rows [begin, end) for the queries of tokens [first, first + some).
  const auto merge = [&](uint32_t first, uint32_t some, uint32_t begin, uint32_t end) -> Status {
    const size_t at = size_t{first} * group, queries = size_t{some} * group;
    const auto own_y = Scratch::Take(scratch->y, queries * row.value_dim);
    const auto own_lse = Scratch::Take(scratch->lse, queries);
    PREFIXD_TRY(scratch->exact.Begin(q.subspan(at * row.key_dim, queries * row.key_dim),
                                     static_cast<uint32_t>(queries), layer, row));
    Status goes_on;
    const bool finite = own.Visit(begin, end, row, [&](const RowsView& rows) {
      goes_on = CheckCall();
      return goes_on.ok() && scratch->exact.Add(rows);
    });
    PREFIXD_TRY(goes_on);
    // The rows themselves were found finite when they were appended.
    if (!finite || !scratch->exact.Finish(own_y, own_lse)) return ExplainNonFinite({});
    for (size_t i = 0; i < queries; ++i) {
      MergeStates(y.subspan((at + i) * row.value_dim, row.value_dim), &lse[at + i],
                  own_y.subspan(i * row.value_dim, row.value_dim), own_lse[i]);
    }
    return {};
  };
  // What all queries see is read once for all of them. The prefix has the first ones already.
  const uint32_t all_see = own.size() - after - n + 1;
  PREFIXD_TRY(merge(0, n, plan.moved, all_see));
  for (uint32_t i = 1; i < n; ++i) PREFIXD_TRY(merge(i, 1, all_see, all_see + i));
  return {};
}

}  // namespace prefixd
