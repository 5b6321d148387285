// Which estimator was chosen for each head, by the error it made; how that is stored, and what each
// estimator costs.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "prefixd/options.h"
#include "prefixd/types.h"
#include "runtime/derived/models.h"

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

std::vector<std::byte> SerializeChoices(std::span<const HeadChoice> choices);
Result<std::vector<HeadChoice>> DeserializeChoices(std::span<const std::byte> bytes);
// The choices depend on anchors, estimators and their sizes.
std::string ChoiceProducer(const RuntimeOptions& options, const Model& model);

}  // namespace prefixd
