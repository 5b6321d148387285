#include "runtime/derived/query_samples.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

namespace prefixd {
namespace {

constexpr uint32_t kQueriesMagic = 0x53515850;  // "PXQS"
constexpr uint32_t kQueriesVersion = 1;

// SplitMix64's finaliser is a bijection, so ranks of different tokens differ.
uint64_t Rank(uint32_t position) {
  uint64_t x = position + 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename T>
  bool Read(std::span<T> out) {
    if (bytes_.size() < out.size_bytes()) return false;
    if (!out.empty()) std::memcpy(out.data(), bytes_.data(), out.size_bytes());
    bytes_ = bytes_.subspan(out.size_bytes());
    return true;
  }
  size_t left() const { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
};

template <typename T>
void Append(std::vector<std::byte>& out, std::span<const T> values) {
  const auto bytes = std::as_bytes(values);
  out.insert(out.end(), bytes.begin(), bytes.end());
}

Error MalformedQueries(const char* what) {
  return {Code::kCorrupt, std::string("stored query samples are malformed: ") + what};
}

}  // namespace

bool QuerySamples::empty() const {
  return std::all_of(layers.begin(), layers.end(),
                     [](const Layer& layer) { return layer.positions.empty(); });
}

std::vector<std::byte> QuerySamples::Serialize() const {
  std::vector<std::byte> out;
  const uint32_t header[6] = {kQueriesMagic, kQueriesVersion, prompt_tokens,
                              n_q_heads,     key_dim,         static_cast<uint32_t>(layers.size())};
  Append(out, std::span<const uint32_t>(header));
  for (const Layer& layer : layers) {
    const uint32_t count = static_cast<uint32_t>(layer.positions.size());
    Append(out, std::span<const uint32_t>(&count, 1));
    Append(out, std::span<const uint32_t>(layer.positions));
    Append(out, std::span<const float>(layer.q));
  }
  return out;
}

Result<QuerySamples> QuerySamples::Deserialize(std::span<const std::byte> bytes,
                                               const KvGeometry& geometry) {
  Reader reader(bytes);
  uint32_t header[6];
  if (!reader.Read(std::span<uint32_t>(header))) return MalformedQueries("too short");
  if (header[0] != kQueriesMagic || header[1] != kQueriesVersion)
    return MalformedQueries("unknown magic or version");
  QuerySamples samples{header[2], header[3], header[4], {}};
  if (samples.n_q_heads != geometry.n_q_heads || samples.key_dim != geometry.key_dim ||
      header[5] != geometry.n_layers) {
    return MalformedQueries("they are of another geometry");
  }
  for (uint32_t l = 0; l < header[5]; ++l) {
    const LayerShape shape = geometry.layer(l);
    Layer& layer = samples.layers.emplace_back();
    layer.n_q_heads = shape.n_q_heads;
    layer.key_dim = shape.key_dim;
    const size_t token_floats = layer.token_floats();
    uint32_t count = 0;
    if (!reader.Read(std::span<uint32_t>(&count, 1)) ||
        reader.left() / ((1 + token_floats) * sizeof(float)) < count) {
      return MalformedQueries("too short");
    }
    layer.positions.resize(count);
    layer.q.resize(count * token_floats);
    if (!reader.Read(std::span<uint32_t>(layer.positions)) ||
        !reader.Read(std::span<float>(layer.q))) {
      return MalformedQueries("too short");
    }
    for (uint32_t position : layer.positions) {
      if (position < LastQuarterBegin(samples.prompt_tokens) || position >= samples.prompt_tokens) {
        return MalformedQueries("a position outside the last quarter");
      }
    }
    if (std::adjacent_find(layer.positions.begin(), layer.positions.end(),
                           std::greater_equal<>()) != layer.positions.end()) {
      return MalformedQueries("positions do not ascend");
    }
    if (!std::all_of(layer.q.begin(), layer.q.end(), [](float x) { return std::isfinite(x); })) {
      return MalformedQueries("a value is not finite");
    }
  }
  if (reader.left() != 0) return MalformedQueries("bytes after the last layer");
  return samples;
}

QuerySamples JoinHeads(std::vector<QuerySamples> parts) {
  if (parts.size() == 1) return std::move(parts.front());
  QuerySamples all{parts.front().prompt_tokens, 0, parts.front().key_dim, {}};
  for (const QuerySamples& part : parts) all.n_q_heads += part.n_q_heads;
  for (size_t l = 0; l < parts.front().layers.size(); ++l) {
    QuerySamples::Layer& layer = all.layers.emplace_back();
    layer.key_dim = parts.front().layers[l].key_dim;
    for (const QuerySamples& part : parts) layer.n_q_heads += part.layers[l].n_q_heads;
    for (uint32_t position : parts.front().layers[l].positions) {
      std::vector<float> q;
      q.reserve(layer.token_floats());
      for (const QuerySamples& part : parts) {
        const QuerySamples::Layer& from = part.layers[l];
        const auto at = std::ranges::lower_bound(from.positions, position);
        if (at == from.positions.end() || *at != position) break;
        const size_t floats = from.token_floats();
        const auto begin = from.q.begin() + (at - from.positions.begin()) * ptrdiff_t(floats);
        q.insert(q.end(), begin, begin + ptrdiff_t(floats));
      }
      if (q.size() != layer.token_floats()) continue;
      layer.positions.push_back(position);
      layer.q.insert(layer.q.end(), q.begin(), q.end());
    }
  }
  return all;
}

QueryReservoir::QueryReservoir(const KvGeometry& geometry, uint32_t prompt_tokens,
                               uint32_t capacity)
    : prompt_tokens_(prompt_tokens),
      capacity_(capacity),
      n_q_heads_(geometry.n_q_heads),
      key_dim_(geometry.key_dim),
      layers_(geometry.n_layers) {
  for (uint32_t l = 0; l < geometry.n_layers; ++l) layers_[l].shape = geometry.layer(l);
}

void QueryReservoir::Add(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q) {
  const size_t token_floats = layers_[layer].shape.query_floats();
  auto& kept = layers_[layer].kept;
  if (capacity_ == 0) return;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t position = first + i;
    if (position < LastQuarterBegin(prompt_tokens_) || position >= prompt_tokens_) continue;
    const uint64_t rank = Rank(position);
    if (kept.size() == capacity_ && !kept.contains(rank)) {
      if (rank > kept.rbegin()->first) continue;
      kept.erase(std::prev(kept.end()));
    }
    const auto token = q.subspan(i * token_floats, token_floats);
    kept[rank] = {position, {token.begin(), token.end()}};
  }
}

QuerySamples QueryReservoir::Take() const {
  QuerySamples samples{prompt_tokens_, n_q_heads_, key_dim_, {}};
  for (const auto& [shape, kept] : layers_) {
    std::vector<const Kept*> order;
    for (const auto& [rank, token] : kept) order.push_back(&token);
    std::sort(order.begin(), order.end(),
              [](const Kept* a, const Kept* b) { return a->position < b->position; });
    QuerySamples::Layer& layer = samples.layers.emplace_back();
    layer.n_q_heads = shape.n_q_heads;
    layer.key_dim = shape.key_dim;
    for (const Kept* token : order) {
      layer.positions.push_back(token->position);
      layer.q.insert(layer.q.end(), token->q.begin(), token->q.end());
    }
  }
  return samples;
}

}  // namespace prefixd
