// Measures at ingest which estimator completes each head best, on the prefill's own queries.
//
// The prefix is cut at P, three quarters into the prompt: the sampled queries come from behind it,
// so every key before P was visible to them. Each estimator reads what the budget leaves after its
// own cost (docs/mathematics.md), with exact Top-K selection, and is compared with exact attention
// over [0, P) by mean relative l1 output error [53] over samples and query heads. Rows are streamed
// twice: for the scores and the exact outputs, then for the rows that any sample retrieves. the
// scores and the truth, then for the rows that any sample retrieves.
#pragma once

#include <vector>

#include "prefixd/ingest.h"
#include "runtime/derived/query_samples.h"
#include "runtime/summaries/head_choice.h"
#include "runtime/summaries/summaries.h"

namespace prefixd {

// Returns the choices of all heads at all options().choice_budgets that pay for the anchors; empty
// when there is nothing to choose (no samples, or no mid region at P). `prefix` is open at its full
// length. Counts heads in `progress`.
Result<std::vector<HeadChoice>> MeasureChoices(const DerivedContext& context, const Model& model,
                                               const storage::StoredPrefix& prefix,
                                               const QuerySamples& samples, WorkProgress& progress);

}  // namespace prefixd
