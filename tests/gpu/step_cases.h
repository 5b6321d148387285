// What every way of running the CUDA step must get right: random groups compared with attention/ in
// float64 and float32, hard cases, and refusals. Shared by the emulated and the device tests.
#pragma once

#include <functional>
#include <span>

#include "gpu/step/step_host.h"
#include "tests/gpu/step_groups.h"

namespace prefixd::gpu::testing {

// Runs one batch: HostStep::Run, or the kernels on emulated blocks.
using Runner =
    std::function<Status(std::span<const GroupStepInput>, std::span<const GroupStepOutput>)>;

// Runs the batch and compares every head with the reference and with the CPU's step.
void ExpectAgrees(const Runner& run, std::span<const Group> groups);

// The cases. `max_dim` and `max_mid` keep slow runners bearable.
void RandomBatches(const Runner& run, uint64_t seed, int batches, uint32_t max_dim,
                   uint32_t max_mid);
// Every kind of estimator in each of its forms, alone and in one batch.
void EveryForm(const Runner& run, uint64_t seed);
void HardCases(const Runner& run, uint64_t seed);
void Refusals(const Runner& run, uint64_t seed);

// Steps of a session find its summaries on the device; another session's at the same addresses are
// other ones; the memory stays within its limit and goes with the sessions.
struct SessionCases {
  ShapeSpec shape;
  uint32_t mid = 0, k = 0;
  int sessions = 0;
  size_t most_bytes = 0;  // of the device
};
void KeepsSummaries(HostStep& step, const SessionCases& cases, uint64_t seed);

}  // namespace prefixd::gpu::testing
