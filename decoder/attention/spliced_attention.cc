#include "decoder/attention/spliced_attention.h"

#include "attention/step/step.h"
#include "prefixd/merge.h"

namespace prefixd::decoder {

SplicedAttention::SplicedAttention(std::shared_ptr<Session> session, BlockMode block_mode)
    : session_(std::move(session)),
      block_mode_(block_mode),
      local_(session_->info().geometry, session_->info().n_tokens) {}

Status SplicedAttention::Attend(uint32_t layer, uint32_t first, uint32_t n,
                                std::span<const float> q, std::span<const float> k,
                                std::span<const float> v, std::span<float> out) {
  const KvGeometry& g = local_.cache().geometry();
  // 1. The decoder computes exact attention over the new tokens, in its own memory.
  own_lse_.resize(size_t{n} * g.n_q_heads);
  PREFIXD_TRY(local_.AttendWithLse(layer, first, n, q, k, v, out, own_lse_));
  // 2. The session computes the state over the stored prefix.
  PREFIXD_TRY(AttendPrefix(layer, n, q));
  // 3. MergeStates joins both under one softmax.
  for (size_t head = 0; head < own_lse_.size(); ++head) {
    const auto own = out.subspan(head * g.value_dim, g.value_dim);
    const auto prefix = std::span(prefix_y_).subspan(head * g.value_dim, g.value_dim);
    MergeStates(own, &own_lse_[head], prefix, prefix_lse_[head]);
  }
  return {};
}

Status SplicedAttention::AttendPrefix(uint32_t layer, uint32_t n, std::span<const float> q) {
  const KvGeometry& g = local_.cache().geometry();
  const size_t q_size = size_t{g.n_q_heads} * g.key_dim, y_size = size_t{g.n_q_heads} * g.value_dim;
  prefix_y_.resize(n * y_size);
  prefix_lse_.resize(size_t{n} * g.n_q_heads);
  if (n > 1 && block_mode_ == BlockMode::kExact) {
    return session_->AttendExact(layer, n, q, prefix_y_, prefix_lse_);
  }
  for (uint32_t i = 0; i < n; ++i) {
    StepInfo info;
    PREFIXD_TRY(session_->Step(
        layer, q.subspan(i * q_size, q_size), std::span(prefix_y_).subspan(i * y_size, y_size),
        std::span(prefix_lse_).subspan(size_t{i} * g.n_q_heads, g.n_q_heads), &info));
    step_ledger_ += info.ledger;
  }
  return {};
}

}  // namespace prefixd::decoder
