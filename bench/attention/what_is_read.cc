#include "bench/attention/what_is_read.h"

#include <algorithm>
#include <numeric>

#include "index/codes/block_codes.h"

namespace prefixd::bench {
namespace {

// Draws n of `of` places, ascending: one from each of n equal runs.
std::vector<uint32_t> Some(std::mt19937_64& rng, size_t n, size_t of) {
  std::vector<uint32_t> at(n);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t low = i * of / n, high = std::max(low + 1, (i + 1) * of / n);
    at[i] = static_cast<uint32_t>(low + rng() % (high - low));
  }
  return at;
}

}  // namespace

std::vector<std::vector<Pieces>> ReadBySearch(const Ledger& spent, uint32_t k, const Layers& layers,
                                              size_t layer, std::mt19937_64& rng) {
  const size_t key_bytes = kRow.key_bytes(), block_bytes = CodeBlockBytes(kDim);
  const auto of_search = [&](uint64_t n) { return n / std::max<uint64_t>(1, spent.retrievals); };
  const size_t tokens = layers.n_tokens(), blocks = CodeBlocks(tokens);
  const size_t windows = (blocks + kWindowBlocks - 1) / kWindowBlocks;
  const size_t chosen = std::min(blocks, of_search(spent.keys_scanned) / kCodeBlockKeys);
  // The other bytes that a search scans are the short list's keys, and 2 bytes for each of their
  // tokens.
  const size_t of_means = windows * (block_bytes + kWindowBlocks * sizeof(uint16_t));
  const size_t of_book = kDim * sizeof(float) + size_t{kDim} * kDim * sizeof(uint16_t);
  const size_t of_codes = chosen * block_bytes + of_means + of_book;
  const size_t scanned = of_search(spent.scan_bytes);
  const size_t listed = scanned > of_codes ? (scanned - of_codes) / (key_bytes + 2) : 0;
  std::vector<std::vector<Pieces>> heads(kKvHeads);
  for (size_t h = 0; h < kKvHeads; ++h) {
    const auto array = [&](size_t l) { return layers.Head((layer + l) % layers.count(), h).data; };
    const std::byte* codes = array(1) + windows * block_bytes;
    heads[h] = {{array(1), block_bytes, block_bytes, Some(rng, windows, windows)},
                {codes, block_bytes, block_bytes, Some(rng, chosen, blocks)},
                {array(2), key_bytes, key_bytes, Some(rng, listed, tokens)},
                {array(0) + key_bytes, kRow.bytes(), kRow.value_bytes(), Some(rng, k, tokens)}};
  }
  return heads;
}

std::vector<std::vector<Pieces>> ReadBySharing(const Ledger& spent, uint32_t k,
                                               const Layers& layers, size_t layer) {
  const uint64_t shared = std::max<uint64_t>(1, spent.selections - spent.retrievals);
  std::vector<uint32_t> rows((spent.retrieved_tokens - spent.retrievals * k) / shared);
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<std::vector<Pieces>> heads(kKvHeads);
  for (size_t h = 0; h < kKvHeads; ++h) {
    heads[h] = {{layers.Head(layer, h).data, kRow.bytes(), kRow.bytes(), rows}};
  }
  return heads;
}

}  // namespace prefixd::bench
