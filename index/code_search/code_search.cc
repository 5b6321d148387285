#include "index/code_search/code_search.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "index/code_search/all_scores.h"
#include "index/code_search/code_ranks.h"
#include "index/codes/code_scan.h"
#include "index/ranking/group_ranking.h"
#include "index/search/search_pass.h"

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

// Blocks whose scores stay in the nearest caches while they are added up.
constexpr size_t kTileBlocks = 4096 / kCodeBlockKeys;

// Keys that fall short of the k-th best by no more than so many deviations of what their codes miss
// are re-ranked, up to so many times k.
constexpr float kMargin = 2.6f;
constexpr uint32_t kLongestShortList = 8;

// One request's part in a pass over the codes.
struct Scanning {
  explicit Scanning(const SearchRequest& r) : request(&r), masses(r.group) {}
  const SearchRequest* request;
  size_t longest = 0;  // of short lists
  std::vector<PartScan> of_parts;
  std::vector<CodeScores> scores;  // of each part; borrow from `of_parts` and the pass's buffer
  std::vector<size_t> done;        // blocks of each part that are scored
  HeadMasses masses;
};

// What of `parts` a scan for `request` looks at.
Result<Scanning> Prepare(const SearchRequest& request, std::span<const CodePart> parts,
                         float effort) {
  Scanning scanning(request);
  SearchScratch own;
  SearchScratch& scratch = request.scratch ? *request.scratch : own;
  size_t inside = 0;
  for (const CodePart& part : parts) {
    inside += part.used.size();
    PREFIXD_ASSIGN(PartScan scan, PreparePart(request, part, scratch));
    for (float& error : scan.queries.error) error *= kMargin * effort;
    scanning.of_parts.push_back(std::move(scan));
  }
  scanning.longest = std::min(size_t{kLongestShortList} * request.k + 1, inside / 2);
  scanning.done.assign(parts.size(), 0);
  return scanning;
}

// Marks what is scanned of a block but not searched; returns how many keys that are.
size_t Mask(const CodePart& part, uint32_t block, uint32_t heads, int16_t* out, size_t ld) {
  size_t none = 0;
  for (uint32_t j = 0; j < kCodeBlockKeys; ++j) {
    if (part.uses((part.first_block() + block) * kCodeBlockKeys + j)) continue;
    for (uint32_t g = 0; g < heads; ++g) out[g * ld + j] = kNoScore;
    ++none;
  }
  return none;
}

// Scores what `scanning` looks at of part p's blocks before `end`, counted from its first, `out`
// being its values.
void ScanTile(const CodePart& part, size_t p, size_t end, Scanning& scanning, int16_t* out) {
  const PartScan& scan = scanning.of_parts[p];
  const CodeScores& of_part = scanning.scores[p];
  const CodeQueries& q = scan.queries.keys;
  const uint32_t heads = q.heads;
  const size_t begin = scanning.done[p];
  size_t& done = scanning.done[p];
  while (done < scan.blocks.size() && scan.blocks[done] < end) ++done;
  if (done == begin) return;
  CodeScan().scan(
      part.codes.codes + part.first_block() * CodeBlockBytes(part.book->keys.key_dim),
      scan.blocks.data() + begin, done - begin,
      {q.weights.data(), q.bias.data(), heads, q.fields, scan.bias.data(), scan.ld_bias},
      out + begin * kCodeBlockKeys, of_part.ld);
  size_t none = 0;
  for (size_t j = begin; j < done; ++j) {
    if (scan.used[j] == kCodeBlockKeys) continue;
    none += Mask(part, scan.blocks[j], heads, out + j * kCodeBlockKeys, of_part.ld);
  }
  scanning.masses.Add(of_part, begin * kCodeBlockKeys, (done - begin) * kCodeBlockKeys, none);
}

// One pass over the codes of all parts, for all of `pass`: a tile is scored for one after the
// other while it is in cache.
void Scan(std::span<const CodePart> parts, std::span<Scanning> pass, std::vector<int16_t>& values) {
  size_t total = 0;
  for (const Scanning& scanning : pass) {
    for (const PartScan& scan : scanning.of_parts) {
      total += scan.blocks.size() * kCodeBlockKeys * scanning.request->group;
    }
  }
  if (values.size() < total) values.resize(total);
  int16_t* out = values.data();
  std::vector<int16_t*> of_scan(pass.size());
  for (size_t p = 0; p < parts.size(); ++p) {
    for (size_t i = 0; i < pass.size(); ++i) {
      Scanning& scanning = pass[i];
      const PartScan& scan = scanning.of_parts[p];
      const size_t ld = scan.blocks.size() * kCodeBlockKeys;
      scanning.scores.push_back({out, ld, ld, &scan.queries.keys, scanning.request->layer.softcap,
                                 scan.blocks, parts[p].first_block(), &parts[p].codes,
                                 parts[p].first_token, scan.queries.error});
      of_scan[i] = out;
      out += ld * scanning.request->group;
    }
    const size_t end = parts[p].end_block() - parts[p].first_block();
    for (size_t b = 0; b < end; b += kTileBlocks) {
      for (size_t i = 0; i < pass.size(); ++i) {
        ScanTile(parts[p], p, std::min(b + kTileBlocks, end), pass[i], of_scan[i]);
      }
    }
  }
}

