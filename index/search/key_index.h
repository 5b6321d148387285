// Which tokens to read: indexes over the keys of one (layer, KV head), and how one asks them.
//
// Thread-safety: an index is immutable once made and tuned; const members may be called
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

#include "attention/rows/rows.h"
#include "index/search/key_reader.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"
#include "prefixd/selection.h"

namespace prefixd::index {

// The numbers are stored (envelope.h): 3 and 4 were kinds that older builds wrote, and name
// nothing.
enum class IndexKind : uint8_t { kExact = 0, kIvf = 1, kCodes = 2 };
inline constexpr size_t kIndexKinds = 3;
std::string_view IndexName(IndexKind kind);  // "exact", "ivf", "codes"
Result<IndexKind> IndexFromName(std::string_view name);

// Buffers that a caller keeps from search to search, so that searching allocates only while it
// warms up. One search at a time.
struct SearchScratch {
  std::vector<int16_t> code_scores, picked;
  std::vector<int16_t> block_means;
  std::vector<float> ranks, raised, sampled, scores;
  std::vector<uint32_t> ids, found, listed;
  std::vector<uint64_t> marks;
  std::vector<RowRef> refs;
  std::vector<std::byte> keys;
};

struct SearchRequest {
  std::span<const float> queries;  // [G][key_dim]
  uint32_t group = 0;              // G
  LayerGeometry layer;
  TokenRange candidates;  // token positions that may be returned (inside the mid region)
  uint32_t k = 0;         // tokens wanted; fewer are returned only when there are fewer
  // The keys themselves, row i being token `first_token` + i; must cover `candidates`. Borrowed.
  // An index that stores its own copy or codes may use them for re-ranking only. Where they are
  // not in memory, `reader` reads them instead, and of `keys` the shape alone counts.
  RowsView keys;
  uint32_t first_token = 0;
  KeyReader* reader = nullptr;
  SearchScratch* scratch = nullptr;  // null: of its own
  // If not null: the keys of the returned tokens, densely, of a search that read them from `reader`
  // and still has them; else emptied. Needs `scratch`.
  std::vector<std::byte>* selected_keys = nullptr;
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
  virtual size_t memory_bytes() const = 0;  // held in memory, but for a few hundred
  // How much a search looks at, in the index's own measure: IVF the fraction of lists that it
  // probes, codes how far they are taken to miss. Exact search has but one.
  virtual float effort() const { return 1; }
  // What tuning (tuning.h) tries, least first.
  virtual std::vector<float> efforts() const { return {1}; }
  // Not while others use the index. kInvalidArgument: not an effort of this kind.
  virtual Status SetEffort(float effort);
  // ids ascending, cuts with their kind (docs/mathematics.md), one retrieved set per KV head
  // (index/ranking/group_ranking.h).
  // k of at least candidates.size() (an empty range too) returns them all without reading a key:
  // cuts are exact at -inf. Which of several tokens of equal rank is returned is unspecified.
  //   keys_scanned: distinct tokens whose key, or code, was scored
  //   bytes_scanned: codes with their ids or directions, centroids, and keys read, re-ranked ones
  //     again
  // kInvalidArgument: shapes disagree, `keys` do not cover the candidates, NaN or Inf in a query
  // (the message names the head) or in a key that was read (it names the token).
  virtual Result<Selection> Search(const SearchRequest& request) const = 0;
  // What Search returns for each of `requests`, to the bit and in their order: those of sessions on
  // one prefix, say. Codes, or the keys of an exact search, are then read once for as many requests
  // over the same keys and candidates as their scores have room for (search_pass.h), and
  // bytes_scanned is each one's share of that. Requests may have one scratch in common.
  virtual std::vector<Result<Selection>> SearchMany(std::span<const SearchRequest> requests) const;
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

// Fewer keys than this are scanned exactly as fast.
inline constexpr uint32_t kMinCodeKeys = 1024;

// Compact codes (index/codes/block_codes.h), a quarter of a byte a key dimension: keys that are
// alike share a block; all blocks are scanned, and all keys that could be among the k best, as far
// as their codes are known to miss, are re-ranked with their exact keys, at least kShortListFactor
// k where there are so many. An effort of 1 takes codes to miss what they do, more so many times
// that.
// Approximate cuts, except where so few candidates lie inside covered() that they are searched
// exactly; candidates outside always are.
//   keys: row i is token covered.begin + i; read during the call only.
// kInvalidArgument: NaN or Inf keys; fewer than kMinCodeKeys keys (use MakeExactIndex).
Result<std::unique_ptr<KeyIndex>> BuildCodesIndex(const RowsView& keys, TokenRange covered);
inline constexpr uint32_t kShortListFactor = 3;

// An index of codes, tuned, and which of its tokens belong to the prefix that is searched.
struct IndexPart {
  std::shared_ptr<const KeyIndex> index;
  TokenRange used;
};
// One search over the codes of several segments, with one short list and one Top-K. What no part
// uses is searched exactly. Neither serialised nor tuned: its parts are, and other prefixes may
// have some of them too. kInvalidArgument: no parts, not codes, not ascending, or used beyond what
// is covered.
Result<std::unique_ptr<KeyIndex>> JoinCodesIndexes(std::vector<IndexPart> parts);

}  // namespace prefixd::index
