// Lays out the data that the kernels of a Top-K pass to one another. Internal to gpu/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/step/step_layout.h"
#include "index/codes/block_codes.h"
#include "prefixd/gpu/topk.h"

namespace prefixd::gpu::internal {

inline constexpr uint32_t kChunk = 2048;  // keys per block
inline constexpr uint32_t kChunkBlocks = kChunk / kCodeBlockKeys;
static_assert(kChunk % kThreads == 0 && kThreads % kCodeBlockKeys == 0);
// A window's places are its keys, so that a block of threads writes all scores of its own chunk.
static_assert(kChunk % kWindowKeys == 0);

// CodeNumbers is the quantised form of a head's query (BlockQueries of
// index/codes/block_queries.h).
struct CodeNumbers {
  int32_t bias, mean_bias;
  float mul, add, units_of_mean;
};
inline constexpr uint32_t kCodeWords = sizeof(CodeNumbers) / sizeof(uint32_t);

// The radix selection takes a rank's bits 11, 11 and 10 at a time from the top.
inline constexpr uint32_t kDigits = 3, kBins = 2048;
PREFIXD_HD constexpr uint32_t DigitShift(uint32_t digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}
PREFIXD_HD constexpr uint32_t DigitBins(uint32_t digit) { return digit == 2 ? 1024 : 2048; }

// TopKLayout describes the workspace in 32-bit words. The words that must start as zeros come
// first, for all groups; then the rest.
struct TopKLayout {
  uint32_t n_groups, group, fields, chunks;
  bool codes;

  PREFIXD_HD explicit TopKLayout(const TopKShape& s)
      : n_groups(s.n_groups),
        group(s.group),
        fields((s.key_dim + kCodeGroupFields - 1) / kCodeGroupFields * kCodeGroupFields),
        chunks((s.max_keys + kChunk - 1) / kChunk),
        codes(s.codes) {}

  // Zeros: histograms [kDigits][kBins] of the ranks, and the largest rank left out.
  PREFIXD_HD size_t zero_words() const { return kDigits * kBins + 4; }
  PREFIXD_HD size_t histogram_at(uint32_t g, uint32_t digit) const {
    return g * zero_words() + size_t{digit} * kBins;
  }
  PREFIXD_HD size_t left_out_at(uint32_t g) const { return histogram_at(g, kDigits); }
  PREFIXD_HD size_t all_zero_words() const { return n_groups * zero_words(); }

  // The rest of a group:
  //   rank [chunks * kChunk]          ordered bits of max_g (s_g - L_g)
  //   part [chunks][G][2]             max and sum exp(s - max) of a chunk's finite scores
  //   taken [chunks][2]               keys above the k-th rank, and on it
  //   code [G] CodeNumbers, [2][G][fields / 4] weights of keys' digits and of means', four int8 to
  //                                   a word: by codes only
  //   score [G][chunks * kChunk]      float32; int16, two to a word, by codes
  PREFIXD_HD size_t keys() const { return size_t{chunks} * kChunk; }
  PREFIXD_HD size_t score_words() const { return codes ? keys() / 2 : keys(); }
  PREFIXD_HD size_t group_words() const {
    return Pad4(keys() + size_t{chunks} * (2 * group + 2) +
                group * (kCodeWords + 2 * (fields / 4)) + group * score_words());
  }
  PREFIXD_HD size_t rank_at(uint32_t g) const { return all_zero_words() + g * group_words(); }
  PREFIXD_HD size_t part_at(uint32_t g, uint32_t chunk, uint32_t head) const {
    return rank_at(g) + keys() + (size_t{chunk} * group + head) * 2;
  }
  PREFIXD_HD size_t taken_at(uint32_t g, uint32_t chunk) const {
    return part_at(g, chunks, 0) + 2 * size_t{chunk};
  }
  PREFIXD_HD size_t code_at(uint32_t g, uint32_t head) const {
    return taken_at(g, chunks) + kCodeWords * head;
  }
  PREFIXD_HD size_t weight_at(uint32_t g, uint32_t head) const {
    return code_at(g, group) + size_t{head} * (fields / 4);
  }
  PREFIXD_HD size_t mean_weight_at(uint32_t g, uint32_t head) const {
    return weight_at(g, group + head);
  }
  PREFIXD_HD size_t score_at(uint32_t g, uint32_t head) const {
    return mean_weight_at(g, group) + head * score_words();
  }
  PREFIXD_HD size_t total_words() const { return all_zero_words() + n_groups * group_words(); }
};

struct TopKParams {
  TopKShape shape;
  TopKArgs args;
};
int LaunchCodeQueryKernel(const TopKParams& params, Stream stream);  // by codes only
int LaunchScoreKernel(const TopKParams& params, Stream stream);
int LaunchCodeScoreKernel(const TopKParams& params, Stream stream);
int LaunchSelectKernels(const TopKParams& params, Stream stream);

}  // namespace prefixd::gpu::internal
