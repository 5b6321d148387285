// Chooses which rows of a prefix stay when it is compressed, and measures what that does to steps
// over it, before anything is changed (prefixd/compress.h).
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <cstdint>
#include <vector>

#include "prefixd/compress.h"
#include "runtime/derived/derived_context.h"
#include "runtime/derived/models.h"
#include "runtime/derived/query_samples.h"
#include "runtime/retention/scores.h"
#include "runtime/work/work_progress.h"

namespace prefixd {

struct Compression {
  std::vector<std::vector<uint32_t>> kept;  // [heads]: tokens of the last segment, ascending
  CompressReport report;                    // but for bytes, and whether it is done
};

// samples: null where the put kept no queries; such policies as need them are refused then, with
// kFailedPrecondition. Counts heads in `progress`.
Result<Compression> PlanCompression(const DerivedContext& context, const Model& model,
                                    const storage::StoredPrefix& prefix, const CompressSpec& spec,
                                    const QuerySamples* samples, WorkProgress& progress);

}  // namespace prefixd
