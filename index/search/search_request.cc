#include "index/search/search_request.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "attention/step/step.h"

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
    if (request.reader) return CheckFiniteQueries(request);
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

bool AllFinite(std::span<const float> scores) {
  // x * 0 is 0 for finite x and NaN otherwise: sums without branches, in lanes.
  constexpr size_t kLanes = 16;
  float sums[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= scores.size(); i += kLanes) {
    for (size_t l = 0; l < kLanes; ++l) sums[l] += scores[i + l] * 0.0f;
  }
  for (; i < scores.size(); ++i) sums[0] += scores[i] * 0.0f;
  for (size_t l = 1; l < kLanes; ++l) sums[0] += sums[l];
  return sums[0] == 0.0f;
}

namespace {

constexpr uint32_t kRunTokens = 4096;

// `keys` holds the rows of tokens that `token_of` names.
template <typename TokenOf>
Error ExplainNonFinite(const RowsView& keys, const TokenOf& token_of) {
  std::vector<float> key(keys.shape.key_dim);
  for (size_t i = 0; i < keys.count; ++i) {
    ToFloat(keys.shape.dtype, keys.key(i), key);
    if (!AllFinite(key)) {
      return InvalidArgument("search: the key of token " + std::to_string(token_of(i)) +
                             " is NaN or infinite");
    }
  }
  return InvalidArgument("search: scores overflow although queries and keys are finite");
}

// Scores of `keys` into columns [0, keys.count) of `scores`.
template <typename TokenOf>
Status ScoreRows(const SearchRequest& request, const RowsView& keys, std::span<float> scores,
                 size_t ld, const TokenOf& token_of) {
  Scores(request.queries, request.group, request.layer, keys, scores, ld);
  for (uint32_t g = 0; keys.count > 0 && g < request.group; ++g) {
    if (!AllFinite(scores.subspan(g * ld, keys.count))) return ExplainNonFinite(keys, token_of);
  }
  return {};
}

}  // namespace

Status ForEachRun(const SearchRequest& request, TokenRange tokens, uint32_t most,
                  const std::function<Status(const RowsView&, uint32_t)>& body) {
  const RowShape shape{request.keys.shape.key_dim, 0, request.keys.shape.dtype};
  std::vector<std::byte> own;
  std::vector<std::byte>& bytes = request.scratch ? request.scratch->keys : own;
  for (uint32_t at = tokens.begin, end = 0; at < tokens.end; at = end) {
    end = std::min(tokens.end, at + most);
    RowsView keys;
    if (request.reader) {
      end = std::min(tokens.end, request.reader->RunEnd(at, most));
      bytes.resize((end - at) * shape.bytes());
      PREFIXD_TRY(request.reader->Range({at, end}, bytes));
      keys = {bytes.data(), end - at, shape.bytes(), shape};
    } else {
      keys = request.keys.Sub(at - request.first_token, end - at);
    }
    PREFIXD_TRY(body(keys, at));
  }
  return {};
}

Status ScoreKeys(const SearchRequest& request, const RowsView& keys, uint32_t first,
                 std::span<float> scores, size_t ld) {
  return ScoreRows(request, keys, scores, ld, [first](size_t i) { return first + i; });
}

Status ScoreRange(const SearchRequest& request, TokenRange tokens, std::span<float> scores,
                  size_t ld) {
  return ForEachRun(request, tokens, kRunTokens, [&](const RowsView& keys, uint32_t first) {
    return ScoreKeys(request, keys, first, scores.subspan(first - tokens.begin), ld);
  });
}

Status ScoreTokens(const SearchRequest& request, std::span<const uint32_t> tokens,
                   std::span<float> scores, size_t ld) {
  const RowShape shape{request.keys.shape.key_dim, 0, request.keys.shape.dtype};
  const size_t key_bytes = shape.bytes();
  std::vector<std::byte> own;
  std::vector<std::byte>& bytes = request.scratch ? request.scratch->keys : own;
  if (request.reader) {
    bytes.resize(std::max(bytes.size(), tokens.size() * key_bytes));
    PREFIXD_TRY(request.reader->Gather(tokens, std::span(bytes).first(tokens.size() * key_bytes)));
    return ScoreRows(request, {bytes.data(), tokens.size(), key_bytes, shape}, scores, ld,
                     [tokens](size_t i) { return tokens[i]; });
  }
  // Where they lie.
  std::vector<RowRef> no_refs;
  std::vector<RowRef>& refs = request.scratch ? request.scratch->refs : no_refs;
  refs.resize(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    refs[i] = {request.keys.key(tokens[i] - request.first_token), nullptr};
  }
  return ScoreRows(request, ScatteredRows(refs, shape), scores, ld,
                   [tokens](size_t i) { return tokens[i]; });
}

}  // namespace prefixd::index
