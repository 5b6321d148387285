#include "runtime/step/compute_cuda.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gpu/step/resident.h"
#include "gpu/step/step_host.h"
#include "prefixd/gpu/exact.h"
#include "prefixd/gpu/step.h"
#include "storage/io/errors.h"

namespace prefixd {
namespace {

// The CPU takes shapes beyond the kernels' limits, estimates that are reported but not merged, and
// phi caches that keep rows apart.
bool FitsDevice(const GroupStepInput& in, const GroupStepOutput& out) {
  if (in.estimator != EstimatorKind::kNone && !in.merge_estimate) return false;
  const size_t rows = in.sinks.count + in.tail.count + in.retrieved.count;
  if (in.group == 0 || in.group > gpu::kMaxGroup || rows > gpu::kMaxRows) return false;
  if (in.queries.size() / in.group > gpu::kMaxDim || out.y.size() / in.group > gpu::kMaxDim) {
    return false;
  }
  if (in.clusters != nullptr && in.clusters->size() > gpu::kMaxClusters) return false;
  if (in.phi != nullptr && !in.phi->apart().empty()) return false;
  const auto fits = [](const FeatureMap& map) {
    return map.d_phi <= gpu::kMaxDim && map.d_emb <= gpu::kMaxEmbedding;
  };
  return in.estimator != EstimatorKind::kPhi ||
         ((in.phi_k == nullptr || fits(*in.phi_k)) && std::ranges::all_of(in.phi_q, fits));
}

// The CPU takes few queries, because rows travel to the device with each call, and copying a row
// costs the CPU about as much memory traffic as attending to it. From a full tile of the kernel on,
// arithmetic dominates.
constexpr uint32_t kFewQueries = 64;

bool FitsDevice(uint32_t n_queries, const RowsView& rows) {
  return n_queries >= kFewQueries && n_queries <= gpu::kMaxExactQueries &&
         rows.count <= gpu::kMaxExactRows && rows.shape.key_dim <= gpu::kMaxDim &&
         rows.shape.value_dim <= gpu::kMaxDim;
}

class CudaCompute : public Compute {
 public:
  CudaCompute(gpu::HostStep first, bool steps)
      : name_((steps ? "cuda: " : "cpu, questions on cuda: ") + first.device().name),
        steps_(steps),
        resident_(first.device().memory_bytes / 4) {
    free_.push_back(std::move(first));
  }

  std::string name() const override { return name_; }
  bool steps_on_device() const override { return steps_; }
  uint32_t queries_at_once() const override { return failed_ ? 1 : 4096; }

  // Falls back to the CPU for shapes that the device has no room for, for invalid inputs (the CPU's
  // error is returned), and when the device fails.
  Status Step(const GroupStepInput& in, const GroupStepOutput& out,
              const std::shared_ptr<const void>& owner) override {
    const bool done = steps_ && FitsDevice(in, out) && OnDevice([&](gpu::HostStep& step) {
                        return step.Run({&in, 1}, {&out, 1}, &resident_, owner);
                      });
    return done ? Status() : GroupStep(in, out);
  }
  Status AttendExact(std::span<const float> queries, uint32_t n_queries, const LayerGeometry& layer,
                     const RowsView& rows, std::span<float> y, std::span<float> lse) override {
    const bool done = FitsDevice(n_queries, rows) && OnDevice([&](gpu::HostStep& step) {
                        return step.AttendExact(queries, n_queries, layer, rows, y, lse);
                      });
    return done ? Status() : ExactAttention(queries, n_queries, layer, rows, y, lse);
  }

 private:
  // Runs `run` on the device, and returns whether it succeeded.
  template <typename Run>
  bool OnDevice(Run run) {
    if (failed_) return false;
    const Status status = [&]() -> Status {
      PREFIXD_ASSIGN(gpu::HostStep step, Acquire());
      PREFIXD_TRY(run(step));
      std::lock_guard lock(mutex_);
      free_.push_back(std::move(step));
      return {};
    }();
    if (!status.ok() && status.error().code != Code::kInvalidArgument) Note(status.error());
    return status.ok();
  }

  // Each thread that computes takes one stream with its buffers. A stream whose step failed is not
  // used again.
  Result<gpu::HostStep> Acquire() {
    {
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        gpu::HostStep step = std::move(free_.back());
        free_.pop_back();
        return step;
      }
    }
    return gpu::HostStep::Create();
  }

  // Memory may be free again for the next step; any other error leaves the context unusable.
  void Note(const Error& error) {
    const bool for_good = error.code != Code::kResourceExhausted;
    if (for_good) failed_ = true;
    if (noted_.exchange(true)) return;
    storage::LogWarning(
        "computing on the CUDA device failed, " +
        std::string(for_good ? "the CPU computes from now on: " : "the CPU does this one: ") +
        error.message);
  }

  const std::string name_;
  const bool steps_;
  gpu::ResidentSummaries resident_;
  std::atomic<bool> failed_{false}, noted_{false};
  std::mutex mutex_;
  std::vector<gpu::HostStep> free_;
};

}  // namespace

Result<std::unique_ptr<Compute>> OpenCudaCompute(bool steps) {
  PREFIXD_ASSIGN(gpu::HostStep step, gpu::HostStep::Create());
  return std::unique_ptr<Compute>(std::make_unique<CudaCompute>(std::move(step), steps));
}

}  // namespace prefixd
