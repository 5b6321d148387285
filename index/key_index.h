// Which tokens to read: indexes over the keys of one (layer, KV head), and how one asks them.
//
// Thread-safety: an index is immutable once made; all members are const and may be called
// concurrently. Search starts no threads. Building starts none of its own either, but the BLAS
// behind FAISS may (OPENBLAS_NUM_THREADS); callers parallelise over heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention/kv_shape.h"
#include "attention/partition.h"
#include "attention/result.h"
#include "attention/selection.h"

namespace prefixd::index {

enum class IndexKind : uint8_t { kExact = 0, kIvf = 1 };
std::string_view IndexName(IndexKind kind);  // "exact", "ivf"
Result<IndexKind> IndexFromName(std::string_view name);

struct SearchRequest {
  std::span<const float> queries;  // [G][key_dim]
  uint32_t group = 0;              // G
  LayerGeometry layer;
  TokenRange candidates;  // token positions that may be returned (inside the mid region)
  uint32_t k = 0;         // tokens wanted; fewer are returned only when there are fewer
  // The keys themselves, row i being token `first_token` + i; must cover `candidates`. Borrowed.
  // An index that stores its own copy or codes may use them for re-ranking only.
  RowsView keys;
  uint32_t first_token = 0;
  // If not null: the scores [G][candidates] of a search that scored every candidate, as it saw
  // them; emptied by one that did not, or had nothing to choose. For the estimate by scan.
  std::vector<float>* scores = nullptr;
};

class KeyIndex {
 public:
  virtual ~KeyIndex() = default;
  virtual IndexKind kind() const = 0;
  // Tokens covered, as positions; candidates outside are searched exactly (appended tokens).
  virtual TokenRange covered() const = 0;
  // ids ascending, cuts with their kind (spec §2), one retrieved set per KV head (GQA group max).
  // k of at least candidates.size() (an empty range too) returns them all without reading a key:
  // cuts are exact at -inf. Which of several tokens of equal rank is returned is unspecified.
  //   keys_scanned: distinct tokens whose key, or code, was scored
  //   bytes_scanned: codes with their ids, centroids, and keys read, re-ranked ones again
  // kInvalidArgument: shapes disagree, `keys` do not cover the candidates, NaN or Inf in a query
  // (the message names the head) or in a key that was read (it names the token).
  virtual Result<Selection> Search(const SearchRequest& request) const = 0;
  // Versioned and checksummed bytes, for storing beside the segment. Exact needs none (empty).
  virtual Result<std::vector<std::byte>> Serialize() const = 0;
};

// Scores every candidate: exact cuts.
std::unique_ptr<KeyIndex> MakeExactIndex(TokenRange covered);

// Fewer keys than this cannot be clustered usefully.
inline constexpr uint32_t kMinIvfKeys = 256;

struct IvfOptions {
  uint32_t n_lists = 0;         // 0: about 4 sqrt(n); at most n / 2
  float probe_fraction = 0.3f;  // (0, 1] of the lists, per query head; attention queries need many
                                // (practice: 25-30%)
  uint32_t seed = 1;            // of the clustering; the same seed and keys give the same index
};
// FAISS IVF over centred keys by inner product, holding its own 16-bit copy of them
// (2 key_dim + 8 bytes a key); the scan's short list is re-ranked from SearchRequest::keys, so
// probing every list returns what an exact search returns. Approximate cuts, except where the
// search had no use for the lists: candidates that are fewer than the tokens it would scan, or
// lie outside covered(), are searched exactly.
//   keys: row i is token covered.begin + i; read during the call only.
// kInvalidArgument: NaN or Inf keys (the message names the token); keys too large for 16-bit
// codes; fewer than kMinIvfKeys (use MakeExactIndex); options out of range.
Result<std::unique_ptr<KeyIndex>> BuildIvfIndex(const RowsView& keys, TokenRange covered,
                                                const IvfOptions& options);
// What Serialize returned. Bytes that are truncated, damaged, foreign or of another version are
// kCorrupt, found by the envelope's checksum before FAISS parses anything: rebuild the index.
Result<std::unique_ptr<KeyIndex>> LoadIndex(std::span<const std::byte> bytes);

}  // namespace prefixd::index
