// Compact codes of the keys of one (layer, KV head), a quarter of a byte a key dimension (an eighth
// of bf16), and what a query becomes to be scored against them. Standard library only.
//
// A code is linear in its digits: key k is approximated by
//     k^ = centre + sum_i C_i direction_i,   C_i = sum_j 4^j c_{i,j},   c in {0, 1, 2, 3},
// with more digits for the components that matter more (index/code_search/code_training.h says how
// directions and digits are found, and what keys have in common that lie in one block). So a score
// against any query is an integer dot product of digits with small signed weights, the same to the
// bit on every machine and device: u8 x s8 into s32 (VPDPBUSD, VPMADDUBSW, __dp4a).
//
// Layout. Digits are numbered as *fields* 0 .. CodeFields(key_dim): component 0's digits, lowest
// first, then component 1's, and so on; fields behind the last digit are zero. Keys stand in blocks
// of 32, and a block in groups of 16 fields, 128 bytes each: byte b of key j's four bytes holds
// fields 16 f + 4 p + b at bits 2 p, so that one shift and one mask leave four consecutive fields
// in the four bytes of each key. The last block is filled up with zeros.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/result.h"

namespace prefixd {

inline constexpr uint32_t kCodeBlockKeys = 32;
inline constexpr uint32_t kCodeGroupFields = 16;
inline constexpr uint32_t kCodeGroupBytes = kCodeBlockKeys * kCodeGroupFields / 4;
inline constexpr uint32_t kMaxCodeDigits = 4;  // of one component: 8 bits

// Error that a uniform quantiser of `digits` base-4 digits leaves of a Gaussian of variance 1
// (Max 1960); what allocation goes by.
inline constexpr double kErrorLeft[kMaxCodeDigits + 1] = {1, 0.1188, 0.01154, 0.001041, 0.0000896};

constexpr uint32_t CodeFields(uint32_t key_dim) {
  return (key_dim + kCodeGroupFields - 1) / kCodeGroupFields * kCodeGroupFields;
}
constexpr size_t CodeBytesPerKey(uint32_t key_dim) { return CodeFields(key_dim) / 4; }
constexpr size_t CodeBlocks(size_t n_keys) {
  return (n_keys + kCodeBlockKeys - 1) / kCodeBlockKeys;
}
constexpr size_t CodeBlockBytes(uint32_t key_dim) {
  return CodeBytesPerKey(key_dim) * kCodeBlockKeys;
}

// Where field `field` of key `key` lies: bits [shift, shift + 2) of byte `byte`.
struct CodePlace {
  size_t byte = 0;
  uint32_t shift = 0;
};
constexpr CodePlace PlaceOfCode(uint32_t key_dim, size_t key, uint32_t field) {
  const uint32_t within = field % kCodeGroupFields;
  return {key / kCodeBlockKeys * CodeBlockBytes(key_dim) +
              size_t{field / kCodeGroupFields} * kCodeGroupBytes + key % kCodeBlockKeys * 4 +
              within % 4,
          2 * (within / 4)};
}

struct CodeBook {
  uint32_t key_dim = 0;
  std::vector<float> centre;    // [key_dim]
  std::vector<uint8_t> digits;  // [components], 0 .. kMaxCodeDigits, CodeFields(key_dim) in all
  std::vector<uint16_t> directions;  // [components][key_dim], bf16

  size_t components() const { return digits.size(); }
  // Read for every query.
  size_t bytes() const {
    return centre.size() * sizeof(float) + directions.size() * sizeof(uint16_t);
  }
  // kCorrupt unless shapes agree, digits are in range and everything is finite.
  Status Validate() const;
};

// Puts C_i = coordinates[i] (< 4^digits[i]) of one key into the codes, which must be zero there.
void PackCode(const CodeBook& book, std::span<const uint8_t> coordinates, size_t key,
              std::span<std::byte> codes);
// k^ of one key: out [key_dim].
void DecodeKey(const CodeBook& book, std::span<const std::byte> codes, size_t key,
               std::span<float> out);

// The queries of one group as the scan takes them. For head g and the integer score
//     v = bias[g] + sum_p weights[g][p] c_p,   -32767 <= v <= 32767 whatever the code,
// scale * q_g.k^ is mul[g] * v + add[g], mul[g] >= 0, but for the rounding of weights to 8 bits.
struct CodeQueries {
  uint32_t heads = 0, fields = 0;
  std::vector<int8_t> weights;  // [heads][fields]
  std::vector<int32_t> bias;    // [heads]
  std::vector<float> mul, add;  // [heads]
};

// queries: [heads][key_dim], finite. Scores that overflow float32 leave mul or add not finite.
CodeQueries PrepareCodeQueries(const CodeBook& book, std::span<const float> queries, uint32_t heads,
                               float scale);

// The two halves of PrepareCodeQueries, for codes that share their directions.
// q_g . direction_i, exact but for the last rounding: [heads][components]
std::vector<float> ProjectOnDirections(const CodeBook& book, std::span<const float> queries,
                                       uint32_t heads);
// along: [heads][digits.size()], head g's score being scale sum_i along[g][i] C_i.
// reserved: [heads] or empty, what else (in units of `along`) is to be added to an integer score
// within its range. add[g] is scale times the score of the middle of all codes, and the bias takes
// that away.
CodeQueries QuantiseQueries(std::span<const float> along, std::span<const uint8_t> digits,
                            uint32_t heads, uint32_t fields, float scale,
                            std::span<const double> reserved);

}  // namespace prefixd
