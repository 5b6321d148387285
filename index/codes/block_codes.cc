#include "index/codes/block_codes.h"

#include <algorithm>
#include <bitset>
#include <cmath>
#include <numeric>

namespace prefixd {
namespace {

Status Corrupt(const char* what) { return Status(Error{Code::kCorrupt, what}); }

}  // namespace

size_t BlockCodeBook::bytes() const {
  return keys.bytes() + keys.components() * 2 * (sizeof(float) + sizeof(uint8_t));
}

Status BlockCodeBook::Validate() const {
  PREFIXD_TRY(keys.Validate());
  const size_t n = keys.components();
  if (mean_digits.size() != n || mean_ratios.size() != n || variances.size() != n) {
    return Corrupt("codebook of means: shapes disagree");
  }
  if (!std::all_of(mean_digits.begin(), mean_digits.end(),
                   [](uint8_t d) { return d <= kMaxCodeDigits; }) ||
      std::accumulate(mean_digits.begin(), mean_digits.end(), 0u) > CodeFields(keys.key_dim)) {
    return Corrupt("codebook of means: more digits than there is room for");
  }
  const auto good = [](float x) { return std::isfinite(x) && x >= 0; };
  if (!std::all_of(mean_ratios.begin(), mean_ratios.end(), good) ||
      !std::all_of(variances.begin(), variances.end(), good)) {
    return Corrupt("codebook of means: a value is negative or not finite");
  }
  return {};
}

BlockLayout::BlockLayout(uint32_t key_dim, size_t keys)
    : n_keys(keys),
      n_blocks(CodeBlocks(keys)),
      n_windows((n_blocks + kWindowBlocks - 1) / kWindowBlocks),
      means(n_blocks * CodeBlockBytes(key_dim)),
      tokens(means + n_windows * CodeBlockBytes(key_dim)),
      end(tokens + n_blocks * kCodeBlockKeys * sizeof(uint16_t)) {}

BlockCodes::BlockCodes(uint32_t key_dim, size_t n_keys, std::span<const std::byte> arrays)
    : layout(key_dim, n_keys),
      codes(arrays.data()),
      means(arrays.data() + layout.means),
      tokens(reinterpret_cast<const uint16_t*>(arrays.data() + layout.tokens)) {}

Status BlockCodes::Validate() const {
  for (size_t begin = 0; begin < layout.n_keys; begin += kWindowKeys) {
    const size_t n = std::min<size_t>(kWindowKeys, layout.n_keys - begin);
    std::bitset<kWindowKeys> seen;
    for (size_t i = 0; i < n; ++i) {
      const uint16_t key = tokens[begin + i];
      if (key >= n || seen[key]) return Corrupt("a window does not hold every key once");
      seen.set(key);
    }
  }
  for (size_t i = layout.n_keys; i < layout.n_blocks * kCodeBlockKeys; ++i) {
    if (tokens[i] != kNoKey) return Corrupt("a key beyond the last");
  }
  return {};
}

void DecodeBlockKey(const BlockCodeBook& book, const BlockCodes& codes, size_t place,
                    std::span<float> out) {
  const uint32_t dim = book.keys.key_dim;
  CodeBook of_means = book.keys;
  of_means.digits = book.mean_digits;
  std::fill(of_means.centre.begin(), of_means.centre.end(), 0.0f);
  for (size_t c = 0; c < book.keys.components(); ++c) {
    for (uint32_t d = 0; d < dim; ++d) {
      uint16_t& x = of_means.directions[c * dim + d];
      x = FloatToBf16(Bf16ToFloat(x) * book.mean_ratios[c]);
    }
  }
  std::vector<float> mean(dim);
  DecodeKey(of_means, {codes.means, codes.layout.n_windows * CodeBlockBytes(dim)},
            place / kCodeBlockKeys, mean);
  DecodeKey(book.keys, {codes.codes, codes.layout.n_blocks * CodeBlockBytes(dim)}, place, out);
  for (uint32_t d = 0; d < dim; ++d) out[d] += mean[d];
}

}  // namespace prefixd
