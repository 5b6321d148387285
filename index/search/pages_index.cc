#include "index/search/pages_index.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "attention/step/step.h"
#include "index/search/candidates.h"
#include "index/search/group_rank.h"
#include "index/search/search_pass.h"

namespace prefixd::index {
namespace {

constexpr float kPagesEffort = 8;
constexpr uint32_t kMaxKeyDim = 1024;  // of KvGeometry

// The bf16 next to x that is not below (not above) it; x finite.
uint16_t RoundUp(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0xffff) == 0) return static_cast<uint16_t>(bits >> 16);
  // Towards +inf: positive magnitudes grow, negative ones are cut.
  return static_cast<uint16_t>((bits >> 16) + (x > 0 ? 1 : 0));
}
uint16_t RoundDown(float x) { return static_cast<uint16_t>(RoundUp(-x) ^ 0x8000u); }

float FloatOf(uint16_t bf16) { return std::bit_cast<float>(uint32_t{bf16} << 16); }

// Page p: keys [p page_tokens, (p + 1) page_tokens). Its row has the largest, then the least of
// each dimension. A query's positive parts meet the former and its negative ones the latter, so
// that one product bounds the scores of all keys of the page (Quest).
class PagesIndex final : public KeyIndex {
 public:
  PagesIndex(std::vector<uint16_t> bounds, uint32_t dim, uint32_t page_tokens, TokenRange covered)
      : bounds_(std::move(bounds)), dim_(dim), page_tokens_(page_tokens), covered_(covered) {}

  IndexKind kind() const override { return IndexKind::kPages; }
  TokenRange covered() const override { return covered_; }
  size_t memory_bytes() const override { return bounds_.size() * sizeof(uint16_t); }
  float effort() const override { return effort_; }
  std::vector<float> efforts() const override { return {1, 2, 4, 8, 12, 16, 24, 32}; }
  Status SetEffort(float effort) override {
    if (!(effort >= 1 && effort <= 1024)) {
      return InvalidArgument("pages with 1 to 1024 times as many keys as are returned are read");
    }
    effort_ = effort;
    return {};
  }
  Result<Selection> Search(const SearchRequest& request) const override;
  Result<std::vector<std::byte>> Serialize() const override {
    Envelope fields;
    fields.kind = static_cast<uint32_t>(IndexKind::kPages);
    fields.covered = covered_;
    fields.key_dim = dim_;
    fields.n_lists = page_tokens_;
    return Seal(fields, std::as_bytes(std::span(bounds_)));
  }

 private:
  std::vector<float> Bounds(const SearchRequest& request, TokenRange pages) const;

  std::vector<uint16_t> bounds_;  // [pages][2][dim], bf16
  uint32_t dim_, page_tokens_;
  TokenRange covered_;
  float effort_ = kPagesEffort;
};

// What no score of the page exceeds: [group][pages].
std::vector<float> PagesIndex::Bounds(const SearchRequest& request, TokenRange pages) const {
  std::vector<float> sides(size_t{request.group} * 2 * dim_);
  const bool turned = request.layer.scale < 0;
  for (uint32_t g = 0; g < request.group; ++g) {
    float* most = sides.data() + size_t{g} * 2 * dim_;
    float* least = most + dim_;
    for (uint32_t d = 0; d < dim_; ++d) {
      const float q = request.queries[size_t{g} * dim_ + d];
      most[d] = (q > 0) != turned ? q : 0;
      least[d] = (q > 0) != turned ? 0 : q;
    }
  }
  const RowShape shape{2 * dim_, 0, DType::kBf16};
  std::vector<float> bounds(size_t{request.group} * pages.size());
  Scores(sides, request.group, request.layer,
         {reinterpret_cast<const std::byte*>(bounds_.data() + size_t{pages.begin} * 2 * dim_),
          pages.size(), shape.bytes(), shape},
         bounds);
  return bounds;
}

