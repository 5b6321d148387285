// What every way of running exact attention of a block of queries must get right, compared with
// float64. Shared by the emulated and the device tests.
#pragma once

#include <functional>
#include <vector>

#include "prefixd/gpu/exact.h"
#include "tests/support/random_kv.h"

namespace prefixd::gpu::testing {

using prefixd::testing::OwnedRows;
using prefixd::testing::Random;

// A batch in host memory.
struct ExactCase {
  ExactShape shape;
  struct Group {
    OwnedRows rows;
    std::vector<float> queries;      // [n][key_dim]
    uint32_t null_row = UINT32_MAX;  // whose value has no address, by address
    bool by_address = false;         // rows found by their addresses, not at a stride
  };
  std::vector<Group> groups;
};
struct ExactResult {
  std::vector<float> y, lse;     // as ExactArgs lays them out
  std::vector<uint32_t> errors;  // [n_groups]
};
using ExactRunner = std::function<Result<ExactResult>(const ExactCase&)>;

void ExactRandomBatches(const ExactRunner& run, uint64_t seed, int batches, uint32_t max_dim,
                        uint32_t max_rows, uint32_t max_queries);
void ExactHardCases(const ExactRunner& run, uint64_t seed);

}  // namespace prefixd::gpu::testing
