// FAISS's 4-bit product quantization over the keys of a head: a peer to measure codes beside, not
// an index of the product.
#pragma once

#include <memory>

#include "index/search/key_index.h"

namespace prefixd::bench {

// Codes of key_dim / 4 bytes a key, two dimensions to each 4 bits, of centred keys (FAISS
// IndexPQFastScan, inner product; André et al. 2017). A search takes each head's best by codes,
// ranks them by the group's largest normalised score and reads the exact keys of the first
// effort() k, 3 unless set. Approximate cuts.
//   keys: row i is token covered.begin + i; read during the call only.
// kInvalidArgument: key_dim is odd, or what BuildIvfIndex refuses.
Result<std::unique_ptr<index::KeyIndex>> BuildPqIndex(const RowsView& keys, TokenRange covered);

}  // namespace prefixd::bench
