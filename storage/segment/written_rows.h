// Tracks which rows of a new segment are written: layer by layer and token by token, for each run
// of KV heads whose rows come together. Internal to storage/segment.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd::storage {

class WrittenRows {
 public:
  // heads: of each layer; layers without any have no rows. n_kv_heads: the model's, which ranges of
  // heads count in.
  WrittenRows(HeadIndex heads, uint32_t n_kv_heads, TokenRange tokens)
      : heads_(std::move(heads)),
        n_layers_(heads_.layers()),
        n_kv_heads_(n_kv_heads),
        tokens_(tokens) {}

  // kInvalidArgument: tokens outside the segment or written before; heads that are not the model's,
  // or some of a run that was written with others. heads.n is above 0 here and below.
  Status Check(uint32_t layer, HeadRange heads, uint32_t first, uint32_t n) const;
  // Notes rows that Check accepts.
  void Note(uint32_t layer, HeadRange heads, uint32_t first, uint32_t n);
  // kFailedPrecondition names the first layer and token of these heads that lack.
  Status CheckComplete(HeadRange heads) const;
  // Returns the memory taken once rows of `heads` are noted.
  uint64_t BytesWith(HeadRange heads) const;

 private:
  struct Run {
    HeadRange heads;
    std::vector<std::vector<bool>> have;  // [layer][own token]
    std::vector<uint32_t> count;          // [layer]
  };
  static bool Overlap(HeadRange a, HeadRange b) {
    return a.first < b.first + b.n && b.first < a.first + a.n;
  }
  Error Lacks(uint32_t layer, uint32_t own_token) const;

  const HeadIndex heads_;
  const uint32_t n_layers_, n_kv_heads_;
  const TokenRange tokens_;
  std::vector<Run> runs_;
};

}  // namespace prefixd::storage
