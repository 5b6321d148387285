#include "index/search/search_pass.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "index/ranking/group_ranking.h"

namespace prefixd::index {
namespace {

// Keys that stay in the second-level cache while every request of a pass scores them.
constexpr uint32_t kRunKeys = 1024;
// Alone, longer runs cost fewer calls.
constexpr uint32_t kLongRunKeys = 4096;

bool SameKeys(const SearchRequest& a, const SearchRequest& b) {
  const auto layout = [](const SearchRequest& r) {
    return std::tuple(r.keys.shape.key_dim, r.keys.shape.dtype, r.keys.data, r.keys.refs,
                      r.keys.count, r.keys.stride, r.first_token, r.reader);
  };
  return layout(a) == layout(b);
}

void ExactPass(std::span<const SearchRequest> requests, std::span<const size_t> pass,
               std::span<Result<Selection>> selections) {
  const SearchRequest& first = requests[pass.front()];
  const uint32_t n = first.candidates.size();
  size_t heads = 0;
  for (const size_t r : pass) heads += requests[r].group;
  std::vector<float> own;
  std::vector<float>& scores = first.scratch ? first.scratch->scores : own;
  if (scores.size() < heads * n) scores.resize(heads * n);
  std::vector<Status> failed(pass.size());
  const auto score = [&](const RowsView& keys, uint32_t at) -> Status {
    size_t done = 0;  // heads
    for (size_t i = 0; i < pass.size(); ++i) {
      const SearchRequest& request = requests[pass[i]];
      const auto out = std::span(scores).subspan(done * n + (at - first.candidates.begin));
      if (failed[i].ok()) failed[i] = ScoreKeys(request, keys, at, out, n);
      done += request.group;
    }
    return {};
  };
  const Status read =
      ForEachRun(first, first.candidates, pass.size() > 1 ? kRunKeys : kLongRunKeys, score);
  size_t done = 0;
  for (size_t i = 0; i < pass.size(); ++i) {
    const SearchRequest& request = requests[pass[i]];
    const auto mine = std::span<const float>(scores).subspan(done * n, request.group * n);
    done += request.group;
    if (!read.ok() || !failed[i].ok()) {
      selections[pass[i]] = failed[i].ok() ? read.error() : std::move(failed[i]).error();
      continue;
    }
    Selection selection =
        SelectByGroupMax(mine, request.group, n, request.k, first.candidates.begin,
                         /*scores_complete=*/true);
    selection.keys_scanned = n;
    selection.bytes_scanned = ShareOf(uint64_t{n} * request.keys.shape.key_bytes(), pass.size(), i);
    if (request.scores) request.scores->assign(mine.begin(), mine.end());
    selections[pass[i]] = std::move(selection);
  }
}

}  // namespace

std::vector<std::vector<size_t>> Passes(std::span<const SearchRequest> requests,
                                        std::span<const size_t> wanted, size_t score_bytes) {
  std::vector<std::vector<size_t>> passes;
  std::vector<size_t> bytes;  // of each pass
  for (const size_t r : wanted) {
    const SearchRequest& request = requests[r];
    const size_t more = request.group * request.candidates.size() * score_bytes;
    size_t p = 0;
    for (; p < passes.size(); ++p) {
      const SearchRequest& other = requests[passes[p].front()];
      if (bytes[p] + more <= kPassBytes && request.candidates == other.candidates &&
          SameKeys(request, other)) {
        break;
      }
    }
    if (p == passes.size()) passes.emplace_back(), bytes.push_back(0);
    passes[p].push_back(r);
    bytes[p] += more;
  }
  return passes;
}

void SearchExactly(std::span<const SearchRequest> requests, std::span<const size_t> wanted,
                   std::span<Result<Selection>> selections) {
  std::vector<size_t> scored;
  for (const size_t r : wanted) {
    const SearchRequest& request = requests[r];
    if (request.scores) request.scores->clear();
    if (request.selected_keys) request.selected_keys->clear();
    if (request.k >= request.candidates.size()) {
      selections[r] = SelectAll(request);
    } else {
      scored.push_back(r);
    }
  }
  for (const auto& pass : Passes(requests, scored, sizeof(float))) {
    ExactPass(requests, pass, selections);
  }
}

Result<Selection> SearchExactly(const SearchRequest& request) {
  Result<Selection> selection = Selection{};
  constexpr size_t kIt = 0;
  SearchExactly({&request, 1}, {&kIt, 1}, {&selection, 1});
  return selection;
}

std::vector<Result<Selection>> SearchAllExactly(std::span<const SearchRequest> requests) {
  std::vector<Result<Selection>> selections;
  std::vector<size_t> sound;
  for (size_t r = 0; r < requests.size(); ++r) {
    const Status status = CheckRequest(requests[r]);
    if (status.ok()) sound.push_back(r);
    selections.push_back(status.ok() ? Result<Selection>(Selection{}) : status.error());
  }
  SearchExactly(requests, sound, selections);
  return selections;
}

}  // namespace prefixd::index
