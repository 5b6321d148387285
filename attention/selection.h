// What a selector returns: which mid tokens to read, and a cut per query head (spec §2).
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace prefixd {

// How far a cut may be trusted: an exact cut c_g means that no unread token of query head g
// scores above it; an approximate one comes from an index that may have missed some.
enum class CutKind : uint8_t { kNone = 0, kApproximate = 1, kExact = 2 };

struct Cut {
  float score = std::numeric_limits<float>::infinity();  // natural, scaled: compare with s_i
  CutKind kind = CutKind::kNone;
};

// One KV head's retrieved set, shared by its G query heads.
struct Selection {
  std::vector<uint32_t> ids;  // token positions in the prefix, ascending, all in the mid region
  std::vector<Cut> cuts;      // [G]
  uint64_t keys_scanned = 0;  // keys (or codes) that the search touched
  uint64_t bytes_scanned = 0;
};

// Picks the k tokens ranked by the best of the group's normalised scores s_i^g - L_g, where
// L_g is the logsumexp of head g's scores over all candidates; c_g = L_g + threshold with the
// threshold being the largest rank value left out (spec §2). k >= n selects everything (then
// cuts are exact at -infinity). Positions are candidate indices plus `first_id`.
//   scores: [G][n] row-major, natural scaled scores (softcap applied)
// `scores_complete`: false when scores are of a subset or approximate; cuts are then marked so.
Selection SelectByGroupMax(std::span<const float> scores, uint32_t group, uint32_t n, uint32_t k,
                           uint32_t first_id, bool scores_complete);

// The same ranking for several k at once: the first k of `best` are what SelectByGroupMax takes.
struct GroupRanking {
  uint32_t n = 0;
  std::vector<uint32_t> best;  // candidates, best first, of equal rank the lowest first
  std::vector<float> rank;     // of each of `best`
  std::vector<float> lse;      // [G] L_g

  // Exact cuts when the first k are retrieved. REQUIRES: k < best.size() or best.size() == n.
  std::vector<Cut> Cuts(uint32_t k) const;
};
// The best most + 1 candidates (so that any k up to `most` has its cuts).
GroupRanking RankByGroupMax(std::span<const float> scores, uint32_t group, uint32_t n,
                            uint32_t most);

}  // namespace prefixd
