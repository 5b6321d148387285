// Tells whether what was trained for a model's weights may serve another model.
//
// Thread-safety: a pure function.
#pragma once

#include <string>
#include <string_view>

#include "prefixd/model.h"

namespace prefixd {

// Returns why what was trained for `weights` ("blake2b:<hex>", or empty: unknown) does not belong
// to the model, or "". Digests of one kind can be compared; a name that the user gave cannot.
std::string TrainedForOthers(const ModelSpec& spec, std::string_view weights);

}  // namespace prefixd
