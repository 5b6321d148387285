#include "index/ivf/ivf_index.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "attention/step/step.h"
#include "index/ivf/centred_keys.h"
#include "index/ivf/ivf_lists.h"
#include "index/ivf/ivf_probe.h"
#include "index/ranking/group_ranking.h"
#include "index/search/search_pass.h"

namespace prefixd::index {

namespace {

// What a score's rounding to 16-bit codes needs besides the lists.
struct Centring {
  std::vector<float> mean;   // [dim], subtracted before indexing: a constant per query
  std::vector<float> error;  // [dim], largest |code - centred key|
};

// The candidates of one search; `scores` is [group][n], n being tokens.size(). The first
// `n_codes` of them were scored from codes, the others exactly.
struct Scanned {
  std::vector<uint32_t> tokens;
  std::vector<float> scores;
  size_t n_codes = 0;
};

class IvfIndex final : public KeyIndex {
 public:
  IvfIndex(IvfLists lists, Centring centring, TokenRange covered, const IvfOptions& options)
      : lists_(std::move(lists)),
        centring_(std::move(centring)),
        covered_(covered),
        options_(options) {}

  IndexKind kind() const override { return IndexKind::kIvf; }
  float effort() const override { return options_.probe_fraction; }
  std::vector<float> efforts() const override {
    return {0.02f, 0.05f, 0.1f, 0.15f, 0.2f, 0.3f, 0.4f, 0.5f, 0.75f};
  }
  Status SetEffort(float effort) override;
  size_t memory_bytes() const override {
    return covered_.size() * (size_t{dim()} * 2 + sizeof(int64_t)) +
           size_t{lists_.n_lists()} * dim() * sizeof(float);
  }
  TokenRange covered() const override { return covered_; }
  Result<Selection> Search(const SearchRequest& request) const override;
  Result<std::vector<std::byte>> Serialize() const override;

 private:
  uint32_t dim() const { return static_cast<uint32_t>(centring_.mean.size()); }
  void ScoreCodes(const SearchRequest& request, std::span<const ListSlice> slices,
                  Scanned& scanned) const;
  Status ScoreOutside(const SearchRequest& request, TokenRange outside, size_t at,
                      Scanned& scanned) const;
  double ScoreError(const SearchRequest& request, const Scanned& scanned) const;

  IvfLists lists_;
  Centring centring_;
  TokenRange covered_;
  IvfOptions options_;
};

// Scores the slices' codes into the front of `scanned`.
void IvfIndex::ScoreCodes(const SearchRequest& request, std::span<const ListSlice> slices,
                          Scanned& scanned) const {
  const size_t n = scanned.tokens.size();
  LayerGeometry uncapped = request.layer;
  uncapped.softcap = 0;
  std::vector<float> offsets(request.group);  // scale * q.mean, taken out by centring
  for (uint32_t g = 0; g < request.group; ++g) {
    const auto query = request.queries.subspan(size_t{g} * dim(), dim());
    offsets[g] =
        static_cast<float>(request.layer.scale * std::inner_product(query.begin(), query.end(),
                                                                    centring_.mean.begin(), 0.0));
  }
  std::vector<float> block;
  size_t at = 0;
  for (const ListSlice& slice : slices) {
    const ListView list = lists_.list(slice.list);
    const size_t rows = slice.end - slice.begin;
    block.resize(request.group * rows);
    Scores(request.queries, request.group, uncapped, list.codes.Sub(slice.begin, rows), block);
    for (size_t j = 0; j < rows; ++j) {
      scanned.tokens[at + j] = covered_.begin + static_cast<uint32_t>(list.ids[slice.begin + j]);
    }
    for (uint32_t g = 0; g < request.group; ++g) {
      float* out = scanned.scores.data() + g * n + at;
      for (size_t j = 0; j < rows; ++j) out[j] = block[g * rows + j] + offsets[g];
    }
    at += rows;
  }
  if (const float cap = request.layer.softcap; cap > 0) {
    for (uint32_t g = 0; g < request.group; ++g) {
      float* out = scanned.scores.data() + g * n;
      for (size_t j = 0; j < at; ++j) out[j] = cap * std::tanh(out[j] / cap);
    }
  }
  scanned.n_codes = at;
}

// Scores tokens that the index does not cover from their keys, into columns from `at` on.
Status IvfIndex::ScoreOutside(const SearchRequest& request, TokenRange outside, size_t at,
                              Scanned& scanned) const {
  if (outside.size() == 0) return {};
  PREFIXD_TRY(
      ScoreRange(request, outside, std::span(scanned.scores).subspan(at), scanned.tokens.size()));
  std::iota(scanned.tokens.begin() + at, scanned.tokens.begin() + at + outside.size(),
            outside.begin);
  return {};
}

// How far a score from codes can be from the exact one, over all heads: rounding to 16 bits, and
// a margin for float32 sums. A softcap only shrinks differences.
double IvfIndex::ScoreError(const SearchRequest& request, const Scanned& scanned) const {
  double worst = 0;
  for (uint32_t g = 0; g < request.group; ++g) {
    const float* query = request.queries.data() + size_t{g} * dim();
    double codes = 0, offset = 0;
    for (uint32_t d = 0; d < dim(); ++d) {
      codes += std::fabs(query[d]) * static_cast<double>(centring_.error[d]);
      offset += std::fabs(static_cast<double>(query[d]) * centring_.mean[d]);
    }
    worst = std::max(worst, std::fabs(request.layer.scale) * (codes + 4e-6 * offset));
  }
  float largest = 0;
  for (const float score : scanned.scores) largest = std::max(largest, std::fabs(score));
  return 1.001 * worst + 4e-6 * (1.0 + largest);
}

// Replaces the scores of `columns` by exact ones.
Status Rerank(const SearchRequest& request, std::span<const uint32_t> columns, Scanned& scanned) {
  const size_t n = scanned.tokens.size();
  std::vector<uint32_t> order(columns.begin(), columns.end()), tokens;
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return scanned.tokens[a] < scanned.tokens[b]; });
  for (const uint32_t column : order) tokens.push_back(scanned.tokens[column]);
  std::vector<float> exact(request.group * tokens.size());
  PREFIXD_TRY(ScoreTokens(request, tokens, exact, tokens.size()));
  for (uint32_t g = 0; g < request.group; ++g) {
    for (size_t j = 0; j < order.size(); ++j) {
      scanned.scores[g * n + order[j]] = exact[g * order.size() + j];
    }
  }
  return {};
}

