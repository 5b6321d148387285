#include <immintrin.h>

#include "index/codes/code_scan.h"
#include "index/codes/key_codes.h"

namespace prefixd {
namespace {

#include "index/codes/code_scan_loops.h"
#include "index/codes/code_scan_weights.h"

// A 16-bit lane takes two products of at most 3 * 127 from each of the planes: so many groups of
// four planes fit before it must be widened.
constexpr uint32_t kGroupsInShort = 8;

// kHeads heads against eight keys of each of the block's four vectors of a group.
template <size_t kHeads>
inline __attribute__((always_inline)) void ScanBlock(const std::byte* block, size_t number,
                                                     const CodeScanQuery& query, size_t head,
                                                     int16_t* out, size_t ld_out) {
  const __m256i low = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
  const uint32_t n_groups = query.fields / kCodeGroupFields;
  const int8_t* weights = query.weights + head * query.fields;
  for (size_t part = 0; part < 4; part += 2) {
    __m256i sums[kHeads][2];
    for (size_t g = 0; g < kHeads; ++g) {
      sums[g][0] = sums[g][1] = _mm256_set1_epi32(BiasOf(query, head + g, number));
    }
    for (uint32_t begin = 0; begin < n_groups; begin += kGroupsInShort) {
      const uint32_t end = begin + kGroupsInShort < n_groups ? begin + kGroupsInShort : n_groups;
      __m256i shorts[kHeads][2];
      for (size_t g = 0; g < kHeads; ++g) shorts[g][0] = shorts[g][1] = _mm256_setzero_si256();
      for (uint32_t f = begin; f < end; ++f) {
        const std::byte* at = block + f * size_t{kCodeGroupBytes} + part * 32;
        __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 32));
        for (uint32_t plane = 0; plane < 4; ++plane) {
          const __m256i digits_a = _mm256_and_si256(a, low), digits_b = _mm256_and_si256(b, low);
          for (size_t g = 0; g < kHeads; ++g) {
            int32_t four;
            __builtin_memcpy(&four, weights + g * query.fields + f * kCodeGroupFields + plane * 4,
                             4);
            const __m256i w = _mm256_set1_epi32(four);
            shorts[g][0] = _mm256_add_epi16(shorts[g][0], _mm256_maddubs_epi16(digits_a, w));
            shorts[g][1] = _mm256_add_epi16(shorts[g][1], _mm256_maddubs_epi16(digits_b, w));
          }
          a = _mm256_srli_epi16(a, 2);
          b = _mm256_srli_epi16(b, 2);
        }
      }
      for (size_t g = 0; g < kHeads; ++g) {
        for (size_t r = 0; r < 2; ++r) {
          sums[g][r] = _mm256_add_epi32(sums[g][r], _mm256_madd_epi16(shorts[g][r], ones));
        }
      }
    }
    for (size_t g = 0; g < kHeads; ++g) {
      // Packing works within halves: the middle two quarters change places.
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(sums[g][0], sums[g][1]),
                                                      _MM_SHUFFLE(3, 1, 2, 0));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (head + g) * ld_out + part * 8), packed);
    }
  }
}

void Scan(const std::byte* codes, const uint32_t* which, size_t n_blocks,
          const CodeScanQuery& query, int16_t* out, size_t ld_out) {
  const size_t block_bytes = size_t{query.fields} / 4 * kCodeBlockKeys;
  for (size_t b = 0; b < n_blocks; ++b, out += kCodeBlockKeys) {
    const size_t number = which ? which[b] : b;
    const std::byte* block = codes + number * block_bytes;
    size_t g = 0;
    for (; g + 4 <= query.heads; g += 4) ScanBlock<4>(block, number, query, g, out, ld_out);
    if (g + 2 <= query.heads) {
      ScanBlock<2>(block, number, query, g, out, ld_out);
      g += 2;
    }
    if (g < query.heads) ScanBlock<1>(block, number, query, g, out, ld_out);
  }
}

size_t Above(const int16_t* v, size_t ld, size_t heads, const int16_t* floors, size_t n,
             uint32_t first, uint32_t* out) {
  size_t count = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i any = _mm256_setzero_si256();
    for (size_t g = 0; g < heads; ++g) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + g * ld + i));
      any = _mm256_or_si256(any, _mm256_cmpgt_epi16(x, _mm256_set1_epi16(floors[g])));
    }
    // One bit per byte, so two for each key: of each pair the first is kept.
    auto hits = static_cast<uint32_t>(_mm256_movemask_epi8(any)) & 0x55555555u;
    for (; hits != 0; hits &= hits - 1) {
      out[count++] =
          first + static_cast<uint32_t>(i) + static_cast<uint32_t>(__builtin_ctz(hits)) / 2;
    }
  }
  for (; i < n; ++i) {
    bool hit = false;
    for (size_t g = 0; g < heads; ++g) hit |= v[g * ld + i] > floors[g];
    if (hit) out[count++] = first + static_cast<uint32_t>(i);
  }
  return count;
}

