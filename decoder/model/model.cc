#include "decoder/model/model.h"

#include <algorithm>
#include <string>

#include "decoder/model/ops.h"
#include "decoder/parallel.h"

namespace prefixd::decoder {

Result<Model> Model::Load(const std::filesystem::path& directory, const ModelOptions& options) {
  PREFIXD_ASSIGN(ModelConfig config, LoadConfig(directory));
  PREFIXD_ASSIGN(Weights weights, LoadWeights(directory, config));
  return Create(std::move(config), std::move(weights), options);
}

Result<Model> Model::Create(ModelConfig config, Weights weights, const ModelOptions& options) {
  if (options.chunk_tokens == 0 || options.threads > 1024) {
    return InvalidArgument("model: chunk_tokens must be at least 1 and threads at most 1024");
  }
  SetThreads(options.threads);
  return Model(std::move(config), std::move(weights), options);
}

Status Model::Forward(std::span<const uint32_t> tokens, uint32_t first, AttentionBackend& attention,
                      uint32_t n_logits, std::span<float> logits,
                      const PrefillProgress& progress) const {
  const uint32_t vocab = config_.vocab_size;
  if (tokens.empty()) return InvalidArgument("model: no tokens were given");
  if (n_logits > tokens.size() || logits.size() != size_t{n_logits} * vocab) {
    return InvalidArgument("model: the logits buffer does not fit the number of logits");
  }
  if (uint64_t{first} + tokens.size() > config_.max_positions) {
    return InvalidArgument("model: position " +
                           std::to_string(uint64_t{first} + tokens.size() - 1) +
                           " is beyond the model's " + std::to_string(config_.max_positions) +
                           " positions; shorten the prompt");
  }
  for (const uint32_t token : tokens) {
    if (token >= vocab) {
      return InvalidArgument("model: token " + std::to_string(token) +
                             " is outside the vocabulary of " + std::to_string(vocab));
    }
  }
  const auto total = static_cast<uint32_t>(tokens.size());
  const uint32_t first_wanted = total - n_logits;
  for (uint32_t begin = 0; begin < total; begin += options_.chunk_tokens) {
    const uint32_t n = std::min(options_.chunk_tokens, total - begin), end = begin + n;
    PREFIXD_ASSIGN(const std::vector<float> x,
                   RunLayers(tokens.subspan(begin, n), first + begin, attention));
    if (end > first_wanted) {
      const uint32_t from = std::max(begin, first_wanted), rows = end - from;
      std::vector<float> normed(size_t{rows} * config_.hidden);
      RmsNorm(weights_.final_norm, config_.norm_eps,
              std::span(x).subspan(size_t{from - begin} * config_.hidden), rows, normed);
      Linear(weights_.output(), normed, rows,
             logits.subspan(size_t{from - first_wanted} * vocab, size_t{rows} * vocab));
    }
    if (progress && !progress(end, total)) {
      return Error{Code::kCancelled, "model: stopped after " + std::to_string(end) + " tokens"};
    }
  }
  return {};
}

Result<std::vector<float>> Model::RunLayers(std::span<const uint32_t> tokens, uint32_t first,
                                            AttentionBackend& attention) const {
  const size_t n = tokens.size(), hidden = config_.hidden;
  std::vector<float> x(n * hidden);
  for (size_t i = 0; i < n; ++i) {
    const float* row = weights_.embedding.data.data() + tokens[i] * hidden;
    std::copy(row, row + hidden, x.begin() + static_cast<ptrdiff_t>(i * hidden));
  }
  const RopeTable rope = rope_.Table(first, static_cast<uint32_t>(n));
  for (uint32_t layer = 0; layer < config_.n_layers; ++layer) {
    PREFIXD_TRY(AttentionBlock(layer, first, rope, attention, x));
    MlpBlock(layer, x);
  }
  return x;
}

// x += W_o Attention(rope(norm(W_q h)), rope(norm(W_k h)), W_v h), h = RmsNorm(x).
Status Model::AttentionBlock(uint32_t layer, uint32_t first, const RopeTable& rope,
                             AttentionBackend& attention, std::span<float> x) const {
  const LayerWeights& w = weights_.layers[layer];
  const auto n = static_cast<uint32_t>(x.size() / config_.hidden);
  const uint32_t q_heads = config_.n_q_heads, kv_heads = config_.n_kv_heads;
  std::vector<float> h(x.size());
  std::vector<float> q(size_t{n} * w.q.rows), k(size_t{n} * w.k.rows), v(size_t{n} * w.v.rows);
  RmsNorm(w.attention_norm, config_.norm_eps, x, n, h);
  Linear(w.q, h, n, q);
  Linear(w.k, h, n, k);
  Linear(w.v, h, n, v);
  if (config_.qk_norm) {
    RmsNorm(w.q_norm, config_.norm_eps, q, n * q_heads, q);
    RmsNorm(w.k_norm, config_.norm_eps, k, n * kv_heads, k);
  }
  ApplyRope(rope, n, q_heads, q);
  ApplyRope(rope, n, kv_heads, k);
  std::vector<float> y(q.size());
  PREFIXD_TRY(attention.Attend(layer, first, n, q, k, v, y));
  Linear(w.o, y, n, h);
  AddTo(x, h);
  return {};
}

// x += W_down (silu(W_gate h) * W_up h), h = RmsNorm(x).
void Model::MlpBlock(uint32_t layer, std::span<float> x) const {
  const LayerWeights& w = weights_.layers[layer];
  const auto n = static_cast<uint32_t>(x.size() / config_.hidden);
  std::vector<float> h(x.size()), gate(size_t{n} * config_.ffn), up(gate.size());
  RmsNorm(w.mlp_norm, config_.norm_eps, x, n, h);
  Linear(w.gate, h, n, gate);
  Linear(w.up, h, n, up);
  SwiGlu(gate, up);
  Linear(w.down, gate, n, h);
  AddTo(x, h);
}

}  // namespace prefixd::decoder