Result<Selection> IvfIndex::Search(const SearchRequest& request) const {
  PREFIXD_TRY(CheckRequest(request));
  if (request.keys.shape.key_dim != dim()) {
    return InvalidArgument("search: keys of " + std::to_string(request.keys.shape.key_dim) +
                           " dimensions in an index over " + std::to_string(dim()));
  }
  // It fills neither of them.
  if (request.scores) request.scores->clear();
  if (request.selected_keys) request.selected_keys->clear();
  const TokenRange& wanted = request.candidates;
  if (request.k >= wanted.size()) return SelectAll(request);
  const TokenRange inside{std::clamp(covered_.begin, wanted.begin, wanted.end),
                          std::clamp(covered_.end, wanted.begin, wanted.end)};
  // Scanning the lists would touch about this many tokens, near the candidates or not.
  if (inside.size() < options_.probe_fraction * covered_.size()) return SearchExactly(request);

  const TokenRange before{wanted.begin, inside.begin}, after{inside.end, wanted.end};
  const size_t outside = size_t{before.size()} + after.size();
  // One more than k, so that the cut is a token that was seen.
  const size_t at_least = request.k + size_t{1} - std::min<size_t>(request.k, outside);
  const std::vector<ListSlice> slices = ChooseLists(
      lists_, request.queries, request.group, request.layer.scale, options_.probe_fraction,
      {inside.begin - covered_.begin, inside.end - covered_.begin}, at_least);
  size_t n = outside;
  for (const ListSlice& slice : slices) n += slice.end - slice.begin;

  Scanned scanned;
  scanned.tokens.resize(n);
  scanned.scores.resize(size_t{request.group} * n);
  ScoreCodes(request, slices, scanned);
  PREFIXD_TRY(ScoreOutside(request, before, scanned.n_codes, scanned));
  PREFIXD_TRY(ScoreOutside(request, after, scanned.n_codes + before.size(), scanned));
  if (!AllFinite(scanned.scores)) {
    return InvalidArgument("search: scores overflow although queries and keys are finite");
  }

  const std::vector<uint32_t> doubtful = WithinReach(scanned.scores, request.group, scanned.n_codes,
                                                     request.k, ScoreError(request, scanned));
  PREFIXD_TRY(Rerank(request, doubtful, scanned));

  Selection selection =
      SelectByGroupMax(scanned.scores, request.group, static_cast<uint32_t>(n), request.k, 0,
                       /*scores_complete=*/false);
  for (uint32_t& id : selection.ids) id = scanned.tokens[id];
  std::sort(selection.ids.begin(), selection.ids.end());
  const size_t key_bytes = request.keys.shape.key_bytes();
  selection.keys_scanned = n;
  selection.bytes_scanned = lists_.centroids().count * lists_.centroids().shape.bytes() +
                            scanned.n_codes * (size_t{dim()} * 2 + sizeof(int64_t)) +
                            (outside + doubtful.size()) * key_bytes;
  return selection;
}

std::span<const std::byte> AsBytes(std::span<const float> values) { return std::as_bytes(values); }

