// Codes of keys that stand in blocks with others like them: a block has a mean key, itself coded,
// and each key the code of its difference from that mean. Differences are smaller than keys, so the
// same bits say more.
//
// The keys of an index, in order of their tokens, are cut into windows of kWindowKeys (the last may
// be shorter), and each window's keys are ordered so that those alike share a block
// (index/code_search/row_order.h). So any range of tokens is a run of whole windows and a part of
// one at either end, and keys that came one after another, which RoPE turned alike and which mostly
// speak of one thing, stay near.
//
// Standard library only. Thread-safety: plain values and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/rows/rows.h"
#include "index/codes/key_codes.h"
#include "prefixd/result.h"

namespace prefixd {

inline constexpr uint32_t kWindowKeys = 1024;
inline constexpr uint32_t kWindowBlocks = kWindowKeys / kCodeBlockKeys;
static_assert(kWindowBlocks == kCodeBlockKeys);  // the means of a window are one block of codes
inline constexpr uint16_t kNoKey = 0xffff;       // fills up the last block

// Key i of block b is approximated by
//   keys.centre + sum_c (mean_ratios[c] M_bc + C_ic) keys.directions[c],
// M_b being the code of the block's mean.
struct BlockCodeBook {
  CodeBook keys;
  std::vector<uint8_t> mean_digits;  // [components], 0 .. kMaxCodeDigits, CodeFields in all
  std::vector<float> mean_ratios;    // [components]
  // [components] Of keys around their block's mean, in squares of directions, over all blocks: they
  // tell how far scores by codes are off.
  std::vector<float> variances;

  size_t bytes() const;     // read for every query
  Status Validate() const;  // as CodeBook's
};

// Where the arrays of n_keys keys lie, one behind the other.
struct BlockLayout {
  BlockLayout(uint32_t key_dim, size_t n_keys);
  size_t n_keys, n_blocks, n_windows;
  size_t means, tokens, end;  // codes are at 0
};

// A view of these arrays.
struct BlockCodes {
  BlockCodes(uint32_t key_dim, size_t n_keys, std::span<const std::byte> arrays);
  BlockLayout layout;
  const std::byte* codes;  // [n_blocks] blocks of codes
  const std::byte* means;  // [n_windows] blocks of codes: of block b at place b
  const uint16_t* tokens;  // [n_blocks][32]: the key's number in its window, or kNoKey

  // Which key stands at `place`; tokens[place] is not kNoKey.
  uint32_t key(size_t place) const {
    return static_cast<uint32_t>(place / kWindowKeys * kWindowKeys) + tokens[place];
  }
  // Every key once: what a builder makes.
  Status Validate() const;
};

// k^ of the key at `place`: out [key_dim].
void DecodeBlockKey(const BlockCodeBook& book, const BlockCodes& codes, size_t place,
                    std::span<float> out);

}  // namespace prefixd
