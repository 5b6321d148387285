#include "bench/support/page_reads.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "storage/segment/segment_layout.h"

namespace prefixd::bench {

using storage::kPageBytes;

PageReads CountPageReads(const RetrievalTrace& trace, size_t fraction, uint32_t part_bytes,
                         const Placement& placement) {
  const auto per_page = static_cast<size_t>(std::max<uint64_t>(1, kPageBytes / part_bytes));
  uint64_t rows = 0, pages = 0, best = 0, joined = 0;
  for (size_t head = 0; head < trace.heads.size(); ++head) {
    const PageMap page_of = placement(head);
    std::map<uint64_t, uint64_t> mid_rows;  // in each page
    for (uint32_t t = trace.mid.begin; t < trace.mid.end; ++t) ++mid_rows[page_of[t]];
    for (const std::vector<uint32_t>& ids : trace.heads[head].sets[fraction]) {
      std::set<uint64_t> wanted;
      for (const uint32_t token : ids) wanted.insert(page_of[token]);
      rows += ids.size();
      pages += wanted.size();
      for (const uint64_t page : wanted) joined += mid_rows[page];
      best += (ids.size() + per_page - 1) / per_page;
    }
  }
  const auto steps = double(trace.heads[0].sets[fraction].size());
  const double bytes = double(rows * trace.geometry.row().bytes());
  return {double(rows) / steps,
          double(pages) / steps,
          double(best) / steps,
          double(pages * kPageBytes) / bytes,
          double(best * kPageBytes) / bytes,
          double(joined) / double(rows)};
}

Result<Placement> ArrivalPlacement(const RetrievalTrace& trace) {
  const KvGeometry& g = trace.geometry;
  storage::SegmentShape shape;
  shape.n_layers = g.n_layers;
  shape.n_kv_heads = g.n_kv_heads;
  shape.key_bytes = static_cast<uint32_t>(g.row().key_bytes());
  shape.value_bytes = static_cast<uint32_t>(g.row().value_bytes());
  shape.n_tokens = trace.n_tokens;
  shape.manifest_bytes = 1;
  PREFIXD_ASSIGN(const storage::SegmentLayout layout, storage::SegmentLayout::Of(shape));
  return Placement([layout](size_t head) {
    const uint32_t heads = layout.shape.n_kv_heads;
    PageMap pages(layout.shape.n_tokens);
    for (uint32_t i = 0; i < pages.size(); ++i) {
      pages[i] = layout.run_page(static_cast<uint32_t>(head / heads),
                                 static_cast<uint32_t>(head % heads)) +
                 layout.row.page(i);
    }
    return pages;
  });
}

Placement ArrivalPlane(const RetrievalTrace& trace, uint32_t bytes) {
  return [n = trace.n_tokens, per_page = kPageBytes / bytes](size_t) {
    PageMap pages(n);
    for (uint32_t i = 0; i < n; ++i) pages[i] = i / per_page;
    return pages;
  };
}

Placement ChunkedPlacement(const RetrievalTrace& trace, uint32_t chunk_tokens, uint32_t bytes,
                           ChunkOrder order) {
  return [n = trace.n_tokens, chunk_tokens, per_page = kPageBytes / bytes,
          order = std::move(order)](size_t head) {
    PageMap pages(n);
    uint64_t first_page = 0;
    for (uint32_t begin = 0; begin < n; begin += chunk_tokens) {
      const TokenRange chunk{begin, std::min(n, begin + chunk_tokens)};
      const std::vector<uint32_t> places = order(head, chunk);
      for (size_t place = 0; place < places.size(); ++place) {
        pages[begin + places[place]] = first_page + place / per_page;
      }
      first_page += (chunk.size() + per_page - 1) / per_page;
    }
    return pages;
  };
}

}  // namespace prefixd::bench