// Payload: mean[dim] f32 | error[dim] f32 | the lists as FAISS writes them.
Result<std::vector<std::byte>> IvfIndex::Serialize() const {
  PREFIXD_ASSIGN(const std::vector<std::byte> lists, lists_.Serialize());
  std::vector<std::byte> payload;
  payload.reserve(2 * dim() * sizeof(float) + lists.size());
  for (const auto part :
       {AsBytes(centring_.mean), AsBytes(centring_.error), std::span<const std::byte>(lists)}) {
    payload.insert(payload.end(), part.begin(), part.end());
  }
  return Seal({static_cast<uint32_t>(IndexKind::kIvf), covered_, dim(), lists_.n_lists(),
               options_.probe_fraction, options_.seed},
              payload);
}

bool GoodFraction(float fraction) { return fraction > 0 && fraction <= 1; }

Status IvfIndex::SetEffort(float effort) {
  if (!GoodFraction(effort)) {
    return InvalidArgument(
        "an inverted file probes a fraction of its lists, above 0 and at most 1");
  }
  options_.probe_fraction = effort;
  return {};
}

// Largest |code - centred key| per dimension: [dim].
std::vector<float> CodeError(const IvfLists& lists, std::span<const float> centred, uint32_t dim) {
  std::vector<float> error(dim, 0.0f), decoded(dim);
  for (uint32_t l = 0; l < lists.n_lists(); ++l) {
    const ListView list = lists.list(l);
    for (size_t j = 0; j < list.ids.size(); ++j) {
      ToFloat(DType::kF16, list.codes.key(j), decoded);
      const float* truth = centred.data() + static_cast<size_t>(list.ids[j]) * dim;
      for (uint32_t d = 0; d < dim; ++d) {
        error[d] = std::max(error[d], std::fabs(decoded[d] - truth[d]));
      }
    }
  }
  return error;
}

}  // namespace

Result<std::unique_ptr<KeyIndex>> BuildIvfIndex(const RowsView& keys, TokenRange covered,
                                                const IvfOptions& options) {
  if (covered.begin > covered.end || keys.count != covered.size()) {
    return InvalidArgument("an index over tokens [" + std::to_string(covered.begin) + ", " +
                           std::to_string(covered.end) + ") was given " +
                           std::to_string(keys.count) + " keys");
  }
  if (keys.count < kMinIvfKeys) {
    return InvalidArgument("an inverted file needs at least " + std::to_string(kMinIvfKeys) +
                           " keys, not " + std::to_string(keys.count) + "; use an exact index");
  }
  if (keys.data == nullptr || keys.shape.key_dim == 0 || keys.stride < keys.shape.key_bytes()) {
    return InvalidArgument("an index needs keys: data, dimensions and a stride of a key or more");
  }
  if (!GoodFraction(options.probe_fraction)) {
    return InvalidArgument("probe_fraction must be above 0 and at most 1");
  }
  const uint32_t dim = keys.shape.key_dim;
  const uint32_t n_lists =
      options.n_lists != 0
          ? options.n_lists
          : std::min<uint32_t>(static_cast<uint32_t>(4 * std::sqrt(double(keys.count))),
                               static_cast<uint32_t>(keys.count / 4));
  Centring centring{std::vector<float>(dim), {}};
  PREFIXD_ASSIGN(const std::vector<float> centred, CentredKeys(keys, covered.begin, centring.mean));
  PREFIXD_ASSIGN(IvfLists lists, IvfLists::Build(centred, dim, n_lists, options.seed));
  centring.error = CodeError(lists, centred, dim);
  return std::unique_ptr<KeyIndex>(
      std::make_unique<IvfIndex>(std::move(lists), std::move(centring), covered, options));
}

Result<std::unique_ptr<KeyIndex>> LoadIvfIndex(const OpenedEnvelope& opened) {
  const Envelope& fields = opened.fields;
  const auto corrupt = [](const char* what) {
    return Error{Code::kCorrupt, std::string("stored index: ") + what + "; rebuild it"};
  };
  const size_t floats_bytes = 2 * size_t{fields.key_dim} * sizeof(float);
  if (fields.covered.begin > fields.covered.end || fields.key_dim == 0 || fields.n_lists == 0 ||
      !GoodFraction(fields.probe_fraction) || opened.payload.size() < floats_bytes) {
    return corrupt("impossible header");
  }
  Centring centring{std::vector<float>(fields.key_dim), std::vector<float>(fields.key_dim)};
  std::memcpy(centring.mean.data(), opened.payload.data(), floats_bytes / 2);
  std::memcpy(centring.error.data(), opened.payload.data() + floats_bytes / 2, floats_bytes / 2);
  if (!AllFinite(centring.mean) || !AllFinite(centring.error)) {
    return corrupt("mean key is not finite");
  }
  PREFIXD_ASSIGN(IvfLists lists,
                 IvfLists::Load(opened.payload.subspan(floats_bytes), fields.covered.size(),
                                fields.key_dim, fields.n_lists));
  return std::unique_ptr<KeyIndex>(
      std::make_unique<IvfIndex>(std::move(lists), std::move(centring), fields.covered,
                                 IvfOptions{fields.n_lists, fields.probe_fraction, fields.seed}));
}

}  // namespace prefixd::index
