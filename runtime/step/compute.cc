#include "runtime/step/compute.h"

#include <string>

#if defined(PREFIXD_HAVE_CUDA)
#include "runtime/step/compute_cuda.h"
#endif

namespace prefixd {
namespace {

class CpuCompute : public Compute {
 public:
  std::string name() const override { return "cpu"; }
  Status Step(const GroupStepInput& in, const GroupStepOutput& out,
              const std::shared_ptr<const void>&) override {
    return GroupStep(in, out);
  }
  Status AttendExact(std::span<const float> queries, uint32_t n_queries, const LayerGeometry& layer,
                     const RowsView& rows, std::span<float> y, std::span<float> lse) override {
    return ExactAttention(queries, n_queries, layer, rows, y, lse);
  }
};

Result<std::unique_ptr<Compute>> OpenCuda([[maybe_unused]] bool steps) {
#if defined(PREFIXD_HAVE_CUDA)
  return OpenCudaCompute(steps);
#else
  return Error{Code::kUnavailable, "this build of prefixd has no CUDA step"};
#endif
}

}  // namespace

Result<std::unique_ptr<Compute>> Compute::Open(std::string_view wanted) {
  if (wanted != "auto" && wanted != "cpu" && wanted != "cuda") {
    return InvalidArgument("compute must be auto, cpu or cuda, not '" + std::string(wanted) + "'");
  }
  if (wanted != "cpu") {
    auto cuda = OpenCuda(wanted == "cuda");
    if (cuda.ok()) return cuda;
    if (wanted == "cuda") {
      return Error{Code::kUnavailable, "compute = cuda was asked for: " + cuda.error().message +
                                           "; use compute = cpu or auto"};
    }
  }
  return std::unique_ptr<Compute>(std::make_unique<CpuCompute>());
}

}  // namespace prefixd
