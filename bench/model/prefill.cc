#include "bench/model/prefill.h"

#include <algorithm>
#include <chrono>

#include "decoder/attention/put_attention.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;
using decoder::KvCache;
using decoder::LocalAttention;

double Since(Clock::time_point begun) {
  return std::chrono::duration<double>(Clock::now() - begun).count();
}

// Returns tokens [first, first + n) of a layer as KvCache::Append takes them.
std::vector<float> TokenMajor(const KvCache& cache, uint32_t layer, uint32_t n, bool values) {
  const KvGeometry& g = cache.geometry();
  const size_t dim = values ? g.value_dim : g.key_dim;
  std::vector<float> out(n * g.n_kv_heads * dim);
  for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
    const std::span<const float> rows = values ? cache.values(layer, h) : cache.keys(layer, h);
    for (uint32_t i = 0; i < n; ++i) {
      std::ranges::copy(rows.subspan(i * dim, dim), &out[(size_t{i} * g.n_kv_heads + h) * dim]);
    }
  }
  return out;
}

}  // namespace

Result<Prefilled> Prefill(const decoder::Model& model, std::span<const uint32_t> tokens) {
  const auto n = static_cast<uint32_t>(tokens.size());
  const KvGeometry g = model.Geometry(DType::kBf16);
  Prefilled out{.attention = std::make_unique<LocalAttention>(g),
                .queries_from = n - n / 4,
                .queries = std::vector<std::vector<float>>(g.n_layers),
                .logits = std::vector<float>(model.config().vocab_size)};
  decoder::ObservedAttention observed(
      *out.attention,
      [&](uint32_t layer, uint32_t first, uint32_t count, std::span<const float> q) {
        const uint32_t skip = std::min(count, out.queries_from - std::min(out.queries_from, first));
        const std::span<const float> kept = q.subspan(q.size() / count * skip);
        out.queries[layer].insert(out.queries[layer].end(), kept.begin(), kept.end());
      });
  const auto begun = Clock::now();
  PREFIXD_TRY(model.Forward(tokens, 0, observed, 1, out.logits));
  out.seconds = Since(begun);
  return out;
}

Result<StoredPrefill> PrefillAndStore(const decoder::Model& model, Store& store,
                                      const std::string& name, std::span<const uint32_t> tokens,
                                      bool wait_ready) {
  const KvGeometry g = model.Geometry(DType::kBf16);
  LocalAttention local(g);
  std::vector<float> logits(model.config().vocab_size);
  StoredPrefill out;
  auto begun = Clock::now();
  PREFIXD_ASSIGN(const std::unique_ptr<PutStream> put,
                 store.BeginPut({name, "", {tokens.begin(), tokens.end()}, "bench"}));
  decoder::PutAttention storing(local, *put, g);
  PREFIXD_TRY(model.Forward(tokens, 0, storing, 1, logits));
  PREFIXD_ASSIGN(const PutResult stored, put->Commit());
  out.seconds = Since(begun);
  out.prefix = stored.prefix;
  out.bytes = stored.bytes;
  if (!wait_ready) return out;
  begun = Clock::now();
  PREFIXD_TRY(store.WaitReady(out.prefix, nullptr));
  out.ready_seconds = Since(begun);
  return out;
}

Result<Repeated> PutRepeated(Store& store, const std::string& name,
                             std::span<const uint32_t> tokens, const Prefilled& prompt,
                             uint32_t n_tokens) {
  const KvCache& cache = prompt.attention->cache();
  const KvGeometry& g = cache.geometry();
  const auto period = static_cast<uint32_t>(tokens.size());
  std::vector<uint32_t> all(n_tokens);
  for (uint32_t i = 0; i < n_tokens; ++i) all[i] = tokens[i % period];
  PREFIXD_ASSIGN(const std::unique_ptr<PutStream> put,
                 store.BeginPut({name, "", all, "bench, rows repeated"}));
  KvCache rows(g);
  std::vector<std::byte> k, v;
  for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
    for (uint32_t first = 0; first < n_tokens; first += period) {
      const uint32_t n = std::min(period, n_tokens - first);
      k.resize(size_t{n} * g.n_kv_heads * g.row(layer).key_bytes());
      v.resize(size_t{n} * g.n_kv_heads * g.row(layer).value_bytes());
      PREFIXD_TRY(cache.Export(layer, 0, n, k, v));
      PREFIXD_TRY(put->Write(layer, first, n, k, v));
      rows.Append(layer, n, TokenMajor(cache, layer, n, false), TokenMajor(cache, layer, n, true));
    }
    const auto queries = period - prompt.queries_from;
    PREFIXD_TRY(put->WriteQueries(layer, n_tokens - queries, queries, prompt.queries[layer]));
  }
  PREFIXD_ASSIGN(const PutResult stored, put->Commit());
  PREFIXD_TRY(store.WaitReady(stored.prefix, nullptr));
  return Repeated{stored.prefix, std::make_unique<LocalAttention>(std::move(rows))};
}

}  // namespace prefixd::bench
