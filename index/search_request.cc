#include "index/search_request.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "attention/step.h"

namespace prefixd::index {

namespace {

Status CheckFiniteQueries(const SearchRequest& request) {
  const uint32_t dim = request.keys.shape.key_dim;
  for (size_t i = 0; i < request.queries.size(); ++i) {
    if (!std::isfinite(request.queries[i])) {
      return InvalidArgument("query head " + std::to_string(i / dim) + " of " +
                             std::to_string(request.group) + ": element " +
                             std::to_string(i % dim) + " is NaN or infinite");
    }
  }
  return {};
}

}  // namespace

Status CheckRequest(const SearchRequest& request) {
  const RowsView& keys = request.keys;
  const TokenRange& wanted = request.candidates;
  if (request.group == 0) return InvalidArgument("search needs at least one query head");
  if (keys.shape.key_dim == 0) return InvalidArgument("search: keys have no dimensions");
  if (request.queries.size() != size_t{request.group} * keys.shape.key_dim) {
    return InvalidArgument("search: " + std::to_string(request.queries.size()) +
                           " query elements, expected " + std::to_string(request.group) +
                           " heads of " + std::to_string(keys.shape.key_dim));
  }
  if (!std::isfinite(request.layer.scale) || !(request.layer.softcap >= 0) ||
      !std::isfinite(request.layer.softcap)) {
    return InvalidArgument("search: scale and softcap must be finite, softcap not negative");
  }
  if (wanted.begin > wanted.end) {
    return InvalidArgument("search: candidates end at " + std::to_string(wanted.end) +
                           ", before their begin " + std::to_string(wanted.begin));
  }
  if (wanted.size() != 0) {
    const uint64_t keys_end = uint64_t{request.first_token} + keys.count;
    if (keys.data == nullptr || wanted.begin < request.first_token || wanted.end > keys_end) {
      return InvalidArgument("search: candidates [" + std::to_string(wanted.begin) + ", " +
                             std::to_string(wanted.end) + ") are not covered by the keys of [" +
                             std::to_string(request.first_token) + ", " + std::to_string(keys_end) +
                             ")");
    }
    if (keys.stride < keys.shape.key_bytes()) {
      return InvalidArgument("search: key stride " + std::to_string(keys.stride) +
                             " is less than a key of " + std::to_string(keys.shape.key_bytes()) +
                             " bytes");
    }
  }
  return CheckFiniteQueries(request);
}

Selection SelectAll(const SearchRequest& request) {
  Selection all;
  all.ids.resize(request.candidates.size());
  std::iota(all.ids.begin(), all.ids.end(), request.candidates.begin);
  all.cuts.assign(request.group, {-std::numeric_limits<float>::infinity(), CutKind::kExact});
  return all;
}

RowsView KeysOf(const SearchRequest& request, TokenRange tokens) {
  return request.keys.Sub(tokens.begin - request.first_token, tokens.size());
}

bool AllFinite(std::span<const float> scores) {
  // x * 0 is 0 for finite x and NaN otherwise: a sum without branches.
  float sum = 0;
  for (const float score : scores) sum += score * 0.0f;
  return sum == 0.0f;
}

Error ExplainNonFiniteKeys(const RowsView& keys, uint32_t first_token) {
  std::vector<float> key(keys.shape.key_dim);
  for (size_t i = 0; i < keys.count; ++i) {
    ToFloat(keys.shape.dtype, keys.key(i), key);
    if (!AllFinite(key)) {
      return InvalidArgument("search: the key of token " + std::to_string(first_token + i) +
                             " is NaN or infinite");
    }
  }
  return InvalidArgument("search: scores overflow although queries and keys are finite");
}

Result<Selection> SearchExactly(const SearchRequest& request) {
  const uint32_t n = request.candidates.size();
  if (request.scores) request.scores->clear();
  if (request.k >= n) return SelectAll(request);
  const RowsView keys = KeysOf(request, request.candidates);
  std::vector<float> scores(size_t{request.group} * n);
  Scores(request.queries, request.group, request.layer, keys, scores);
  if (!AllFinite(scores)) return ExplainNonFiniteKeys(keys, request.candidates.begin);
  Selection selection = SelectByGroupMax(scores, request.group, n, request.k,
                                         request.candidates.begin, /*scores_complete=*/true);
  selection.keys_scanned = n;
  selection.bytes_scanned = uint64_t{n} * keys.shape.key_bytes();
  if (request.scores) *request.scores = std::move(scores);
  return selection;
}

}  // namespace prefixd::index