// Of codes, means and books, what a pass reads.
uint64_t BytesOf(std::span<const CodePart> parts, std::span<const Scanning> pass) {
  uint64_t bytes = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    const CodePart& part = parts[p];
    // The candidates are equal, and so are the blocks.
    const size_t blocks = pass.front().of_parts[p].blocks.size();
    const size_t windows = part.end_window() - part.first_window();
    bytes += part.book->bytes() + (blocks + windows) * CodeBlockBytes(part.book->keys.key_dim);
  }
  return bytes;
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
  const std::vector<ListedPart> places = ShortList(
      scores, masses, request.k, static_cast<uint32_t>(scanning.longest), wanted, scratch);

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
  size_t drawn = 0;
  if (request.scores) {
    PREFIXD_ASSIGN(drawn, ScoresByCodes(request, scores, ids));
  }
  // Last, so that scratch keeps these keys.
  PREFIXD_TRY(ScoreTokens(request, std::span<const uint32_t>(ids).first(listed), exact, n));
  const auto truth = std::span<const float>(exact).first(request.group * n);
  masses.Correct(scores, places, truth, n);

  if (request.scores) PutExactScores(request, ids, truth);

  Selection selection =
      SelectByGroupMax(truth, request.group, static_cast<uint32_t>(n), request.k, 0,
                       /*scores_complete=*/false, masses.LogSumExp());
  for (uint32_t& id : selection.ids) id = ids[id];
  if (!gaps.empty()) std::sort(selection.ids.begin(), selection.ids.end());
  if (request.selected_keys && gaps.empty()) KeepSelectedKeys(request, ids, selection.ids);
  selection.keys_scanned = n - listed;
  for (const PartScan& scan : scanning.of_parts) {
    for (const uint16_t keys : scan.used) selection.keys_scanned += keys;
  }
  selection.bytes_scanned =
      (n + drawn) * request.keys.shape.key_bytes() + listed * sizeof(uint16_t) + code_bytes;
  return selection;
}

// What of `all` the candidates can be in; kInvalidArgument when the keys do not fit.
Result<std::vector<CodePart>> PartsIn(const SearchRequest& request, std::span<const CodePart> all) {
  std::vector<CodePart> parts;
  for (CodePart part : all) {
    if (request.keys.shape.key_dim != part.book->keys.key_dim) {
      return InvalidArgument("search: keys of " + std::to_string(request.keys.shape.key_dim) +
                             " dimensions in an index over " +
                             std::to_string(part.book->keys.key_dim));
    }
    part.used = Common(part.used, request.candidates);
    if (part.used.size() > 0) parts.push_back(part);
  }
  return parts;
}

// `pass`: of requests with equal candidates. Leaves their selections.
void SearchPass(std::span<const SearchRequest> requests, std::span<const size_t> pass,
                std::span<const CodePart> all, float effort,
                std::span<Result<Selection>> selections) {
  const SearchRequest& first = requests[pass.front()];
  const std::vector<CodePart> parts = *PartsIn(first, all);  // checked before
  std::vector<Scanning> scans;
  std::vector<size_t> of_scan;
  scans.reserve(pass.size());
  for (const size_t r : pass) {
    auto prepared = Prepare(requests[r], parts, effort);
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
  const uint64_t bytes = BytesOf(parts, scans);
  for (size_t i = 0; i < scans.size(); ++i) {
    selections[of_scan[i]] = Finish(scans[i], parts, ShareOf(bytes, scans.size(), i));
  }
}

}  // namespace

std::vector<Result<Selection>> SearchCodes(std::span<const SearchRequest> requests,
                                           std::span<const CodePart> all, float effort) {
  std::vector<Result<Selection>> selections;
  std::vector<size_t> by_codes, by_keys;
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
    const uint64_t usual = uint64_t{kShortListFactor} * request.k + 1;
    if (request.k >= request.candidates.size()) {
      selections[r] = SelectAll(request);
    } else if (inside < kMinCodeKeys || usual >= inside / 2) {
      // Reading the short list's keys would cost as much as reading all of them.
      by_keys.push_back(r);
    } else {
      by_codes.push_back(r);
    }
  }
  SearchExactly(requests, by_keys, selections);
  for (const auto& pass : Passes(requests, by_codes, sizeof(int16_t))) {
    SearchPass(requests, pass, all, effort, selections);
  }
  return selections;
}

}  // namespace prefixd::index
