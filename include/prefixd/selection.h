// Defines a selector's result, the mid tokens to read and a cut per query head
// (docs/mathematics.md), and the mass that a step has left unread.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace prefixd {

// Tells how far a cut may be trusted: under an exact cut c_g no unread token of query head g scores
// above it; an approximate one comes from an index that may have missed some.
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

// The share delta of full attention's mass that was not read.
struct MissingMass {
  double delta = 0;        // in [0, 1]
  bool certified = false;  // a bound that holds; otherwise only an estimate
};

}  // namespace prefixd
