#include "index/code_search/codes_index.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "index/code_search/code_blocks.h"
#include "index/code_search/code_search.h"
#include "index/code_search/code_training.h"
#include "index/code_search/stored_codes.h"
#include "index/codes/block_codes.h"

namespace prefixd::index {
namespace {

class CodesIndex final : public KeyIndex {
 public:
  CodesIndex(BlockCodeBook book, CodeMemory arrays, TokenRange covered)
      : book_(std::move(book)),
        arrays_(std::move(arrays)),
        codes_(book_.keys.key_dim, covered.size(), arrays_.bytes()),
        covered_(covered) {}

  IndexKind kind() const override { return IndexKind::kCodes; }
  TokenRange covered() const override { return covered_; }
  size_t memory_bytes() const override { return book_.bytes() + arrays_.bytes().size(); }
  float effort() const override { return effort_; }
  std::vector<float> efforts() const override { return {1, 1.25f, 1.6f}; }
  Status SetEffort(float effort) override {
    if (!(effort >= 1 && effort <= 20)) {
      return InvalidArgument("codes are taken to miss 1 to 20 times what they do");
    }
    effort_ = effort;
    return {};
  }
  Result<Selection> Search(const SearchRequest& request) const override {
    return std::move(SearchMany({&request, 1}).front());
  }
  std::vector<Result<Selection>> SearchMany(
      std::span<const SearchRequest> requests) const override {
    const CodePart part = PartOf(covered_);
    return SearchCodes(requests, {&part, 1}, effort_);
  }
  Result<std::vector<std::byte>> Serialize() const override {
    return SerializeCodes(book_, covered_, arrays_.bytes());
  }
  CodePart PartOf(TokenRange used) const { return {&book_, codes_, covered_.begin, used}; }

 private:
  BlockCodeBook book_;
  CodeMemory arrays_;
  BlockCodes codes_;
  TokenRange covered_;
  float effort_ = 1;
};

class JoinedCodes final : public KeyIndex {
 public:
  explicit JoinedCodes(std::vector<std::shared_ptr<const KeyIndex>> indexes,
                       std::vector<CodePart> parts)
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
    float most = 0;
    for (const auto& index : indexes_) most = std::max(most, index->effort());
    return most;
  }
  Status SetEffort(float) override {
    return InvalidArgument("joined indexes are tuned one by one");
  }
  Result<Selection> Search(const SearchRequest& request) const override {
    return std::move(SearchMany({&request, 1}).front());
  }
  std::vector<Result<Selection>> SearchMany(
      std::span<const SearchRequest> requests) const override {
    return SearchCodes(requests, parts_, effort());
  }
  Result<std::vector<std::byte>> Serialize() const override {
    return Error{Code::kFailedPrecondition, "joined indexes are stored one by one"};
  }

 private:
  std::vector<std::shared_ptr<const KeyIndex>> indexes_;  // what parts_ borrow from
  std::vector<CodePart> parts_;
};

}  // namespace

Result<std::unique_ptr<KeyIndex>> BuildCodesIndex(const RowsView& keys, TokenRange covered) {
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
    PREFIXD_ASSIGN(EncodedKeys encoded, EncodeKeys(keys));
    return std::unique_ptr<KeyIndex>(
        std::make_unique<CodesIndex>(std::move(encoded.book), std::move(encoded.arrays), covered));
  } catch (const std::bad_alloc&) {
    return Error{Code::kResourceExhausted, "not enough memory to build codes"};
  }
}

Result<std::unique_ptr<KeyIndex>> JoinCodesIndexes(std::vector<IndexPart> parts) {
  std::vector<std::shared_ptr<const KeyIndex>> indexes;
  std::vector<CodePart> joined;
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
    CodeMemory arrays(stored.arrays.size());
    std::copy(stored.arrays.begin(), stored.arrays.end(), arrays.bytes().begin());
    const BlockCodes codes(stored.book.keys.key_dim, opened.fields.covered.size(), arrays.bytes());
    if (const Status valid = codes.Validate(); !valid.ok()) {
      return Error{Code::kCorrupt,
                   "stored codes: " + valid.error().message + "; rebuild the index"};
    }
    return std::unique_ptr<KeyIndex>(std::make_unique<CodesIndex>(
        std::move(stored.book), std::move(arrays), opened.fields.covered));
  } catch (const std::bad_alloc&) {
    return Error{Code::kResourceExhausted, "not enough memory for codes"};
  }
}

}  // namespace prefixd::index
