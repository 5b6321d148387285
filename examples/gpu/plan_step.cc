// Plans one layer's step of an 8B model on this machine's device and prints what it takes. An
// engine with a CUDA stream of its own makes this call first, once per shape; LaunchStep
// (prefixd/gpu/step.h) then runs the step.
#include <prefixd/gpu/device.h>
#include <prefixd/gpu/step.h>

#include <cmath>
#include <cstdio>

int main() {
  using namespace prefixd::gpu;
  const auto device = ProbeDevice();
  if (!device.ok()) {
    std::printf("no device: %s\n", device.error().message.c_str());
    return 3;
  }
  StepShape shape;
  shape.n_groups = 8;  // KV heads of one session
  shape.group = 4;     // query heads per KV head
  shape.row = {128, 128, prefixd::DType::kBf16};
  shape.layer.scale = 1 / std::sqrt(128.0f);
  shape.max_rows = 20 + 1311;  // anchors, and 1% of 128k tokens
  const auto plan = PlanStep(shape, *device);
  if (!plan.ok()) {
    std::printf("%s\n", plan.error().message.c_str());
    return 1;
  }
  std::printf("%s: %u blocks for each KV head, %zu bytes of workspace\n", device->name.c_str(),
              plan->n_splits, plan->workspace_bytes);
}
