#include "index/codes_index.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "attention/code_scan.h"
#include "attention/key_codes.h"
#include "index/code_blocks.h"
#include "index/code_ranks.h"
#include "index/code_training.h"
#include "index/search_request.h"
#include "index/stored_codes.h"

namespace prefixd::index {
namespace {

// Codes of tokens `used`, which lie inside what `codes` covers.
struct Part {
  const CodeBook* book = nullptr;
  std::span<const std::byte> codes;
  uint32_t first_token = 0;  // of the first block
  TokenRange used;
};

TokenRange Common(TokenRange a, TokenRange b) {
  const uint32_t begin = std::clamp(a.begin, b.begin, b.end);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

// The candidates that `parts` (ascending, disjoint) leave out.
std::vector<TokenRange> Gaps(TokenRange wanted, std::span<const Part> parts) {
  std::vector<TokenRange> gaps;
  uint32_t at = wanted.begin;
  for (const Part& part : parts) {
    if (part.used.begin > at) gaps.push_back({at, part.used.begin});
    at = part.used.end;
  }
  if (wanted.end > at) gaps.push_back({at, wanted.end});
  return gaps;
}

// Keys whose scores stay in the nearest caches while they are added up.
constexpr size_t kTileBlocks = 4096 / kCodeBlockKeys;

// One pass over the codes of all parts; scores borrow from `queries` and scratch.
Result<std::vector<CodeScores>> Scan(const SearchRequest& request, std::span<const Part> parts,
                                     std::vector<CodeQueries>& queries, HeadMasses& masses,
                                     SearchScratch& scratch) {
  std::vector<CodeScores> scores;
  size_t total = 0;
  for (const Part& part : parts) {
    queries.push_back(
        PrepareCodeQueries(*part.book, request.queries, request.group, request.layer.scale));
    for (uint32_t g = 0; g < request.group; ++g) {
      if (!std::isfinite(queries.back().mul[g]) || !std::isfinite(queries.back().add[g])) {
        return InvalidArgument("search: scores overflow although queries and keys are finite");
      }
    }
    const size_t first = (part.used.begin - part.first_token) / kCodeBlockKeys;
    const size_t ld = (CodeBlocks(part.used.end - part.first_token) - first) * kCodeBlockKeys;
    scores.push_back(
        {nullptr, ld, part.used.size(), part.used.begin, nullptr, request.layer.softcap});
    total += ld * request.group;
  }
  auto& values = scratch.code_scores;
  if (values.size() < total) values.resize(total);
  int16_t* out = values.data();
  for (size_t p = 0; p < parts.size(); ++p) {
    const Part& part = parts[p];
    const CodeQueries& q = queries[p];
    const size_t offset = part.used.begin - part.first_token, block = offset / kCodeBlockKeys;
    CodeScores& of_part = scores[p];
    const size_t skipped = offset % kCodeBlockKeys;  // of the first block
    of_part.values = out + skipped;
    of_part.queries = &q;
    const size_t blocks = of_part.ld / kCodeBlockKeys;
    for (size_t b = 0, done = 0; b < blocks; b += kTileBlocks) {
      const size_t some = std::min(kTileBlocks, blocks - b);
      CodeScan().scan(part.codes.data() + (block + b) * CodeBlockBytes(part.book->key_dim), some,
                      {q.weights.data(), q.bias.data(), q.heads, q.fields},
                      out + b * kCodeBlockKeys, of_part.ld);
      const size_t end = std::min((b + some) * kCodeBlockKeys - skipped, of_part.n);
      masses.Add(of_part, done, end - done);
      done = end;
    }
    out += of_part.ld * request.group;
  }
  return scores;
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

// `parts`: ascending, disjoint.
Result<Selection> Search(const SearchRequest& request, std::span<const Part> all, float effort) {
  PREFIXD_TRY(CheckRequest(request));
  if (request.scores) request.scores->clear();
  if (request.selected_keys) request.selected_keys->clear();
  const TokenRange& wanted = request.candidates;
  std::vector<Part> parts;
  size_t inside = 0;
  for (Part part : all) {
    if (request.keys.shape.key_dim != part.book->key_dim) {
      return InvalidArgument("search: keys of " + std::to_string(request.keys.shape.key_dim) +
                             " dimensions in an index over " + std::to_string(part.book->key_dim));
    }
    part.used = Common(part.used, wanted);
    if (part.used.size() == 0) continue;
    inside += part.used.size();
    parts.push_back(part);
  }
  if (request.k >= wanted.size()) return SelectAll(request);
  const auto short_list = static_cast<uint64_t>(std::ceil(double{effort} * request.k)) + 1;
  // Reading the short list's keys would cost as much as reading all of them.
  if (inside < kMinCodeKeys || short_list >= inside / 2) return SearchExactly(request);
  SearchScratch own;
  SearchScratch& scratch = request.scratch ? *request.scratch : own;

  std::vector<CodeQueries> queries;
  queries.reserve(parts.size());
  HeadMasses masses(request.group);
  PREFIXD_ASSIGN(const std::vector<CodeScores> scores,
                 Scan(request, parts, queries, masses, scratch));
  ShortList(scores, masses, static_cast<uint32_t>(short_list), scratch);

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
  selection.bytes_scanned = n * request.keys.shape.key_bytes();
  for (size_t p = 0; p < parts.size(); ++p) {
    selection.bytes_scanned +=
        scores[p].ld * CodeBytesPerKey(parts[p].book->key_dim) + parts[p].book->bytes();
  }
  return selection;
}

class CodesIndex final : public KeyIndex {
 public:
  CodesIndex(CodeBook book, CodeMemory codes, TokenRange covered)
      : book_(std::move(book)), codes_(std::move(codes)), covered_(covered) {}

  IndexKind kind() const override { return IndexKind::kCodes; }
  TokenRange covered() const override { return covered_; }
  size_t memory_bytes() const override { return book_.bytes() + codes_.bytes().size(); }
  float effort() const override { return effort_; }
  std::vector<float> efforts() const override { return {float{kShortListFactor}, 4, 5, 6.5f, 8}; }
  Status SetEffort(float effort) override {
    if (!(effort >= 1 && effort <= 64)) {
      return InvalidArgument("codes re-rank 1 to 64 times as many keys as they return");
    }
    effort_ = effort;
    return {};
  }
  Result<Selection> Search(const SearchRequest& request) const override {
    const Part part = PartOf(covered_);
    return index::Search(request, {&part, 1}, effort_);
  }
  Result<std::vector<std::byte>> Serialize() const override {
    return SerializeCodes(book_, covered_, codes_.bytes());
  }
  Part PartOf(TokenRange used) const { return {&book_, codes_.bytes(), covered_.begin, used}; }

 private:
  CodeBook book_;
  CodeMemory codes_;
  TokenRange covered_;
  float effort_ = kShortListFactor;
};

class JoinedCodes final : public KeyIndex {
 public:
  explicit JoinedCodes(std::vector<std::unique_ptr<KeyIndex>> indexes, std::vector<Part> parts)
      : indexes_(std::move(indexes)), parts_(std::move(parts)) {}

  IndexKind kind() const override { return IndexKind::kCodes; }
  TokenRange covered() const override {
    return {parts_.front().used.begin, parts_.back().used.end};
  }
  size_t memory_bytes() const override {
    size_t bytes = 0;
    for (const auto& index : indexes_) bytes += index->memory_bytes();
    return bytes;
  }
  // That of its parts which asks for most.
  float effort() const override {
    float most = 1;
    for (const auto& index : indexes_) most = std::max(most, index->effort());
    return most;
  }
  Status SetEffort(float effort) override {
    for (const auto& index : indexes_) PREFIXD_TRY(index->SetEffort(effort));
    return {};
  }
  Result<Selection> Search(const SearchRequest& request) const override {
    return index::Search(request, parts_, effort());
  }
  Result<std::vector<std::byte>> Serialize() const override {
    return Error{Code::kFailedPrecondition, "joined indexes are stored one by one"};
  }

 private:
  std::vector<std::unique_ptr<KeyIndex>> indexes_;  // what parts_ borrow from
  std::vector<Part> parts_;
};

}  // namespace

Result<std::unique_ptr<KeyIndex>> BuildCodesIndex(const RowsView& keys, TokenRange covered,
                                                  const CodesOptions& options) {
  if (covered.begin > covered.end || keys.count != covered.size()) {
    return InvalidArgument("an index over tokens [" + std::to_string(covered.begin) + ", " +
                           std::to_string(covered.end) + ") was given " +
                           std::to_string(keys.count) + " keys");
  }
  if (keys.count < kMinCodeKeys) {
    return InvalidArgument("codes are worth it from " + std::to_string(kMinCodeKeys) +
                           " keys on, not for " + std::to_string(keys.count) +
                           "; use an exact index");
  }
  if (keys.data == nullptr || keys.shape.key_dim == 0 || keys.stride < keys.shape.key_bytes()) {
    return InvalidArgument("an index needs keys: data, dimensions and a stride of a key or more");
  }
  try {
    PREFIXD_ASSIGN(const KeyEncoder encoder, KeyEncoder::Train(keys, options.queries));
    CodeMemory codes(CodeBlocks(keys.count) * CodeBlockBytes(keys.shape.key_dim));
    PREFIXD_TRY(encoder.Encode(keys, codes.bytes()));
    return std::unique_ptr<KeyIndex>(
        std::make_unique<CodesIndex>(encoder.book(), std::move(codes), covered));
  } catch (const std::bad_alloc&) {
    return Error{Code::kResourceExhausted, "not enough memory to build codes"};
  }
}

Result<std::unique_ptr<KeyIndex>> JoinCodesIndexes(std::vector<IndexPart> parts) {
  std::vector<std::unique_ptr<KeyIndex>> indexes;
  std::vector<Part> joined;
  for (IndexPart& part : parts) {
    const auto* codes = dynamic_cast<const CodesIndex*>(part.index.get());
    if (!codes) return InvalidArgument("only indexes of codes can be joined");
    const TokenRange covered = codes->covered();
    if (part.used.begin < covered.begin || part.used.end > covered.end ||
        part.used.begin >= part.used.end ||
        (!joined.empty() && part.used.begin < joined.back().used.end)) {
      return InvalidArgument("joined indexes must ascend and cover what is used of them");
    }
    joined.push_back(codes->PartOf(part.used));
    indexes.push_back(std::move(part.index));
  }
  if (joined.empty()) return InvalidArgument("there is no index to join");
  return std::unique_ptr<KeyIndex>(
      std::make_unique<JoinedCodes>(std::move(indexes), std::move(joined)));
}

Result<std::unique_ptr<KeyIndex>> LoadCodesIndex(const OpenedEnvelope& opened) {
  PREFIXD_ASSIGN(StoredCodes stored, ParseCodes(opened));
  try {
    CodeMemory codes(stored.codes.size());
    std::copy(stored.codes.begin(), stored.codes.end(), codes.bytes().begin());
    return std::unique_ptr<KeyIndex>(std::make_unique<CodesIndex>(
        std::move(stored.book), std::move(codes), opened.fields.covered));
  } catch (const std::bad_alloc&) {
    return Error{Code::kResourceExhausted, "not enough memory for codes"};
  }
}

}  // namespace prefixd::index
