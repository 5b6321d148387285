#include "index/ivf/hnsw_index.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "index/search/candidates.h"
#include "index/ivf/centred_keys.h"
#include "index/ivf/hnsw_graph.h"
#include "index/search/search_pass.h"

namespace prefixd::index {
namespace {

constexpr float kEffort = 4;

class HnswIndex final : public KeyIndex {
 public:
  HnswIndex(HnswGraph graph, uint32_t dim, TokenRange covered, size_t stored_bytes)
      : graph_(std::move(graph)), dim_(dim), covered_(covered), bytes_(stored_bytes) {}

  IndexKind kind() const override { return IndexKind::kHnsw; }
  TokenRange covered() const override { return covered_; }
  size_t memory_bytes() const override { return bytes_; }
  float effort() const override { return effort_; }
  std::vector<float> efforts() const override { return {1, 2, 3, 4, 6, 8, 12, 16}; }
  Status SetEffort(float effort) override {
    if (!(effort >= 1 && effort <= 64)) {
      return InvalidArgument("a graph is searched for 1 to 64 times as many keys as are returned");
    }
    effort_ = effort;
    return {};
  }
  Result<Selection> Search(const SearchRequest& request) const override;
  Result<std::vector<std::byte>> Serialize() const override {
    PREFIXD_ASSIGN(const auto graph, graph_.Serialize());
    Envelope fields;
    fields.kind = static_cast<uint32_t>(IndexKind::kHnsw);
    fields.covered = covered_;
    fields.key_dim = dim_;
    return Seal(fields, graph);
  }

 private:
  HnswGraph graph_;
  uint32_t dim_;
  TokenRange covered_;
  size_t bytes_;
  float effort_ = kEffort;
};

Result<Selection> HnswIndex::Search(const SearchRequest& request) const {
  PREFIXD_TRY(BeginSearch(request, dim_));
  const TokenRange& wanted = request.candidates;
  if (request.k >= wanted.size()) return SelectAll(request);
  const Outside outside = OutsideOf(wanted, covered_);
  const size_t inside = wanted.size() - outside.size();
  // The graph knows no candidates: what it finds elsewhere is lost. And a wide beam in a small
  // graph compares with everything.
  const auto beam = static_cast<uint64_t>(std::ceil(double{effort_} * request.k)) + 1;
  if (inside < covered_.size() / 2 || beam >= inside / 4) return SearchExactly(request);
  std::vector<uint32_t> proposed;
  uint64_t visited = 0;
  for (uint32_t g = 0; g < request.group; ++g) {
    const auto query = request.queries.subspan(size_t{g} * dim_, dim_);
    // A scale below zero asks for the least products.
    std::vector<float> asked(query.begin(), query.end());
    if (request.layer.scale < 0) {
      for (float& x : asked) x = -x;
    }
    PREFIXD_ASSIGN(const auto found, graph_.Search(asked, static_cast<uint32_t>(beam), &visited));
    for (const uint32_t row : found) {
      const uint32_t token = covered_.begin + row;
      if (wanted.contains(token)) proposed.push_back(token);
    }
  }
  std::ranges::sort(proposed);
  const auto twice = std::ranges::unique(proposed);
  proposed.erase(twice.begin(), twice.end());
  if (proposed.size() + outside.size() <= request.k) return SearchExactly(request);
  PREFIXD_ASSIGN(Selection selection, SelectAmong(request, proposed, outside));
  // Links of a vector are read with it.
  selection.keys_scanned += visited;
  selection.bytes_scanned += visited * (bytes_ / covered_.size());
  return selection;
}

}  // namespace

Result<std::unique_ptr<KeyIndex>> BuildHnswIndex(const RowsView& keys, TokenRange covered,
                                                 const HnswOptions& options) {
  if (covered.begin > covered.end || keys.count != covered.size()) {
    return InvalidArgument("an index over tokens [" + std::to_string(covered.begin) + ", " +
                           std::to_string(covered.end) + ") was given " +
                           std::to_string(keys.count) + " keys");
  }
  if (keys.count < kMinHnswKeys) {
    return InvalidArgument("a graph is worth it from " + std::to_string(kMinHnswKeys) +
                           " keys on, not for " + std::to_string(keys.count) +
                           "; use an exact index");
  }
  if (keys.data == nullptr || keys.shape.key_dim == 0 || keys.stride < keys.shape.key_bytes()) {
    return InvalidArgument("an index needs keys: data, dimensions and a stride of a key or more");
  }
  if (options.links < 4 || options.links > 64) {
    return InvalidArgument("a graph has 4 to 64 links of each key");
  }
  const uint32_t dim = keys.shape.key_dim;
  std::vector<float> mean(dim);
  PREFIXD_ASSIGN(const std::vector<float> centred, CentredKeys(keys, covered.begin, mean));
  PREFIXD_ASSIGN(HnswGraph graph, HnswGraph::Build(centred, dim, options.links));
  PREFIXD_ASSIGN(const auto stored, graph.Serialize());
  return std::unique_ptr<KeyIndex>(
      std::make_unique<HnswIndex>(std::move(graph), dim, covered, stored.size()));
}

Result<std::unique_ptr<KeyIndex>> LoadHnswIndex(const OpenedEnvelope& opened) {
  const Envelope& fields = opened.fields;
  if (fields.covered.begin >= fields.covered.end || fields.key_dim == 0 || fields.n_lists != 0 ||
      fields.probe_fraction != 0 || fields.seed != 0) {
    return Error{Code::kCorrupt, "stored index: impossible header; rebuild it"};
  }
  PREFIXD_ASSIGN(HnswGraph graph,
                 HnswGraph::Load(opened.payload, fields.covered.size(), fields.key_dim));
  return std::unique_ptr<KeyIndex>(std::make_unique<HnswIndex>(
      std::move(graph), fields.key_dim, fields.covered, opened.payload.size()));
}

}  // namespace prefixd::index
