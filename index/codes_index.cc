#include "index/codes_index.h"

#include <algorithm>
#include <cmath>
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

class CodesIndex final : public KeyIndex {
 public:
  CodesIndex(CodeBook book, CodeMemory codes, TokenRange covered)
      : book_(std::move(book)), codes_(std::move(codes)), covered_(covered) {}

  IndexKind kind() const override { return IndexKind::kCodes; }
  TokenRange covered() const override { return covered_; }
  Result<Selection> Search(const SearchRequest& request) const override;
  Result<std::vector<std::byte>> Serialize() const override {
    return SerializeCodes(book_, covered_, codes_.bytes());
  }

 private:
  // The codes' scores of tokens `inside`; what holds them begins at the block of inside.begin.
  CodeScores Scan(const SearchRequest& request, const CodeQueries& queries, TokenRange inside,
                  SearchScratch& scratch) const;

  CodeBook book_;
  CodeMemory codes_;
  TokenRange covered_;
};

CodeScores CodesIndex::Scan(const SearchRequest& request, const CodeQueries& queries,
                            TokenRange inside, SearchScratch& scratch) const {
  const size_t first = inside.begin - covered_.begin, last = inside.end - covered_.begin;
  const size_t block = first / kCodeBlockKeys, n_blocks = CodeBlocks(last) - block;
  const size_t ld = n_blocks * kCodeBlockKeys;
  auto& values = scratch.code_scores;
  if (values.size() < request.group * ld) values.resize(request.group * ld);
  CodeScan().scan(codes_.bytes().data() + block * CodeBlockBytes(book_.key_dim), n_blocks,
                  {queries.weights.data(), queries.bias.data(), queries.heads, queries.fields},
                  values.data(), ld);
  return {values.data() + (first - block * kCodeBlockKeys), ld, inside.size(), &queries,
          request.layer.softcap};
}

Result<Selection> CodesIndex::Search(const SearchRequest& request) const {
  PREFIXD_TRY(CheckRequest(request));
  if (request.scores) request.scores->clear();
  const TokenRange& wanted = request.candidates;
  if (request.keys.shape.key_dim != book_.key_dim) {
    return InvalidArgument("search: keys of " + std::to_string(request.keys.shape.key_dim) +
                           " dimensions in an index over " + std::to_string(book_.key_dim));
  }
  if (request.scores) request.scores->clear();
  if (request.k >= wanted.size()) return SelectAll(request);
  const TokenRange inside{std::clamp(covered_.begin, wanted.begin, wanted.end),
                          std::clamp(covered_.end, wanted.begin, wanted.end)};
  const uint64_t short_list = uint64_t{kShortListFactor} * request.k + 1;
  // Reading the short list's keys would cost as much as reading all of them.
  if (inside.size() < kMinCodeKeys || short_list >= inside.size() / 2) {
    return SearchExactly(request);
  }
  SearchScratch own;
  SearchScratch& scratch = request.scratch ? *request.scratch : own;

  const CodeQueries queries =
      PrepareCodeQueries(book_, request.queries, request.group, request.layer.scale);
  for (uint32_t g = 0; g < request.group; ++g) {
    if (!std::isfinite(queries.mul[g]) || !std::isfinite(queries.add[g])) {
      return InvalidArgument("search: scores overflow although queries and keys are finite");
    }
  }
  const CodeScores scores = Scan(request, queries, inside, scratch);
  HeadMasses masses = MassesOf(scores);
  auto& ids = scratch.ids;
  ids.clear();
  // Appended tokens and those before, exactly; in order, so that ids ascend.
  const TokenRange before{wanted.begin, inside.begin}, after{inside.end, wanted.end};
  const size_t outside = size_t{before.size()} + after.size();
  for (uint32_t t = before.begin; t < before.end; ++t) ids.push_back(t);
  AppendShortList(scores, masses, static_cast<uint32_t>(short_list), inside.begin, scratch);
  for (uint32_t t = after.begin; t < after.end; ++t) ids.push_back(t);

  const size_t n = ids.size(), listed = n - outside;
  auto& exact = scratch.scores;
  if (exact.size() < request.group * n) exact.resize(request.group * n);
  PREFIXD_TRY(ScoreRange(request, before, exact, n));
  PREFIXD_TRY(ScoreTokens(request, std::span<const uint32_t>(ids).subspan(before.size(), listed),
                          std::span(exact).subspan(before.size()), n));
  PREFIXD_TRY(ScoreRange(request, after, std::span(exact).subspan(before.size() + listed), n));
  masses.Correct(scores, inside.begin,
                 std::span<const uint32_t>(ids).subspan(before.size(), listed),
                 std::span<const float>(exact).first(request.group * n), n);

  Selection selection = SelectRanked(ids, std::span<const float>(exact).first(request.group * n),
                                     masses.LogSumExp(), request.k);
  selection.keys_scanned = wanted.size();
  selection.bytes_scanned = CodeBlocks(inside.size()) * CodeBlockBytes(book_.key_dim) +
                            book_.bytes() + n * request.keys.shape.key_bytes();
  return selection;
}

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
