#include "index/code_search.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "attention/code_scan.h"
#include "index/code_ranks.h"
#include "index/search_pass.h"

namespace prefixd::index {
namespace {

TokenRange Common(TokenRange a, TokenRange b) {
  const uint32_t begin = std::clamp(a.begin, b.begin, b.end);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

// The candidates that `parts` (ascending, disjoint) leave out.
std::vector<TokenRange> Gaps(TokenRange wanted, std::span<const CodePart> parts) {
  std::vector<TokenRange> gaps;
  uint32_t at = wanted.begin;
  for (const CodePart& part : parts) {
    if (part.used.begin > at) gaps.push_back({at, part.used.begin});
    at = part.used.end;
  }
  if (wanted.end > at) gaps.push_back({at, wanted.end});
  return gaps;
}

// Keys whose scores stay in the nearest caches while they are added up.
constexpr size_t kTileBlocks = 4096 / kCodeBlockKeys;

// One request's part in a pass over the codes.
struct Scanning {
  Scanning(const SearchRequest& r, uint32_t list)
      : request(&r), short_list(list), masses(r.group) {}
  const SearchRequest* request;
  uint32_t short_list;
  std::vector<CodeQueries> queries;  // of each part
  std::vector<CodeScores> scores;    // likewise; borrow from `queries` and the pass's buffer
  HeadMasses masses;
};

// What becomes of `request` in a scan of `parts`, but for the scores themselves.
Result<Scanning> Prepare(const SearchRequest& request, uint32_t short_list,
                         std::span<const CodePart> parts) {
  Scanning scanning(request, short_list);
  for (const CodePart& part : parts) {
    scanning.queries.push_back(
        PrepareCodeQueries(*part.book, request.queries, request.group, request.layer.scale));
    const CodeQueries& q = scanning.queries.back();
    for (uint32_t g = 0; g < request.group; ++g) {
      if (!std::isfinite(q.mul[g]) || !std::isfinite(q.add[g])) {
        return InvalidArgument("search: scores overflow although queries and keys are finite");
      }
    }
    const size_t first = (part.used.begin - part.first_token) / kCodeBlockKeys;
    const size_t ld = (CodeBlocks(part.used.end - part.first_token) - first) * kCodeBlockKeys;
    scanning.scores.push_back(
        {nullptr, ld, part.used.size(), part.used.begin, nullptr, request.layer.softcap});
  }
  return scanning;
}

// One pass over the codes of all parts, for all of `pass`: a tile is scored for one after the
// other while it is in cache.
void Scan(std::span<const CodePart> parts, std::span<Scanning> pass, std::vector<int16_t>& values) {
  size_t total = 0;
  for (const Scanning& scanning : pass) {
    for (const CodeScores& of_part : scanning.scores) {
      total += of_part.ld * scanning.request->group;
    }
  }
  if (values.size() < total) values.resize(total);
  int16_t* out = values.data();
  for (size_t p = 0; p < parts.size(); ++p) {
    const CodePart& part = parts[p];
    const size_t offset = part.used.begin - part.first_token, block = offset / kCodeBlockKeys;
    const size_t skipped = offset % kCodeBlockKeys;  // of the first block
    for (Scanning& scanning : pass) {
      CodeScores& of_part = scanning.scores[p];
      of_part.values = out + skipped;
      of_part.queries = &scanning.queries[p];
      out += of_part.ld * scanning.request->group;
    }
    const size_t blocks = pass.front().scores[p].ld / kCodeBlockKeys;
    for (size_t b = 0, done = 0; b < blocks; b += kTileBlocks) {
      const size_t some = std::min(kTileBlocks, blocks - b);
      const std::byte* tile = part.codes.data() + (block + b) * CodeBlockBytes(part.book->key_dim);
      const size_t end = std::min<size_t>((b + some) * kCodeBlockKeys - skipped, part.used.size());
      for (Scanning& scanning : pass) {
        const CodeScores& of_part = scanning.scores[p];
        const CodeQueries& q = scanning.queries[p];
        int16_t* tile_out = values.data() + (of_part.values - values.data()) - skipped;
        CodeScan().scan(tile, some, {q.weights.data(), q.bias.data(), q.heads, q.fields},
                        tile_out + b * kCodeBlockKeys, of_part.ld);
        scanning.masses.Add(of_part, done, end - done);
      }
      done = end;
    }
  }
}

// Every candidate's score as the search saw it: by its code, or exact.
//   ids: those with exact scores, `exact` [G][ids.size()]
void AllScores(const SearchRequest& request, std::span<const CodeScores> parts,
               std::span<const uint32_t> ids, std::span<const float> exact) {
  const size_t n = request.candidates.size();
  request.scores->resize(request.group * n);
  for (uint32_t g = 0; g < request.group; ++g) {
    float* out = request.scores->data() + g * n;
    for (const CodeScores& part : parts) {
      float* of_part = out + (part.first_token - request.candidates.begin);
      for (size_t i = 0; i < part.n; ++i) of_part[i] = static_cast<float>(part.Score(g, i));
    }
    for (size_t j = 0; j < ids.size(); ++j) {
      out[ids[j] - request.candidates.begin] = exact[g * ids.size() + j];
    }
  }
}

// Of the short list `listed`, whose keys scratch holds as the reader gave them.
void KeepSelectedKeys(const SearchRequest& request, std::span<const uint32_t> listed,
                      std::span<const uint32_t> selected) {
  if (!request.reader || !request.scratch) return;
  const size_t key_bytes = request.keys.shape.key_bytes();
  request.selected_keys->resize(selected.size() * key_bytes);
  size_t from = 0;
  for (size_t i = 0; i < selected.size(); ++i) {
    while (listed[from] != selected[i]) ++from;
    std::memcpy(request.selected_keys->data() + i * key_bytes,
                request.scratch->keys.data() + from * key_bytes, key_bytes);
  }
}

// From the scores of a scan of `parts` to the selection.
//   code_bytes: of codes and books, what this request pays for
Result<Selection> Finish(Scanning& scanning, std::span<const CodePart> parts, uint64_t code_bytes) {
  const SearchRequest& request = *scanning.request;
  const TokenRange& wanted = request.candidates;
  const std::vector<CodeScores>& scores = scanning.scores;
  HeadMasses& masses = scanning.masses;
  SearchScratch own;
  SearchScratch& scratch = request.scratch ? *request.scratch : own;
  ShortList(scores, masses, scanning.short_list, scratch);

  // Appended tokens, and others without codes, exactly.
  const std::vector<TokenRange> gaps = Gaps(wanted, parts);
  auto& ids = scratch.ids;
  const size_t listed = ids.size();
  for (const TokenRange& gap : gaps) {
    for (uint32_t t = gap.begin; t < gap.end; ++t) ids.push_back(t);
  }
  const size_t n = ids.size();
  auto& exact = scratch.scores;
  if (exact.size() < request.group * n) exact.resize(request.group * n);
  size_t column = listed;
  for (const TokenRange& gap : gaps) {
    PREFIXD_TRY(ScoreRange(request, gap, std::span(exact).subspan(column), n));
    column += gap.size();
  }
  // Last, so that scratch keeps these keys.
  PREFIXD_TRY(ScoreTokens(request, std::span<const uint32_t>(ids).first(listed), exact, n));
  const auto truth = std::span<const float>(exact).first(request.group * n);
  masses.Correct(scores, std::span<const uint32_t>(ids).first(listed), truth, n);

  if (request.scores) AllScores(request, scores, ids, truth);

  Selection selection =
      SelectByGroup(request.rule, truth, request.group, static_cast<uint32_t>(n), request.k, 0,
                    /*scores_complete=*/false, masses.LogSumExp());
  for (uint32_t& id : selection.ids) id = ids[id];
  std::sort(selection.ids.begin(), selection.ids.end());
  if (request.selected_keys && gaps.empty()) KeepSelectedKeys(request, ids, selection.ids);
  selection.keys_scanned = wanted.size();
  selection.bytes_scanned = n * request.keys.shape.key_bytes() + code_bytes;
  return selection;
}

// What of `all` the candidates can be in; kInvalidArgument when the keys do not fit.
Result<std::vector<CodePart>> PartsIn(const SearchRequest& request, std::span<const CodePart> all) {
  std::vector<CodePart> parts;
  for (CodePart part : all) {
    if (request.keys.shape.key_dim != part.book->key_dim) {
      return InvalidArgument("search: keys of " + std::to_string(request.keys.shape.key_dim) +
                             " dimensions in an index over " + std::to_string(part.book->key_dim));
    }
    part.used = Common(part.used, request.candidates);
    if (part.used.size() > 0) parts.push_back(part);
  }
  return parts;
}

// `pass`: of requests with equal candidates, by short list. Leaves their selections.
void SearchPass(std::span<const SearchRequest> requests, std::span<const size_t> pass,
                std::span<const CodePart> all, std::span<const uint32_t> short_lists,
                std::span<Result<Selection>> selections) {
  const SearchRequest& first = requests[pass.front()];
  const std::vector<CodePart> parts = *PartsIn(first, all);  // checked before
  std::vector<Scanning> scans;
  std::vector<size_t> of_scan;
  scans.reserve(pass.size());
  for (const size_t r : pass) {
    auto prepared = Prepare(requests[r], short_lists[r], parts);
    if (!prepared.ok()) {
      selections[r] = std::move(prepared).error();
      continue;
    }
    scans.push_back(*std::move(prepared));
    of_scan.push_back(r);
  }
  if (scans.empty()) return;
  std::vector<int16_t> own;
  Scan(parts, scans, first.scratch ? first.scratch->code_scores : own);
  uint64_t bytes = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    bytes += scans.front().scores[p].ld * CodeBytesPerKey(parts[p].book->key_dim) +
             parts[p].book->bytes();
  }
  for (size_t i = 0; i < scans.size(); ++i) {
    selections[of_scan[i]] = Finish(scans[i], parts, ShareOf(bytes, scans.size(), i));
  }
}

}  // namespace

std::vector<Result<Selection>> SearchCodes(std::span<const SearchRequest> requests,
                                           std::span<const CodePart> all, float effort) {
  std::vector<Result<Selection>> selections;
  std::vector<size_t> by_codes, by_keys;
  std::vector<uint32_t> short_lists(requests.size());
  for (size_t r = 0; r < requests.size(); ++r) {
    const SearchRequest& request = requests[r];
    selections.emplace_back(Selection{});
    if (const Status status = CheckRequest(request); !status.ok()) {
      selections[r] = status.error();
      continue;
    }
    const auto parts = PartsIn(request, all);
    if (!parts.ok()) {
      selections[r] = parts.error();
      continue;
    }
    if (request.scores) request.scores->clear();
    if (request.selected_keys) request.selected_keys->clear();
    size_t inside = 0;
    for (const CodePart& part : *parts) inside += part.used.size();
    const auto short_list = static_cast<uint64_t>(std::ceil(double{effort} * request.k)) + 1;
    if (request.k >= request.candidates.size()) {
      selections[r] = SelectAll(request);
    } else if (inside < kMinCodeKeys || short_list >= inside / 2) {
      // Reading the short list's keys would cost as much as reading all of them.
      by_keys.push_back(r);
    } else {
      short_lists[r] = static_cast<uint32_t>(short_list);
      by_codes.push_back(r);
    }
  }
  SearchExactly(requests, by_keys, selections);
  for (const auto& pass : Passes(requests, by_codes, sizeof(int16_t))) {
    SearchPass(requests, pass, all, short_lists, selections);
  }
  return selections;
}

}  // namespace prefixd::index
