#include "index/search/candidates.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "index/ranking/group_rules.h"
#include "index/search/search_request.h"

namespace prefixd::index {

Status BeginSearch(const SearchRequest& request, uint32_t key_dim) {
  PREFIXD_TRY(CheckRequest(request));
  if (request.keys.shape.key_dim != key_dim) {
    return InvalidArgument("search: keys of " + std::to_string(request.keys.shape.key_dim) +
                           " dimensions in an index over " + std::to_string(key_dim));
  }
  if (request.scores) request.scores->clear();
  if (request.selected_keys) request.selected_keys->clear();
  return {};
}

Outside OutsideOf(TokenRange candidates, TokenRange covered) {
  const uint32_t begin = std::clamp(covered.begin, candidates.begin, candidates.end);
  const uint32_t end = std::clamp(covered.end, begin, candidates.end);
  return {{candidates.begin, begin}, {end, candidates.end}};
}

Result<Selection> SelectAmong(const SearchRequest& request, std::span<const uint32_t> proposed,
                              const Outside& outside) {
  const size_t n = proposed.size() + outside.size();
  std::vector<uint32_t> tokens(proposed.begin(), proposed.end());
  std::vector<float> scores(request.group * n);
  PREFIXD_TRY(ScoreTokens(request, proposed, scores, n));
  for (const TokenRange& range : {outside.before, outside.after}) {
    PREFIXD_TRY(ScoreRange(request, range, std::span(scores).subspan(tokens.size()), n));
    const size_t at = tokens.size();
    tokens.resize(at + range.size());
    std::iota(tokens.begin() + ptrdiff_t(at), tokens.end(), range.begin);
  }
  Selection selection = SelectByGroup(request.rule, scores, request.group, static_cast<uint32_t>(n),
                                      request.k, 0, /*scores_complete=*/false);
  for (uint32_t& id : selection.ids) id = tokens[id];
  std::ranges::sort(selection.ids);
  selection.keys_scanned = n;
  selection.bytes_scanned = n * request.keys.shape.key_bytes();
  return selection;
}

}  // namespace prefixd::index
