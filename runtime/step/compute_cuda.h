// Opens the CUDA backend of Compute; only in builds with gpu/.
#pragma once

#include <memory>

#include "prefixd/result.h"
#include "runtime/step/compute.h"

namespace prefixd {

// kUnavailable, with the reason, when no device answers.
Result<std::unique_ptr<Compute>> OpenCudaCompute();

}  // namespace prefixd
