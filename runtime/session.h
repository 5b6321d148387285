// A decoder's hold on one stored prefix: steps in, partial attention states out.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/partition.h"
#include "attention/result.h"
#include "attention/selection.h"
#include "runtime/types.h"

namespace prefixd {

// Thread-safety: steps of one session may run concurrently (different layers or batches).
class Session {
 public:
  virtual ~Session() = default;
  virtual const SessionInfo& info() const = 0;
  virtual StepPolicy policy() const = 0;
  // kInfeasible when the budget cannot pay for anchors and estimator: said here, never ignored.
  virtual Status SetPolicy(const StepPolicy& policy) = 0;

  // Attention of one decode step over the stored prefix (spec §2), for all heads of a layer:
  //   q: [n_q_heads][key_dim] float32, after RoPE -> y: [n_q_heads][value_dim], lse: [n_q_heads]
  //   (natural log). The decoder merges (y, lse) with the state of its own tokens: MergeStates.
  virtual Status Step(uint32_t layer, std::span<const float> q, std::span<float> y,
                      std::span<float> lse, StepInfo* info) = 0;
  // Exact attention of a block of queries (the new question) in one pass over the prefix:
  //   q: [n][n_q_heads][key_dim] -> y: [n][n_q_heads][value_dim], lse: [n][n_q_heads].
  virtual Status AttendExact(uint32_t layer, uint32_t n, std::span<const float> q,
                             std::span<float> y, std::span<float> lse) = 0;

  // For engines that compute themselves. ids ascending; out: [ids.size()][row bytes].
  virtual Status ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                          std::span<std::byte> out) = 0;
  // A run of rows of one head: out [range.size()][row bytes].
  virtual Status ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range,
                           std::span<std::byte> out) = 0;
  // Selection alone: ids and cuts of one KV head for its group's queries q [G][key_dim].
  virtual Result<Selection> Select(uint32_t layer, uint32_t kv_head, std::span<const float> q,
                                   uint32_t k) = 0;
  // The summaries of the mid region of one head, serialized (attention/phi_cache.h, moments.h).
  // kNotFound when the model has no feature maps.
  virtual Result<std::vector<std::byte>> PhiCacheBytes(uint32_t layer, uint32_t kv_head) = 0;
  virtual Result<std::vector<std::byte>> MomentBytes(uint32_t layer, uint32_t kv_head) = 0;

  virtual SessionReport report() const = 0;
  // Ends the session and returns its ledger; later calls fail with kFailedPrecondition.
  virtual Result<SessionReport> Detach() = 0;
};

}  // namespace prefixd
