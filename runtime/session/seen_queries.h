// Remembers the last kObservedQueries queries of each KV head of a session, for policies that rank
// own tokens by what queries attend to.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "prefixd/head_index.h"
#include "prefixd/kv_shape.h"
#include "runtime/retention/scores.h"

namespace prefixd {

class SeenQueries {
 public:
  // Takes Bytes(geometry), at once.
  explicit SeenQueries(const KvGeometry& geometry);
  static uint64_t Bytes(const KvGeometry& geometry);

  // A query saw the first `own` tokens of the session's own; q: [G][key_dim], of one token.
  void Note(size_t head, uint32_t own, std::span<const float> q);

  struct Query {
    uint32_t own = 0;
    std::vector<float> q;
  };
  // Those of them that saw no more than `own` tokens, by ascending number.
  std::vector<Query> Of(size_t head, uint32_t own) const;
  // Forgets those that saw more than n tokens.
  void Truncate(uint32_t n);
  // Takes over what another session of the same model has.
  void CopyFrom(const SeenQueries& other);

 private:
  struct Head {
    std::vector<uint32_t> own;  // [kObservedQueries], a ring
    std::vector<float> q;       // [kObservedQueries][G][key_dim]
    uint32_t begin = 0, count = 0;

    uint32_t at(uint32_t i) const { return (begin + i) % kObservedQueries; }
    size_t each() const { return q.size() / kObservedQueries; }
  };
  mutable std::mutex mutex_;
  std::vector<Head> heads_;
};

}  // namespace prefixd
