// How keys become compact codes (attention/key_codes.h): which directions of key space get how many
// digits, and where their steps lie.
//
// What matters is the error of scores, E (q.(k - k^))^2, not of keys. So keys are turned into a
// space in which the second moment of the queries is round (A = Sq^1/2; spec: queries are not
// distributed like keys), rotated to the principal axes of their own covariance there, and bits go
// to axes by reverse water-filling: each two-bit digit where it takes most error away. Each axis
// has a uniform quantiser, fitted by least squares.
//
// Thread-safety: pure functions; a KeyEncoder is immutable once made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/key_codes.h"
#include "attention/kv_shape.h"
#include "attention/result.h"

namespace prefixd::index {

class KeyEncoder {
 public:
  // keys: at least one; a few thousand of them, spread over all, are looked at.
  // queries: [n][key_dim], a sample of the group's; empty: errors of keys count alike in all
  // directions. kInvalidArgument: NaN or Inf in either (the message names the row).
  static Result<KeyEncoder> Train(const RowsView& keys, std::span<const float> queries);

  const CodeBook& book() const { return book_; }
  // Codes of all `keys`, in blocks: CodeBlocks(n) * CodeBlockBytes(key_dim) bytes, zeroed by the
  // caller. kInvalidArgument names the row whose key is not finite.
  Status Encode(const RowsView& keys, std::span<std::byte> codes) const;

 private:
  KeyEncoder() = default;

  CodeBook book_;
  std::vector<float> axes_;     // [components][key_dim]: coordinate of k is axis.k ...
  std::vector<float> offset_;   // [components]: ... minus this
  std::vector<float> inverse_;  // [components], 1 / step
};

}  // namespace prefixd::index