// h (h + 1) of 16 values, each added to its neighbour's.
inline __attribute__((always_inline)) __m256i PairWeights(const int16_t* v, __m256i top,
                                                          __m256i step, __m256i whole) {
  const __m256i below =
      _mm256_sub_epi16(top, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v)));
  const __m256i x = _mm256_mulhi_epu16(below, step);
  const __m256i fraction = _mm256_mullo_epi16(x, whole), halvings = _mm256_mulhi_epu16(x, whole);
  const auto times = [&](__m256i a) { return _mm256_mulhi_epu16(fraction, a); };
  const auto constant = [](uint16_t c) { return _mm256_set1_epi16(static_cast<int16_t>(c)); };
  const __m256i square = _mm256_sub_epi16(constant(kPower2), times(constant(kPower3)));
  const __m256i line = _mm256_sub_epi16(constant(kPower1), times(square));
  const __m256i power = _mm256_sub_epi16(constant(kPower0), times(line));
  // There are no 16-bit shifts by as much as each lane says.
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i even =
      _mm256_srlv_epi32(_mm256_and_si256(power, low), _mm256_and_si256(halvings, low));
  const __m256i odd =
      _mm256_srlv_epi32(_mm256_srli_epi32(power, 16), _mm256_srli_epi32(halvings, 16));
  const __m256i h = _mm256_or_si256(even, _mm256_slli_epi32(odd, 16));
  return _mm256_madd_epi16(h, _mm256_sub_epi16(h, _mm256_set1_epi16(-1)));
}

void AddWeights(const int16_t* v, size_t n, int16_t top, const WeightScale& scale, float* sums) {
  const __m256i tops = _mm256_set1_epi16(top);
  const __m256i step = _mm256_set1_epi16(static_cast<int16_t>(scale.step));
  const __m256i whole = _mm256_set1_epi16(static_cast<int16_t>(scale.whole));
  __m256 first = _mm256_loadu_ps(sums), second = _mm256_loadu_ps(sums + 8);
  for (size_t i = 0; i < n; i += 2 * kWeightLanes) {
    first = _mm256_add_ps(first, _mm256_cvtepi32_ps(PairWeights(v + i, tops, step, whole)));
    second = _mm256_add_ps(second, _mm256_cvtepi32_ps(PairWeights(v + i + 16, tops, step, whole)));
  }
  _mm256_storeu_ps(sums, first);
  _mm256_storeu_ps(sums + 8, second);
}

size_t Between(const float* x, size_t n, float low, float high, float* out) {
  const __m256 least = _mm256_set1_ps(low), most = _mm256_set1_ps(high);
  size_t count = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 values = _mm256_loadu_ps(x + i);
    auto hits = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_and_ps(
        _mm256_cmp_ps(values, least, _CMP_GE_OQ), _mm256_cmp_ps(values, most, _CMP_NGE_UQ))));
    for (; hits != 0; hits &= hits - 1) {
      out[count++] = x[i + static_cast<uint32_t>(__builtin_ctz(hits))];
    }
  }
  for (; i < n; ++i) {
    if (x[i] >= low && !(x[i] >= high)) out[count++] = x[i];
  }
  return count;
}

size_t PlacesFrom(const float* x, size_t n, float floor, uint32_t* out) {
  const __m256 least = _mm256_set1_ps(floor);
  size_t count = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    auto hits = static_cast<uint32_t>(
        _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), least, _CMP_GE_OQ)));
    for (; hits != 0; hits &= hits - 1) {
      out[count++] = static_cast<uint32_t>(i) + static_cast<uint32_t>(__builtin_ctz(hits));
    }
  }
  for (; i < n; ++i) {
    if (x[i] >= floor) out[count++] = static_cast<uint32_t>(i);
  }
  return count;
}

}  // namespace

extern const CodeScanTable kAvx2CodeScan;
const CodeScanTable kAvx2CodeScan = {
    "avx2",         Scan,    WeightSum, ExpTotal,   Largest<int16_t>,
    Largest<float>, Between, CountFrom, PlacesFrom, Scaled,
    Pick,           Raise,   Above};

}  // namespace prefixd
