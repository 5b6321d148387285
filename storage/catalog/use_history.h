// Remembers how much segments were used that are not stored any more, so that a prompt that comes
// back does not count as new: where a cache holds few of the prompts that are asked for, most of
// them are evicted between two uses, and what is evicted would never be seen to be used often
// (docs/decisions/048-idle-time-in-the-score.md).
//
// A set-associative table of fixed size (0.4 MB); of a full set the least used entry gives way, by
// uses that fade as a segment's do (eviction.h). Lost when the store is closed.
//
// Thread-safety: one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace prefixd::storage {

struct PastUses {
  float heat = 0;  // at the time of the last use
  int64_t last_used_unix_ms = 0;
};

class UseHistory {
 public:
  static constexpr size_t kSets = 2048, kWays = 8;

  // `key` names what was stored, whatever its segment's id: equal for a segment that begins with
  // the same tokens behind the same ones. Its entry is overwritten.
  void Remember(uint64_t key, PastUses uses);
  // Takes the entry out.
  std::optional<PastUses> Recall(uint64_t key);

 private:
  struct Entry {
    uint64_t key = 0;
    PastUses uses;  // heat 0: free
  };
  using Set = std::array<Entry, kWays>;

  Set& SetOf(uint64_t key) { return sets_[key % kSets]; }

  std::vector<Set> sets_{kSets};
};

}  // namespace prefixd::storage
