// Which estimator completes each head best, measured at ingest on the prefill's own queries.
//
// The prefix is cut at P, three quarters into the prompt: the sampled queries come from behind it,
// so every key before P was visible to them. Each estimator reads what the budget leaves after its
// own cost (spec §4), with exact Top-K selection, and is compared with exact attention over [0, P)
// by mean relative l1 output error [53] over samples and query heads. Rows are streamed, twice: for
// the scores and the truth, then for the rows that any sample retrieves.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "prefixd/types.h"
#include "runtime/derived/query_samples.h"
#include "runtime/derived/summaries.h"

namespace prefixd {

// Output errors nearer than this are equal: a quarter of what rounding an output to bf16 may
// change. What lies below, on the heads where retrieval leaves next to nothing, is rounding noise
// and says nothing about the query that will find such a head diffuse.
inline constexpr double kErrorResolution = 5e-4;

// Orders errors, given cheapest estimator first, by preference: again and again the cheapest of
// those that are as good as the best of the rest.
void OrderByPreference(std::span<EstimatorError> errors);

// What an estimator's summary costs in tokens per head, as really stored: float32 beside rows of
// `row_bytes` (storage::MeanRowBytes), whatever the dtype they were given in.
double EstimatorTokens(const RuntimeOptions& options, const Model& model,
                       const EstimatorVariant& estimator, const FeatureMapSet* maps,
                       double row_bytes);

// What a retrieved token costs in tokens: 1, and its stored features where phi reads them.
double RetrievedTokenCost(const RuntimeOptions& options, const Model& model,
                          const EstimatorVariant& estimator, const FeatureMapSet* maps,
                          double row_bytes);

// Choices of all heads at all options().choice_budgets that pay for the anchors; empty when there
// is nothing to choose (no samples, or no mid region at P). `prefix` is open at its full length.
// Counts heads in `progress`.
Result<std::vector<HeadChoice>> MeasureChoices(const Rooms& rooms, const Model& model,
                                               const storage::StoredPrefix& prefix,
                                               const QuerySamples& samples, WorkProgress& progress);

std::vector<std::byte> SerializeChoices(std::span<const HeadChoice> choices);
Result<std::vector<HeadChoice>> DeserializeChoices(std::span<const std::byte> bytes);
// The choices depend on anchors, estimators and their sizes.
std::string ChoiceProducer(const RuntimeOptions& options, const Model& model);

}  // namespace prefixd