Result<Selection> PagesIndex::Search(const SearchRequest& request) const {
  PREFIXD_TRY(BeginSearch(request, dim_));
  const TokenRange& wanted = request.candidates;
  if (request.k >= wanted.size()) return SelectAll(request);
  const Outside outside = OutsideOf(wanted, covered_);
  const size_t inside = wanted.size() - outside.size();
  const auto tokens = static_cast<uint64_t>(std::ceil(double{effort_} * request.k)) + page_tokens_;
  if (inside == 0 || tokens >= inside / 2) return SearchExactly(request);
  const TokenRange part{outside.before.end - covered_.begin, outside.after.begin - covered_.begin};
  const TokenRange pages{part.begin / page_tokens_, (part.end + page_tokens_ - 1) / page_tokens_};
  const std::vector<float> bounds = Bounds(request, pages);
  if (!AllFinite(bounds)) return SearchExactly(request);
  const std::vector<double> ranks =
      GroupRanks(bounds, request.group, LogSumExp(bounds, request.group));
  std::vector<uint32_t> order(pages.size());
  std::iota(order.begin(), order.end(), 0u);
  const size_t n = std::min<size_t>(order.size(), (tokens + page_tokens_ - 1) / page_tokens_ + 2);
  std::partial_sort(
      order.begin(), order.begin() + static_cast<ptrdiff_t>(n), order.end(),
      [&](uint32_t a, uint32_t b) { return ranks[a] != ranks[b] ? ranks[a] > ranks[b] : a < b; });
  order.resize(n);
  std::ranges::sort(order);
  std::vector<uint32_t> proposed;
  for (const uint32_t p : order) {
    const uint32_t begin = (pages.begin + p) * page_tokens_;
    const uint32_t end = std::min(begin + page_tokens_, part.end);
    for (uint32_t t = std::max(begin, part.begin); t < end; ++t) {
      proposed.push_back(covered_.begin + t);
    }
  }
  PREFIXD_ASSIGN(Selection selection, SelectAmong(request, proposed, outside));
  selection.bytes_scanned += pages.size() * size_t{2} * dim_ * sizeof(uint16_t);
  return selection;
}

}  // namespace

Result<std::unique_ptr<KeyIndex>> BuildPagesIndex(const RowsView& keys, TokenRange covered,
                                                  const PagesOptions& options) {
  if (covered.begin > covered.end || keys.count != covered.size()) {
    return InvalidArgument("an index over tokens [" + std::to_string(covered.begin) + ", " +
                           std::to_string(covered.end) + ") was given " +
                           std::to_string(keys.count) + " keys");
  }
  if (keys.count == 0 || keys.data == nullptr || keys.shape.key_dim == 0 ||
      keys.stride < keys.shape.key_bytes()) {
    return InvalidArgument("an index needs keys: data, dimensions and a stride of a key or more");
  }
  if (options.page_tokens < 2 || options.page_tokens > 4096) {
    return InvalidArgument("a page of keys has 2 to 4096 tokens");
  }
  const uint32_t dim = keys.shape.key_dim, page = options.page_tokens;
  std::vector<uint16_t> bounds;
  bounds.reserve((keys.count + page - 1) / page * 2 * dim);
  std::vector<float> key(dim), most(dim), least(dim);
  for (size_t begin = 0; begin < keys.count; begin += page) {
    std::ranges::fill(most, -std::numeric_limits<float>::infinity());
    std::ranges::fill(least, std::numeric_limits<float>::infinity());
    for (size_t i = begin; i < std::min(begin + page, keys.count); ++i) {
      ToFloat(keys.shape.dtype, keys.key(i), key);
      if (!AllFinite(key)) {
        return InvalidArgument("the key of token " + std::to_string(covered.begin + i) +
                               " is NaN or infinite");
      }
      for (uint32_t d = 0; d < dim; ++d) {
        most[d] = std::max(most[d], key[d]);
        least[d] = std::min(least[d], key[d]);
      }
    }
    for (const float x : most) bounds.push_back(RoundUp(x));
    for (const float x : least) bounds.push_back(RoundDown(x));
  }
  return std::unique_ptr<KeyIndex>(
      std::make_unique<PagesIndex>(std::move(bounds), dim, page, covered));
}

Result<std::unique_ptr<KeyIndex>> LoadPagesIndex(const OpenedEnvelope& opened) {
  const Envelope& fields = opened.fields;
  const auto corrupt = [](const char* what) {
    return Error{Code::kCorrupt, std::string("stored index: ") + what + "; rebuild it"};
  };
  if (fields.covered.begin >= fields.covered.end || fields.key_dim == 0 ||
      fields.key_dim > kMaxKeyDim || fields.n_lists < 2 || fields.n_lists > 4096 ||
      fields.probe_fraction != 0 || fields.seed != 0) {
    return corrupt("impossible header");
  }
  const size_t pages = (size_t{fields.covered.size()} + fields.n_lists - 1) / fields.n_lists;
  if (opened.payload.size() != pages * 2 * fields.key_dim * sizeof(uint16_t)) {
    return corrupt("more or fewer pages than tokens fill");
  }
  std::vector<uint16_t> bounds(pages * 2 * fields.key_dim);
  std::memcpy(bounds.data(), opened.payload.data(), opened.payload.size());
  for (size_t p = 0; p < pages; ++p) {
    const uint16_t* most = bounds.data() + p * 2 * fields.key_dim;
    for (uint32_t d = 0; d < fields.key_dim; ++d) {
      const float high = FloatOf(most[d]), low = FloatOf(most[fields.key_dim + d]);
      if (!(std::isfinite(high) && std::isfinite(low) && low <= high)) {
        return corrupt("bounds of a page that no key can have");
      }
    }
  }
  return std::unique_ptr<KeyIndex>(std::make_unique<PagesIndex>(std::move(bounds), fields.key_dim,
                                                                fields.n_lists, fields.covered));
}

}  // namespace prefixd::index
