// For the machine's baseline, and what the other tables are compared with.
#include "index/codes/code_scan.h"
#include "index/codes/key_codes.h"

namespace prefixd {
namespace {

#include "index/codes/code_scan_loops.h"
#include "index/codes/code_scan_weights.h"

void Scan(const std::byte* codes, const uint32_t* which, size_t n_blocks,
          const CodeScanQuery& query, int16_t* out, size_t ld_out) {
  const size_t block_bytes = size_t{query.fields} / 4 * kCodeBlockKeys;
  for (size_t b = 0; b < n_blocks; ++b, out += kCodeBlockKeys) {
    const size_t number = which ? which[b] : b;
    const std::byte* block = codes + number * block_bytes;
    for (size_t g = 0; g < query.heads; ++g) {
      int32_t sums[kCodeBlockKeys];
      for (int32_t& sum : sums) sum = BiasOf(query, g, number);
      const int8_t* weight = query.weights + g * query.fields;
      const std::byte* group = block;
      for (uint32_t f = 0; f < query.fields; f += kCodeGroupFields, group += kCodeGroupBytes) {
        for (uint32_t plane = 0; plane < 4; ++plane, weight += 4) {
          for (uint32_t j = 0; j < kCodeBlockKeys; ++j) {
            for (uint32_t at = 0; at < 4; ++at) {
              const int32_t digit = static_cast<int32_t>(group[4 * j + at]) >> (2 * plane) & 3;
              sums[j] += digit * weight[at];
            }
          }
        }
      }
      for (uint32_t j = 0; j < kCodeBlockKeys; ++j) {
        out[g * ld_out + j] = static_cast<int16_t>(sums[j]);
      }
    }
  }
}

size_t Above(const int16_t* v, size_t ld, size_t heads, const int16_t* floors, size_t n,
             uint32_t first, uint32_t* out) {
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    bool hit = false;
    for (size_t g = 0; g < heads; ++g) hit |= v[g * ld + i] > floors[g];
    if (hit) out[count++] = first + static_cast<uint32_t>(i);
  }
  return count;
}

void AddWeights(const int16_t* v, size_t n, int16_t top, const WeightScale& scale, float* sums) {
  for (size_t i = 0; i < n; i += 2 * kWeightLanes) {
    for (size_t l = 0; l < kWeightLanes; ++l) {
      sums[l] += static_cast<float>(static_cast<int32_t>(Weight(v[i + 2 * l], top, scale) +
                                                         Weight(v[i + 2 * l + 1], top, scale)));
    }
  }
}

size_t Between(const float* x, size_t n, float low, float high, float* out) {
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    const float value = x[i];
    out[count] = value;
    count += value >= low && !(value >= high) ? 1 : 0;
  }
  return count;
}

size_t PlacesFrom(const float* x, size_t n, float floor, uint32_t* out) {
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    out[count] = static_cast<uint32_t>(i);
    count += x[i] >= floor ? 1 : 0;
  }
  return count;
}

}  // namespace

extern const CodeScanTable kGenericCodeScan;
const CodeScanTable kGenericCodeScan = {
    "generic",      Scan,    WeightSum, ExpTotal,   Largest<int16_t>,
    Largest<float>, Between, CountFrom, PlacesFrom, Scaled,
    Pick,           Raise,   Above};

}  // namespace prefixd
