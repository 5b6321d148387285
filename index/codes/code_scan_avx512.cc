#include <immintrin.h>

#include "index/codes/code_scan.h"
#include "index/codes/key_codes.h"

namespace prefixd {
namespace {

#include "index/codes/code_scan_loops.h"
#include "index/codes/code_scan_weights.h"

// Bytes between a prefetch and its use. The hardware's own prefetcher stops at page ends, and knows
// nothing of blocks that are left out.
constexpr size_t kPrefetchedBytes = 2048;

template <size_t kHeads>
inline __attribute__((always_inline)) void ScanBlock(const std::byte* block, size_t number,
                                                     const CodeScanQuery& query, size_t head,
                                                     const std::byte* ahead, int16_t* out,
                                                     size_t ld_out) {
  const __m512i low = _mm512_set1_epi8(3);
  const uint32_t n_groups = query.fields / kCodeGroupFields;
  const int8_t* weights = query.weights + head * query.fields;
  __m512i sums[kHeads][2];
  for (size_t g = 0; g < kHeads; ++g) {
    sums[g][0] = sums[g][1] = _mm512_set1_epi32(BiasOf(query, head + g, number));
  }
  for (uint32_t f = 0; f < n_groups; ++f) {
    const std::byte* at = block + f * size_t{kCodeGroupBytes};
    if (ahead) {
      __builtin_prefetch(ahead + f * size_t{kCodeGroupBytes});
      __builtin_prefetch(ahead + f * size_t{kCodeGroupBytes} + 64);
    }
    __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + 64);
#pragma GCC unroll 4
    for (uint32_t plane = 0; plane < 4; ++plane) {
      const __m512i digits_a = _mm512_and_si512(a, low), digits_b = _mm512_and_si512(b, low);
#pragma GCC unroll 4
      for (size_t g = 0; g < kHeads; ++g) {
        int32_t four;
        __builtin_memcpy(&four, weights + g * query.fields + f * kCodeGroupFields + plane * 4, 4);
        const __m512i w = _mm512_set1_epi32(four);
        sums[g][0] = _mm512_dpbusd_epi32(sums[g][0], digits_a, w);
        sums[g][1] = _mm512_dpbusd_epi32(sums[g][1], digits_b, w);
      }
      if (plane < 3) {
        a = _mm512_maskz_srli_epi16(~__mmask32{0}, a, 2);
        b = _mm512_maskz_srli_epi16(~__mmask32{0}, b, 2);
      }
    }
  }
  for (size_t g = 0; g < kHeads; ++g) {
    int16_t* row = out + (head + g) * ld_out;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row),
                        _mm512_maskz_cvtsepi32_epi16(~__mmask16{0}, sums[g][0]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 16),
                        _mm512_maskz_cvtsepi32_epi16(~__mmask16{0}, sums[g][1]));
  }
}

void Scan(const std::byte* codes, const uint32_t* which, size_t n_blocks,
          const CodeScanQuery& query, int16_t* out, size_t ld_out) {
  const size_t block_bytes = size_t{query.fields} / 4 * kCodeBlockKeys;
  const size_t ahead = (kPrefetchedBytes + block_bytes - 1) / block_bytes;
  for (size_t b = 0; b < n_blocks; ++b, out += kCodeBlockKeys) {
    const size_t number = which ? which[b] : b;
    const std::byte* block = codes + number * block_bytes;
    const size_t then = b + ahead;
    const std::byte* next =
        then < n_blocks ? codes + (which ? which[then] : then) * block_bytes : nullptr;
    size_t g = 0;
    for (; g + 4 <= query.heads; g += 4) {
      ScanBlock<4>(block, number, query, g, g == 0 ? next : nullptr, out, ld_out);
    }
    if (g + 2 <= query.heads) {
      ScanBlock<2>(block, number, query, g, g == 0 ? next : nullptr, out, ld_out);
      g += 2;
    }
    if (g < query.heads) {
      ScanBlock<1>(block, number, query, g, g == 0 ? next : nullptr, out, ld_out);
    }
  }
}

