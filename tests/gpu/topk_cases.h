// What every way of running the Top-K must get right, compared with the CPU's selection. Shared by
// the emulated and the device tests.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "attention/key_codes.h"
#include "attention/selection.h"
#include "gpu/topk_gpu.h"
#include "tests/support/random_kv.h"

namespace prefixd::gpu::testing {

using prefixd::testing::OwnedRows;
using prefixd::testing::Random;

// A batch in host memory.
struct TopKCase {
  TopKShape shape;
  struct Group {
    OwnedRows rows;
    std::vector<std::byte> codes;
    std::optional<CodeBook> book;
    uint32_t k = 0, first_id = 0;
  };
  std::vector<Group> groups;
  std::vector<float> queries;  // [n_groups][G][key_dim]
};
struct TopKResult {
  std::vector<Selection> groups;
  std::vector<uint32_t> errors;
};
using TopKRunner = std::function<Result<TopKResult>(const TopKCase&)>;

void TopKRandomBatches(const TopKRunner& run, uint64_t seed, int batches, uint32_t max_dim,
                       uint32_t max_keys);
void TopKHardCases(const TopKRunner& run, uint64_t seed);

}  // namespace prefixd::gpu::testing
