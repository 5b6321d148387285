// Opens the CUDA backend of Compute; only in builds with gpu/.
#pragma once

#include <memory>

#include "prefixd/result.h"
#include "runtime/step/compute.h"

namespace prefixd {

// steps: whether steps run on the device too, beside questions. kUnavailable, with the reason, when
// no device answers.
Result<std::unique_ptr<Compute>> OpenCudaCompute(bool steps);

}  // namespace prefixd
