#include "index/search/key_index.h"
#include "index/search/search_pass.h"

namespace prefixd::index {

namespace {

// Holds nothing: the keys come with every request.
class ExactIndex final : public KeyIndex {
 public:
  explicit ExactIndex(TokenRange covered) : covered_(covered) {}

  IndexKind kind() const override { return IndexKind::kExact; }
  TokenRange covered() const override { return covered_; }
  size_t memory_bytes() const override { return 0; }

  Result<Selection> Search(const SearchRequest& request) const override {
    return std::move(SearchMany({&request, 1}).front());
  }
  std::vector<Result<Selection>> SearchMany(
      std::span<const SearchRequest> requests) const override {
    return SearchAllExactly(requests);
  }

  Result<std::vector<std::byte>> Serialize() const override { return std::vector<std::byte>(); }

 private:
  TokenRange covered_;
};

}  // namespace

std::unique_ptr<KeyIndex> MakeExactIndex(TokenRange covered) {
  return std::make_unique<ExactIndex>(covered);
}

}  // namespace prefixd::index
