#include "bench/prompts/traced_store.h"

#include <algorithm>
#include <cstring>
#include <random>

namespace prefixd::bench {
namespace {

constexpr uint32_t kPutTokens = 4096;

// Returns [n][n_kv_heads][dim] of a layer, in the stored dtype.
std::vector<std::byte> LayerBytes(const RetrievalTrace& trace, uint32_t layer,
                                  std::vector<float> RetrievalTrace::Head::*part, uint32_t dim) {
  const KvGeometry& g = trace.geometry;
  std::vector<float> all;
  all.reserve(size_t{trace.n_tokens} * g.n_kv_heads * dim);
  for (size_t t = 0; t < trace.n_tokens; ++t) {
    for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
      const auto& of_head = trace.heads[size_t{layer} * g.n_kv_heads + h].*part;
      const auto row = of_head.begin() + static_cast<ptrdiff_t>(t * dim);
      all.insert(all.end(), row, row + dim);
    }
  }
  std::vector<std::byte> bytes(all.size() * DTypeBytes(g.dtype));
  FromFloat(g.dtype, all, bytes.data());
  return bytes;
}

}  // namespace

Result<std::string> PutTrace(Store& store, const std::string& model, const RetrievalTrace& trace,
                             bool queries) {
  const KvGeometry& g = trace.geometry;
  PREFIXD_TRY(store.RegisterModel({model, g, {{"weights", "trace"}}, {}}));
  PREFIXD_ASSIGN(const auto put, store.BeginPut({model, "", trace.tokens, "trace"}));
  for (uint32_t layer = 0; layer < g.n_layers && put->missing().size() > 0; ++layer) {
    const auto k = LayerBytes(trace, layer, &RetrievalTrace::Head::keys, g.key_dim);
    const auto v = LayerBytes(trace, layer, &RetrievalTrace::Head::values, g.value_dim);
    PREFIXD_TRY(put->Write(layer, 0, trace.n_tokens, k, v));
    const size_t floats = size_t{g.group_size(layer)} * g.key_dim;
    for (size_t s = 0; queries && s < trace.sampled_at.size(); ++s) {
      std::vector<float> q;
      for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
        const auto& head = trace.heads[size_t{layer} * g.n_kv_heads + h];
        const auto of = std::span(head.sample_queries).subspan(s * floats, floats);
        q.insert(q.end(), of.begin(), of.end());
      }
      PREFIXD_TRY(put->WriteQueries(layer, trace.sampled_at[s], 1, q));
    }
  }
  PREFIXD_ASSIGN(const PutResult stored, put->Commit());
  return stored.prefix;
}

TracedPrompt::TracedPrompt(std::span<const HeadTrace> heads, uint32_t n_layers)
    : heads_(heads), n_tokens_(static_cast<uint32_t>(heads[0].view().count)) {
  const HeadTrace& head = heads[0];
  geometry_.n_layers = n_layers;
  geometry_.n_kv_heads = static_cast<uint32_t>(heads.size() / n_layers);
  geometry_.n_q_heads = geometry_.n_kv_heads * head.group;
  geometry_.key_dim = geometry_.value_dim = head.shape.key_dim;
  geometry_.dtype = head.shape.dtype;
  geometry_.layers.assign(n_layers, head.layer);
}

uint64_t TracedPrompt::row_bytes() const {
  return uint64_t{n_tokens_} * heads_.size() * geometry_.row(0).bytes();
}

std::vector<uint32_t> TracedPrompt::tokens() const {
  std::vector<uint32_t> tokens(n_tokens_);
  for (uint32_t t = 0; t < n_tokens_; ++t) tokens[t] = t;
  return tokens;
}

Status TracedPrompt::Register(Store& store) const {
  ModelSpec spec;
  spec.name = model();
  spec.geometry = geometry_;
  spec.identity = {{"weights", "traced"}};
  return store.RegisterModel(spec);
}

Result<std::string> TracedPrompt::Put(Store& store, std::span<const uint32_t> sampled_at) const {
  PREFIXD_ASSIGN(const auto put, store.BeginPut({model(), "", tokens(), "traced"}));
  const size_t key_bytes = geometry_.row(0).key_bytes(), n_heads = geometry_.n_kv_heads;
  // All heads share one run of values, because making values would take longer than storing them.
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<float> floats(kPutTokens * n_heads * geometry_.value_dim);
  for (float& x : floats) x = normal(rng);
  std::vector<std::byte> k(kPutTokens * n_heads * key_bytes),
      v(kPutTokens * n_heads * geometry_.row(0).value_bytes());
  FromFloat(geometry_.dtype, floats, v.data());
  for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
    const auto heads = OfLayer(layer);
    for (uint32_t first = 0; first < n_tokens_; first += kPutTokens) {
      const uint32_t count = std::min(kPutTokens, n_tokens_ - first);
      for (size_t t = 0; t < count; ++t) {
        for (size_t h = 0; h < n_heads; ++h) {
          std::memcpy(&k[(t * n_heads + h) * key_bytes],
                      heads[h].keys.data() + (first + t) * key_bytes, key_bytes);
        }
      }
      PREFIXD_TRY(put->Write(layer, first, count, std::span(k).first(count * n_heads * key_bytes),
                             std::span(v).first(count * n_heads * geometry_.row(0).value_bytes())));
    }
    const size_t floats_of_head = size_t{heads[0].group} * geometry_.key_dim;
    for (size_t s = 0; s < sampled_at.size(); ++s) {
      std::vector<float> q;
      for (const HeadTrace& head : heads) {
        const auto of = std::span(head.sample_queries).subspan(s * floats_of_head, floats_of_head);
        q.insert(q.end(), of.begin(), of.end());
      }
      PREFIXD_TRY(put->WriteQueries(layer, sampled_at[s], 1, q));
    }
  }
  PREFIXD_ASSIGN(const PutResult stored, put->Commit());
  return stored.prefix;
}

std::vector<float> TracedPrompt::Queries(uint32_t layer, size_t step) const {
  std::vector<float> q;
  for (const HeadTrace& head : OfLayer(layer)) {
    const auto of_head = head.step(step);
    q.insert(q.end(), of_head.begin(), of_head.end());
  }
  return q;
}

}  // namespace prefixd::bench