size_t Above(const int16_t* v, size_t ld, size_t heads, const int16_t* floors, size_t n,
             uint32_t first, uint32_t* out) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  size_t count = 0;
  for (size_t i = 0; i < n; i += 32) {
    const auto there = static_cast<__mmask32>(n - i >= 32 ? ~0u : (1u << (n - i)) - 1);
    __mmask32 hits = 0;
    for (size_t g = 0; g < heads; ++g) {
      hits |= _mm512_mask_cmpgt_epi16_mask(there, _mm512_maskz_loadu_epi16(there, v + g * ld + i),
                                           _mm512_set1_epi16(floors[g]));
    }
    if (hits == 0) continue;
    for (uint32_t half = 0; half < 2; ++half) {
      const auto of_half = static_cast<__mmask16>(hits >> (16 * half));
      const __m512i ids =
          _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(first + i + 16 * half)));
      // Compressed in a register: a compressing store to memory is slow on some processors.
      const auto n_hits = static_cast<unsigned>(__builtin_popcount(of_half));
      _mm512_mask_storeu_epi32(out + count, static_cast<__mmask16>((1u << n_hits) - 1),
                               _mm512_maskz_compress_epi32(of_half, ids));
      count += n_hits;
    }
  }
  return count;
}

void AddWeights(const int16_t* v, size_t n, int16_t top, const WeightScale& scale, float* sums) {
  const auto constant = [](uint16_t c) { return _mm512_set1_epi16(static_cast<int16_t>(c)); };
  const __m512i tops = constant(static_cast<uint16_t>(top));
  const __m512i step = constant(scale.step), whole = constant(scale.whole);
  const __m512i power0 = constant(kPower0), power1 = constant(kPower1);
  const __m512i power2 = constant(kPower2), power3 = constant(kPower3), one = constant(1);
  __m512 total = _mm512_loadu_ps(sums);
  for (size_t i = 0; i < n; i += 2 * kWeightLanes) {
    const __m512i below = _mm512_sub_epi16(tops, _mm512_loadu_si512(v + i));
    const __m512i x = _mm512_mulhi_epu16(below, step);
    const __m512i fraction = _mm512_mullo_epi16(x, whole), halvings = _mm512_mulhi_epu16(x, whole);
    const __m512i square = _mm512_sub_epi16(power2, _mm512_mulhi_epu16(fraction, power3));
    const __m512i line = _mm512_sub_epi16(power1, _mm512_mulhi_epu16(fraction, square));
    const __m512i power = _mm512_sub_epi16(power0, _mm512_mulhi_epu16(fraction, line));
    const __m512i h = _mm512_srlv_epi16(power, halvings);
    const __m512i pairs = _mm512_madd_epi16(h, _mm512_add_epi16(h, one));
    total = _mm512_add_ps(total, _mm512_maskz_cvtepi32_ps(~__mmask16{0}, pairs));
  }
  _mm512_storeu_ps(sums, total);
}

size_t Between(const float* x, size_t n, float low, float high, float* out) {
  const __m512 least = _mm512_set1_ps(low), most = _mm512_set1_ps(high);
  size_t count = 0;
  for (size_t i = 0; i < n; i += 16) {
    const auto there = static_cast<__mmask16>(n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1);
    const __m512 values = _mm512_maskz_loadu_ps(there, x + i);
    const __mmask16 hits = _mm512_mask_cmp_ps_mask(
        _mm512_mask_cmp_ps_mask(there, values, least, _CMP_GE_OQ), values, most, _CMP_NGE_UQ);
    const auto n_hits = static_cast<unsigned>(__builtin_popcount(hits));
    _mm512_mask_storeu_ps(out + count, static_cast<__mmask16>((1u << n_hits) - 1),
                          _mm512_maskz_compress_ps(hits, values));
    count += n_hits;
  }
  return count;
}

size_t PlacesFrom(const float* x, size_t n, float floor, uint32_t* out) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512 least = _mm512_set1_ps(floor);
  size_t count = 0;
  for (size_t i = 0; i < n; i += 16) {
    const auto there = static_cast<__mmask16>(n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1);
    const __mmask16 hits =
        _mm512_mask_cmp_ps_mask(there, _mm512_maskz_loadu_ps(there, x + i), least, _CMP_GE_OQ);
    const __m512i ids = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(i)));
    const auto n_hits = static_cast<unsigned>(__builtin_popcount(hits));
    _mm512_mask_storeu_epi32(out + count, static_cast<__mmask16>((1u << n_hits) - 1),
                             _mm512_maskz_compress_epi32(hits, ids));
    count += n_hits;
  }
  return count;
}

}  // namespace

extern const CodeScanTable kAvx512VnniCodeScan;
const CodeScanTable kAvx512VnniCodeScan = {
    "avx512vnni",   Scan,    WeightSum, ExpTotal,   Largest<int16_t>,
    Largest<float>, Between, CountFrom, PlacesFrom, Scaled,
    Pick,           Raise,   Above};

}  // namespace prefixd
