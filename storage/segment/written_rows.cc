#include "storage/segment/written_rows.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace prefixd::storage {

Status WrittenRows::Check(uint32_t layer, HeadRange heads, uint32_t first, uint32_t n) const {
  if (layer >= n_layers_) {
    return InvalidArgument("layer " + std::to_string(layer) + " of a model with " +
                           std::to_string(n_layers_) + " layers");
  }
  if (heads_.heads_in(layer) == 0) {
    return InvalidArgument("layer " + std::to_string(layer) + " has no rows");
  }
  const auto named = [](HeadRange h) {
    return "KV heads " + std::to_string(h.first) + ".." + std::to_string(uint64_t{h.first} + h.n);
  };
  if (heads.n == 0 || heads.first >= n_kv_heads_ || heads.n > n_kv_heads_ - heads.first) {
    return InvalidArgument(named(heads) + " of a model with " + std::to_string(n_kv_heads_));
  }
  if (n == 0 || first < tokens_.begin || first >= tokens_.end || n > tokens_.end - first) {
    return InvalidArgument("tokens [" + std::to_string(first) + ", " +
                           std::to_string(uint64_t{first} + n) + ") are not within [" +
                           std::to_string(tokens_.begin) + ", " + std::to_string(tokens_.end) +
                           "), which this put stores");
  }
  for (const Run& run : runs_) {
    if (!Overlap(run.heads, heads)) continue;
    if (run.heads != heads) {
      return InvalidArgument(named(heads) + " overlap " + named(run.heads) +
                             ", which were written together");
    }
    for (uint32_t i = first - tokens_.begin; i < first - tokens_.begin + n; ++i) {
      if (run.have[layer][i]) {
        return InvalidArgument("token " + std::to_string(tokens_.begin + i) + " of layer " +
                               std::to_string(layer) + " was written before");
      }
    }
  }
  return {};
}

void WrittenRows::Note(uint32_t layer, HeadRange heads, uint32_t first, uint32_t n) {
  auto run = std::ranges::find(runs_, heads, &Run::heads);
  if (run == runs_.end()) {
    runs_.push_back(
        {heads, {n_layers_, std::vector<bool>(tokens_.size())}, std::vector<uint32_t>(n_layers_)});
    run = runs_.end() - 1;
  }
  PREFIXD_CHECK(first >= tokens_.begin && n <= tokens_.end - first, first, n);
  std::fill_n(run->have[layer].begin() + (first - tokens_.begin), n, true);
  run->count[layer] += n;
}

Status WrittenRows::CheckComplete(HeadRange heads) const {
  uint32_t begun = 0;
  for (const Run& run : runs_) {
    if (!Overlap(run.heads, heads)) continue;
    begun += run.heads.n;
    for (uint32_t layer = 0; layer < n_layers_; ++layer) {
      if (run.count[layer] == tokens_.size() || heads_.heads_in(layer) == 0) continue;
      const auto& have = run.have[layer];
      return Lacks(layer, uint32_t(std::find(have.begin(), have.end(), false) - have.begin()));
    }
  }
  if (begun >= heads.n) return {};
  uint32_t first = 0;
  while (heads_.heads_in(first) == 0) ++first;  // a model has a layer with rows
  return Lacks(first, 0);
}

Error WrittenRows::Lacks(uint32_t layer, uint32_t own_token) const {
  return {Code::kFailedPrecondition, "the put is incomplete: layer " + std::to_string(layer) +
                                         " lacks token " +
                                         std::to_string(uint64_t{tokens_.begin} + own_token)};
}

uint64_t WrittenRows::BytesWith(HeadRange heads) const {
  const bool known = std::ranges::find(runs_, heads, &Run::heads) != runs_.end();
  return (runs_.size() + (known ? 0 : 1)) * uint64_t{n_layers_} * tokens_.size() / 8;
}

}  // namespace prefixd::storage
