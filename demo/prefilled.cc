#include "demo/prefilled.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "decoder/attention/put_attention.h"

namespace prefixd::demo {

Prefilled::Prefilled(const KvGeometry& geometry, std::vector<uint32_t> prompt)
    : prompt_(std::move(prompt)),
      attention_(geometry),
      first_query_(static_cast<uint32_t>(prompt_.size() - prompt_.size() / 4)),
      queries_(geometry.n_layers) {}

Result<Prefilled> Prefilled::Compute(const decoder::Model& model, const KvGeometry& geometry,
                                     std::vector<uint32_t> prompt, const char* progress) {
  Prefilled out(geometry, std::move(prompt));
  decoder::ObservedAttention observed(
      out.attention_,
      [&](uint32_t layer, uint32_t first, uint32_t count, std::span<const float> q) {
        const uint32_t skip = std::min(count, out.first_query_ - std::min(out.first_query_, first));
        const std::span<const float> kept = q.subspan(q.size() / count * skip);
        out.queries_[layer].insert(out.queries_[layer].end(), kept.begin(), kept.end());
      });
  Progress shown(progress);
  const auto update = [&](uint32_t done, uint32_t total) {
    shown.Update(done, total, "tokens");
    return true;
  };
  PREFIXD_TRY(model.Forward(out.prompt_, 0, observed, 0, {}, update));
  return out;
}

Result<PutResult> Prefilled::Put(Store& store, const std::string& model,
                                 const std::string& label) const {
  const auto n = static_cast<uint32_t>(prompt_.size());
  PREFIXD_ASSIGN(const std::unique_ptr<PutStream> put, store.BeginPut({model, "", prompt_, label}));
  PREFIXD_TRY(decoder::PutCache(attention_.cache(), 0, n, *put));
  for (uint32_t layer = 0; layer < queries_.size(); ++layer) {
    PREFIXD_TRY(put->WriteQueries(layer, first_query_, n - first_query_, queries_[layer]));
  }
  return put->Commit();
}

}  // namespace prefixd::demo
