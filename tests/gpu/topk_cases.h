// What every way of running the Top-K must get right, compared with the CPU's selection. Shared by
// the emulated and the device tests.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "gpu/device/host_image.h"
#include "prefixd/gpu/topk.h"
#include "prefixd/selection.h"
#include "tests/support/random_block_codes.h"

namespace prefixd::gpu::testing {

using prefixd::testing::OwnedRows;
using prefixd::testing::Random;
using prefixd::testing::RandomBlockCodes;

// A batch in host memory.
struct TopKCase {
  TopKShape shape;
  struct Group {
    OwnedRows rows;
    std::optional<RandomBlockCodes> codes;  // of as many keys or more
    uint32_t k = 0, skip = 0, first_id = 0;
    uint32_t count() const { return static_cast<uint32_t>(rows.count()); }
    uint32_t candidates() const { return count() - skip; }
  };
  std::vector<Group> groups;
  std::vector<float> queries;  // [n_groups][G][key_dim]
};
// What a head's query became and every candidate's whole number; empty where there are none.
struct CodesSeen {
  float mul = 0, add = 0, mean_mul = 0;
  std::vector<int16_t> values;
};
struct TopKResult {
  std::vector<Selection> groups;
  std::vector<uint32_t> errors;
  std::vector<CodesSeen> seen;  // [n_groups][G] by codes
};
// All sources of a case, laid out where `image` says.
const TopKSource* PackTopK(const TopKCase& c, internal::HostImage& image);

using TopKRunner = std::function<Result<TopKResult>(const TopKCase&)>;

void TopKRandomBatches(const TopKRunner& run, uint64_t seed, int batches, uint32_t max_dim,
                       uint32_t max_keys);
void TopKHardCases(const TopKRunner& run, uint64_t seed);

}  // namespace prefixd::gpu::testing
