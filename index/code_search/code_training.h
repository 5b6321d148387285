// How keys become compact codes in blocks (block_codes.h): which keys share a block, which
// directions of key space get how many digits, and where their steps lie.
//
// Keys are put into blocks of those that lie close, and rotated to the principal axes of their
// covariance around their blocks' means; bits go to axes by reverse water-filling: each two-bit
// digit where it takes most error away. Each axis has a uniform quantiser, fitted by least squares.
// Means are coded first, along the same axes; what their codes miss is left to the keys' codes.
//
// Thread-safety: pure functions.
#pragma once

#include "attention/rows/rows.h"
#include "index/code_search/code_blocks.h"
#include "index/codes/block_codes.h"
#include "prefixd/result.h"

namespace prefixd::index {

struct EncodedKeys {
  BlockCodeBook book;
  CodeMemory arrays;  // BlockLayout(key_dim, n)
};

// keys: at least one; a few thousand of them, spread over all, decide the directions.
// kInvalidArgument: NaN or Inf, or numbers beyond 1e17 (the message names the row). bad_alloc.
Result<EncodedKeys> EncodeKeys(const RowsView& keys);

}  // namespace prefixd::index
