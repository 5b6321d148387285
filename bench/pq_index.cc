#include "bench/pq_index.h"

#include <faiss/IndexPQFastScan.h>
#include <faiss/impl/io.h>
#include <faiss/index_io.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <string>

#include "index/ranking/group_ranking.h"
#include "index/search/candidates.h"
#include "index/ivf/centred_keys.h"
#include "index/ivf/one_omp_thread.h"
#include "index/search/search_request.h"
#include "prefixd/selection.h"

namespace prefixd::bench {
namespace {

using index::SearchRequest;

class PqIndex final : public index::KeyIndex {
 public:
  PqIndex(std::unique_ptr<faiss::IndexPQFastScan> codes, TokenRange covered)
      : codes_(std::move(codes)), covered_(covered) {}

  index::IndexKind kind() const override { return index::IndexKind::kCodes; }
  TokenRange covered() const override { return covered_; }
  size_t memory_bytes() const override { return codes_->codes.nbytes(); }
  float effort() const override { return effort_; }
  std::vector<float> efforts() const override { return {3, 4, 6, 8, 12, 16}; }
  Status SetEffort(float effort) override {
    if (!(effort >= 1 && effort <= 64)) {
      return InvalidArgument("a short list has 1 to 64 times as many keys as are returned");
    }
    effort_ = effort;
    return {};
  }
  Result<Selection> Search(const SearchRequest& request) const override;
  Result<std::vector<std::byte>> Serialize() const override {
    try {
      faiss::VectorIOWriter writer;
      faiss::write_index(codes_.get(), &writer);
      std::vector<std::byte> bytes(writer.data.size());
      std::memcpy(bytes.data(), writer.data.data(), bytes.size());
      return bytes;
    } catch (const std::exception& e) {
      return Error{Code::kInternal, std::string("serialising 4-bit codes: ") + e.what()};
    }
  }

 private:
  // The `most` best of the group by their codes, as rows, ascending.
  std::vector<uint32_t> ShortList(const SearchRequest& request, size_t most) const;

  std::unique_ptr<faiss::IndexPQFastScan> codes_;
  TokenRange covered_;
  float effort_ = index::kShortListFactor;
};

std::vector<uint32_t> PqIndex::ShortList(const SearchRequest& request, size_t most) const {
  const uint32_t group = request.group;
  std::vector<float> queries(request.queries.begin(), request.queries.end());
  for (float& x : queries) x *= request.layer.scale;
  std::vector<float> scores(group * most);
  std::vector<faiss::Index::idx_t> rows(group * most);
  codes_->search(group, queries.data(), static_cast<faiss::Index::idx_t>(most), scores.data(),
                 rows.data());
  std::vector<uint32_t> found;
  for (const auto row : rows) {
    if (row >= 0) found.push_back(static_cast<uint32_t>(row));
  }
  std::ranges::sort(found);
  const auto twice = std::ranges::unique(found);
  found.erase(twice.begin(), twice.end());
  if (found.size() <= most) return found;
  // What a head does not list ranks below all that it lists.
  std::vector<float> of_found(group * found.size(), -std::numeric_limits<float>::infinity());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] < 0) continue;
    const auto at = std::ranges::lower_bound(found, static_cast<uint32_t>(rows[i]));
    of_found[i / most * found.size() + static_cast<size_t>(at - found.begin())] = scores[i];
  }
  std::vector<uint32_t> best =
      SelectByGroupMax(of_found, group, static_cast<uint32_t>(found.size()),
                       static_cast<uint32_t>(most), 0, /*scores_complete=*/false)
          .ids;
  for (uint32_t& i : best) i = found[i];
  return best;
}

Result<Selection> PqIndex::Search(const SearchRequest& request) const {
  PREFIXD_TRY(index::BeginSearch(request, static_cast<uint32_t>(codes_->d)));
  const TokenRange& wanted = request.candidates;
  if (request.k >= wanted.size()) return index::SelectAll(request);
  if (wanted.begin != covered_.begin || wanted.end > covered_.end) {
    return InvalidArgument("4-bit codes are searched from their first token on, within them");
  }
  auto most = static_cast<size_t>(std::ceil(double{effort_} * request.k));
  std::vector<uint32_t> proposed;
  try {
    const index::OneOmpThread one_thread;
    // Of fewer candidates than the codes cover (while tuning) the others are listed in vain.
    for (; proposed.size() <= request.k; most *= 2) {
      proposed = ShortList(request, std::min<size_t>(most, covered_.size()));
      for (uint32_t& row : proposed) row += covered_.begin;
      std::erase_if(proposed, [&](uint32_t token) { return !wanted.contains(token); });
    }
  } catch (const std::exception& e) {
    return Error{Code::kInternal, std::string("searching 4-bit codes: ") + e.what()};
  }
  PREFIXD_ASSIGN(Selection selection, index::SelectAmong(request, proposed, {}));
  // The heads of a group share one pass over the codes.
  selection.keys_scanned = covered_.size();
  selection.bytes_scanned += codes_->codes.nbytes();
  return selection;
}

}  // namespace

Result<std::unique_ptr<index::KeyIndex>> BuildPqIndex(const RowsView& keys, TokenRange covered) {
  const uint32_t dim = keys.shape.key_dim;
  if (keys.count != covered.size() || keys.count < index::kMinIvfKeys || dim % 2 != 0) {
    return InvalidArgument("4-bit codes need " + std::to_string(index::kMinIvfKeys) +
                           " keys or more, of an even dimension");
  }
  std::vector<float> mean(dim);
  PREFIXD_ASSIGN(const std::vector<float> centred, index::CentredKeys(keys, covered.begin, mean));
  try {
    const index::OneOmpThread one_thread;
    const auto n = static_cast<faiss::Index::idx_t>(keys.count);
    auto codes = std::make_unique<faiss::IndexPQFastScan>(static_cast<int>(dim), dim / 2, 4,
                                                          faiss::METRIC_INNER_PRODUCT);
    codes->train(n, centred.data());
    codes->add(n, centred.data());
    return std::unique_ptr<index::KeyIndex>(std::make_unique<PqIndex>(std::move(codes), covered));
  } catch (const std::exception& e) {
    return Error{Code::kInternal, std::string("building 4-bit codes: ") + e.what()};
  }
}

}  // namespace prefixd::bench
