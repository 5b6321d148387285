// Stores which estimator was chosen for each head by its measured error, and computes what each
// estimator costs.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "attention/estimators/estimator.h"
#include "prefixd/estimator_variant.h"
#include "prefixd/ingest.h"
#include "prefixd/kv_shape.h"
#include "prefixd/options.h"
#include "runtime/derived/models.h"

namespace prefixd {

// Output errors nearer than this count as equal: it is a quarter of the change that rounding an
// output to bf16 may make. Smaller errors, on heads where retrieval leaves next to nothing, are
// rounding noise: they do not predict the error for a query that spreads over such a head.
inline constexpr double kErrorResolution = 5e-4;

// Sorts errors, given cheapest estimator first, by preference: each place goes to the cheapest
// estimator that is as good as the best of those left.
void OrderByPreference(std::span<EstimatorError> errors);

// Whether `auto` may choose the estimator beside a selector by codes, or by exact scores. An exact
// search computes every score anyway; with codes, the scores of all keys make a search several
// times as long, which no budget counts: only policies that name scan get it there
// (docs/decisions/029).
bool IsChosen(const EstimatorVariant& estimator, bool codes);
// Returns the first of the errors whose estimator may be chosen.
std::vector<EstimatorError>::const_iterator FirstOf(const std::vector<EstimatorError>& errors,
                                                    bool codes);

// Returns what an estimator's summary costs in tokens for a head with such rows, as stored: float32
// beside rows of `row_bytes` (storage::MeanRowBytes), whatever dtype the rows were given in.
double EstimatorTokens(const RuntimeOptions& options, const RowShape& row,
                       const EstimatorVariant& estimator, const FeatureMapSet* maps,
                       double row_bytes);

// Returns what a head's summary costs beyond that, in tokens: the rows that a phi cache keeps
// apart.
double ApartTokens(const EstimatorSummary& summary, double row_bytes);

// Returns what a retrieved token costs in tokens: 1, plus its stored features where phi reads them.
double RetrievedTokenCost(const RuntimeOptions& options, const RowShape& row,
                          const EstimatorVariant& estimator, const FeatureMapSet* maps,
                          double row_bytes);

std::vector<std::byte> SerializeChoices(std::span<const HeadChoice> choices);
Result<std::vector<HeadChoice>> DeserializeChoices(std::span<const std::byte> bytes);
// Names what the choices depend on: anchors, estimators and their sizes.
std::string ChoiceProducer(const RuntimeOptions& options, const Model& model);

}  // namespace prefixd
