// How many pages a step must read, for any placement of rows on pages: the SSD's amplification.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/support/retrieval_trace.h"

namespace prefixd::bench {

// The page of each token of one (layer, KV head), counted from anywhere.
using PageMap = std::vector<uint64_t>;
// By head number, layer * n_kv_heads + KV head.
using Placement = std::function<PageMap(size_t head)>;

struct PageReads {
  double rows = 0, pages = 0, best_pages = 0;  // of one step, all layers and KV heads; means
  // 4096 * pages / bytes of the rows, key and value: below 1 is possible where values alone are
  // read.
  double amplification = 0, best = 0;
  // Page-granular selection: rows of the mid region that lie in the pages read, for each row asked
  // for.
  double rows_joined = 0;
};

// `part_bytes`: of what is read of each row, which bounds the best packing. `fraction`: index into
// TraceOptions::fractions.
PageReads CountPageReads(const RetrievalTrace& trace, size_t fraction, uint32_t part_bytes,
                         const Placement& placement);

// Rows in order of arrival, keys and values adjacent: as a put writes them.
Result<Placement> ArrivalPlacement(const RetrievalTrace& trace);
// `bytes` of every row in order of arrival, packed into pages of their own (a plane of values).
Placement ArrivalPlane(const RetrievalTrace& trace, uint32_t bytes);
// Rows permuted inside chunks of `chunk_tokens`: order(head, chunk) is what ClusterOrder returns
// for the tokens of one chunk. Chunks begin on a page. `bytes` of each row go to these pages.
using ChunkOrder = std::function<std::vector<uint32_t>(size_t head, TokenRange chunk)>;
Placement ChunkedPlacement(const RetrievalTrace& trace, uint32_t chunk_tokens, uint32_t bytes,
                           ChunkOrder order);

}  // namespace prefixd::bench
