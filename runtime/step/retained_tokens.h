// Own tokens of a session that have moved to the store and whose rows stay in memory, chosen for
// each KV head by a retention policy (StepPolicy::Retain): steps attend to them exactly, beside
// what they retrieve, and read nothing of them.
//
// Thread-safety: constant once a plan has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/rows/rows.h"
#include "base/memory_budget.h"
#include "prefixd/partition.h"

namespace prefixd {

struct RetainedHead {
  std::vector<uint32_t> tokens;  // positions in the prefix, ascending
  std::vector<double> memory;    // what each counted for (Ranking::memory); or empty
  std::vector<std::byte> rows;   // [tokens][row bytes]
  MemoryCharge charge;           // of rows and lists

  RowRef ref(size_t i, const RowShape& row) const {
    const std::byte* at = &rows[i * row.bytes()];
    return {at, at + row.key_bytes()};
  }
  static uint64_t Bytes(size_t n, const RowShape& row) {
    return n * (row.bytes() + sizeof(uint32_t) + sizeof(double));
  }
};

struct RetainedTokens {
  std::string by;                   // the policy that chose them
  std::vector<RetainedHead> heads;  // [heads]

  // The tokens of a head that lie in `mid`: a prefix may have been cut since they were chosen, and
  // then goes on with others. Places in the head's lists.
  TokenRange In(size_t head, TokenRange mid) const;
  // The most that any head has there.
  uint32_t Most(TokenRange mid) const;
};

// Takes the ascending ids of `retained` out of `ids`, and their keys out of `keys`:
// [ids][key_bytes], or anything else where there are none.
void LeaveOut(std::span<const uint32_t> retained, size_t key_bytes, std::vector<uint32_t>& ids,
              std::vector<std::byte>& keys);
void LeaveOut(std::span<const uint32_t> retained, std::vector<uint32_t>& ids);

// Joins rows that were read, of the ascending `ids`, with a head's retained ones into `rows`, and
// their tokens into `ids`, both ascending. No token is in both.
void JoinRetained(const RetainedHead& head, TokenRange retained, const RowShape& row,
                  const RowsView& read, std::vector<uint32_t>& ids, std::vector<RowRef>& rows);

}  // namespace prefixd
