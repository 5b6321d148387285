#include "bench/row_orders.h"

#include <ctime>

#include "index/code_search/row_order.h"
#include "storage/segment/segment_layout.h"

namespace prefixd::bench {
namespace {

using storage::RowPart;

std::string Name(const OrderVariant& variant) {
  const std::string what = variant.part == RowPart::kRow ? "rows" : "values";
  if (variant.chunk_tokens == 0) return what + " in order of arrival";
  return what + (variant.by_scores ? " by scores" : " by keys") + " in chunks of " +
         std::to_string(variant.chunk_tokens);
}

}  // namespace

Result<OrderResult> MeasureOrder(const RetrievalTrace& trace, const OrderVariant& variant) {
  const KvGeometry& g = trace.geometry;
  const auto bytes = static_cast<uint32_t>(storage::PartBytes(g.row(), variant.part));
  OrderResult result{variant, Name(variant), {}, 0};
  Placement placement;
  if (variant.chunk_tokens == 0) {
    placement = ArrivalPlane(trace, bytes);
    if (variant.part == RowPart::kRow) {
      PREFIXD_ASSIGN(placement, ArrivalPlacement(trace));
    }
  } else {
    const auto order = [&](size_t head, TokenRange chunk) {
      const RetrievalTrace::Head& of = trace.heads[head];
      const RowsView keys{reinterpret_cast<const std::byte*>(of.keys.data()), trace.n_tokens,
                          g.key_dim * sizeof(float), RowShape{g.key_dim, 0, DType::kF32}};
      index::RowOrderOptions options;
      options.rows_per_page = static_cast<uint32_t>(storage::kPageBytes / bytes);
      if (variant.by_scores) options.queries = of.sample_queries;
      return index::ClusterOrder(keys.Sub(chunk.begin, chunk.size()), options);
    };
    // Ordered once; the placement is asked for every fraction.
    const Placement ordering = ChunkedPlacement(trace, variant.chunk_tokens, bytes, order);
    std::vector<PageMap> maps;
    const std::clock_t begun = std::clock();  // CPU time: others use the machine too
    for (size_t head = 0; head < trace.heads.size(); ++head) maps.push_back(ordering(head));
    const double seconds = double(std::clock() - begun) / CLOCKS_PER_SEC;
    result.seconds_per_16k_head = seconds / double(trace.heads.size()) * 16384 / trace.n_tokens;
    placement = [maps = std::move(maps)](size_t head) { return maps[head]; };
  }
  for (size_t f = 0; f < trace.heads[0].sets.size(); ++f) {
    result.reads.push_back(CountPageReads(trace, f, bytes, placement));
  }
  return result;
}

}  // namespace prefixd::bench
