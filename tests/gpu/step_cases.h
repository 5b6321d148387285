// What every way of running the CUDA step must get right: random groups compared with attention/ in
// float64 and float32, hard cases, and refusals. Shared by the emulated and the device tests.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "attention/step.h"
#include "tests/support/random_kv.h"

namespace prefixd::gpu::testing {

using prefixd::testing::OwnedRows;
using prefixd::testing::Random;

// Runs one batch: HostStep::Run, or the kernels on emulated blocks.
using Runner =
    std::function<Status(std::span<const GroupStepInput>, std::span<const GroupStepOutput>)>;

struct ShapeSpec {
  uint32_t group = 1;
  RowShape row;
  float softcap = 0;
  uint32_t d_phi = 8, d_emb = 8;
  float query_scale = 1;
};
// Dimensions up to max_dim, group sizes up to 16; every dtype.
ShapeSpec RandomShape(Random& random, uint32_t max_dim);

// One group with everything its input borrows.
struct Group {
  std::vector<float> queries;
  OwnedRows sinks, tail, mid, retrieved;
  std::vector<Cut> cuts;
  std::unique_ptr<MomentSummary> moment;
  std::unique_ptr<PhiCache> phi;
  std::vector<FeatureMap> phi_q;
  std::unique_ptr<FeatureMap> phi_k;
  GroupStepInput input;

  // Fills `input` with spans of the members above.
  void Bind(const ShapeSpec& shape, EstimatorKind estimator);
};
enum class CutSource { kNone, kExact, kApproximate };
struct GroupSpec {
  uint32_t sinks = 4, tail = 16, mid = 0, k = 0;
  EstimatorKind estimator = EstimatorKind::kNone;
  CutSource cuts = CutSource::kNone;
  bool cross = true;             // moment: with the cross moment
  bool moment_with_phi = false;  // phi: with the mean key, for the bracket
  bool identical_keys = false;
};
Group MakeGroup(Random& random, const ShapeSpec& shape, const GroupSpec& spec);

// Runs the batch and compares every head with the reference and with the CPU's step.
void ExpectAgrees(const Runner& run, std::span<const Group> groups);

// The cases. `max_dim` and `max_mid` keep slow runners bearable.
void RandomBatches(const Runner& run, uint64_t seed, int batches, uint32_t max_dim,
                   uint32_t max_mid);
void HardCases(const Runner& run, uint64_t seed);
void Refusals(const Runner& run, uint64_t seed);

}  // namespace prefixd::gpu::testing
