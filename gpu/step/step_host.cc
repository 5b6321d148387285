#include "gpu/step/step_host.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/device/host_memory.h"
#include "gpu/step/host_batch.h"
#include "prefixd/gpu/step.h"

namespace prefixd::gpu {

using internal::Grow;
using internal::HostImage;
using internal::ReadableByDevice;

Result<HostStep> HostStep::Create(int ordinal) {
  HostStep step;
  PREFIXD_ASSIGN(step.device_, ProbeDevice(ordinal));
  PREFIXD_TRY(UseDevice(ordinal));
  PREFIXD_ASSIGN(step.stream_, OwnedStream::Create());
  return step;
}

Status HostStep::Run(std::span<const GroupStepInput> in, std::span<const GroupStepOutput> out,
                     ResidentSummaries* resident, const std::shared_ptr<const void>& owner) {
  PREFIXD_ASSIGN(const StepShape shape, internal::CheckBatch(in, out));
  PREFIXD_ASSIGN(const StepPlan plan, PlanStep(shape, device_));
  PREFIXD_TRY(UseDevice(device_.ordinal));

  std::vector<std::shared_ptr<const internal::ResidentGroup>> kept;
  std::vector<const internal::ResidentGroup*> pointers;
  for (size_t i = 0; i < in.size() && resident; ++i) {
    PREFIXD_ASSIGN(auto group, resident->Find(in[i], owner, stream_.get()));
    pointers.push_back(group.get());
    kept.push_back(std::move(group));
  }
  const internal::Elsewhere elsewhere{
      pointers, [&](const RowsView& rows) { return ReadableByDevice(rows, shape.row.dtype); }};
  HostImage measure(nullptr, nullptr);
  internal::PackBatch(in, shape, measure, elsewhere);
  const size_t n = in.size(), heads = n * shape.group;
  const size_t y_floats = heads * shape.row.value_dim;
  const size_t output_bytes = (y_floats + 2 * heads + n) * sizeof(float);
  PREFIXD_TRY(Grow(staging_, std::max(measure.bytes(), output_bytes)));
  PREFIXD_TRY(Grow(input_, measure.bytes()));
  PREFIXD_TRY(Grow(workspace_, plan.workspace_bytes));
  PREFIXD_TRY(Grow(output_, output_bytes));

  HostImage image(staging_.data(), input_.data());
  BatchStepArgs args = internal::PackBatch(in, shape, image, elsewhere);
  args.y = output_.as<float>();
  args.lse = args.y + y_floats;
  args.rho_z = args.lse + heads;
  args.errors = reinterpret_cast<uint32_t*>(args.rho_z + heads);
  args.workspace = workspace_.data();
  args.workspace_bytes = workspace_.bytes();

  PREFIXD_TRY(CopyToDevice(input_.data(), staging_.data(), image.bytes(), stream_.get()));
  const Status launched = LaunchStep(plan, args, stream_.get());
  // A failed launch is waited for too: the staging memory must not be reused while it is being
  // copied.
  if (!launched.ok()) {
    (void)Synchronize(stream_.get());
    return launched;
  }
  PREFIXD_TRY(CopyToHost(staging_.data(), output_.data(), output_bytes, stream_.get()));
  PREFIXD_TRY(Synchronize(stream_.get()));

  const float* y = reinterpret_cast<const float*>(staging_.data());
  const float* lse = y + y_floats;
  const float* rho_z = lse + heads;
  for (size_t i = 0; i < n; ++i) {
    uint32_t word;
    std::memcpy(&word, rho_z + heads + i, sizeof(word));
    if (const Status s = internal::ExplainGroup(word, in, i); !s.ok()) {
      return s;
    }
    const size_t g = shape.group, dv = shape.row.value_dim;
    std::copy_n(y + i * g * dv, g * dv, out[i].y.data());
    std::copy_n(lse + i * g, g, out[i].lse.data());
    std::copy_n(rho_z + i * g, g, out[i].rho_z.data());
  }
  return {};
}

}  // namespace prefixd::gpu
