#include "bench/selection/scan_masses.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "attention/estimators/clusters.h"
#include "attention/step/step.h"
#include "index/code_search/code_training.h"
#include "index/search/key_index.h"
#include "measure/timing/statistics.h"

namespace prefixd::bench {
namespace {

constexpr uint32_t kClusters = 32;  // default of RuntimeOptions

double LogSumExp(std::span<const double> x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const double v : x) sum += std::exp(v - top);
  return top + std::log(sum);
}

// Returns keys as their codes represent them, [n][key_dim].
Result<std::vector<float>> Decoded(const RowsView& keys) {
  PREFIXD_ASSIGN(const index::EncodedKeys encoded, index::EncodeKeys(keys));
  const uint32_t dim = keys.shape.key_dim;
  const BlockCodes codes(dim, keys.count, encoded.arrays.bytes());
  std::vector<float> decoded(keys.count * dim);
  for (size_t place = 0; place < codes.layout.n_blocks * kCodeBlockKeys; ++place) {
    if (codes.tokens[place] == kNoKey) continue;
    DecodeBlockKey(encoded.book, codes, place,
                   std::span(decoded).subspan(size_t{codes.key(place)} * dim, dim));
  }
  return decoded;
}

struct Sums {
  double n = 0, share = 0, alone = 0, error = 0, square = 0, of_all = 0;
  double bytes = 0, more_bytes = 0;
  std::vector<double> search, scores, sums;

  ScanMass Result(double fraction) const {
    const double bias = error / n;
    return {fraction,
            share / n,
            alone / n,
            bias,
            std::sqrt(std::max(0.0, square / n - bias * bias)),
            std::sqrt(of_all / n),
            Summarise(search).median,
            Summarise(scores).median,
            Summarise(sums).median,
            more_bytes / bytes - 1};
  }
};

class ScannedHead {
 public:
  explicit ScannedHead(const HeadTrace& head) : head_(head), n_(head.view().count) {}

  Status Prepare() {
    PREFIXD_ASSIGN(index_, index::BuildCodesIndex(head_.view(), {0, static_cast<uint32_t>(n_)}));
    PREFIXD_ASSIGN(decoded_, Decoded(head_.view()));
    clusters_ = Clustering::Fit(head_.view(), kClusters).Assign(head_.view());
    for (auto* scores : {&exact_, &by_codes_}) scores->resize(head_.group * n_);
    return {};
  }

  Status Measure(size_t step, double fraction, Sums& sums) {
    index::SearchRequest request;
    request.queries = head_.step(step);
    request.group = head_.group;
    request.layer = head_.layer;
    request.candidates = {0, static_cast<uint32_t>(n_)};
    request.k = static_cast<uint32_t>(std::ceil(fraction * double(n_)));
    request.keys = head_.view();
    request.scratch = &scratch_;
    Result<Selection> found = Selection{};
    sums.search.push_back(Milliseconds([&] { found = index_->Search(request); }));
    if (!found.ok()) return found.error();
    sums.bytes += double(found->bytes_scanned);
    request.scores = &told_;
    sums.scores.push_back(Milliseconds([&] { found = index_->Search(request); }));
    if (!found.ok()) return found.error();
    sums.more_bytes += double(found->bytes_scanned);
    if (told_.empty()) return InvalidArgument("K is too much of these keys to search by codes");
    std::vector<float> masses(head_.group * kClusters);
    sums.sums.push_back(Milliseconds(
        [&] { SumScan(told_, head_.group, clusters_, found->cuts, kClusters, masses); }));

    const RowShape floats{head_.shape.key_dim, 0, DType::kF32};
    Scores(request.queries, head_.group, head_.layer, head_.view(), exact_);
    Scores(request.queries, head_.group, head_.layer,
           {reinterpret_cast<const std::byte*>(decoded_.data()), n_, floats.bytes(), floats},
           by_codes_);
    std::vector<bool> taken(n_, false);
    for (const uint32_t id : found->ids) taken[id] = true;
    for (size_t g = 0; g < head_.group; ++g) Judge(g * n_, taken, sums);
    return {};
  }

 private:
  template <typename Work>
  static double Milliseconds(Work work) {
    const auto begun = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun)
        .count();
  }

  // Adds the errors of the query head whose scores begin at `first`.
  void Judge(size_t first, const std::vector<bool>& taken, Sums& sums) const {
    std::vector<double> all, left, told, alone;
    for (size_t i = 0; i < n_; ++i) {
      const double truth = exact_[first + i], said = told_[first + i];
      all.push_back(truth);
      if (taken[i]) continue;
      left.push_back(truth);
      told.push_back(said);
      // The search knows the exact scores of the short list.
      const bool exact = std::fabs(said - truth) < 1e-6 * (1 + std::fabs(truth));
      alone.push_back(exact ? truth : double{by_codes_[first + i]});
    }
    const double truth = LogSumExp(left), error = LogSumExp(told) - truth;
    const double share = std::exp(truth - LogSumExp(all));
    sums.n += 1;
    sums.share += share;
    sums.alone += LogSumExp(alone) - truth;
    sums.error += error;
    sums.square += error * error;
    sums.of_all += share * error * share * error;
  }

  const HeadTrace& head_;
  const size_t n_;
  std::unique_ptr<index::KeyIndex> index_;
  std::vector<float> decoded_, exact_, by_codes_, told_;
  std::vector<uint16_t> clusters_;
  index::SearchScratch scratch_;
};

}  // namespace

Result<std::vector<ScanMass>> MeasureScanMasses(std::span<const HeadTrace> heads,
                                                std::span<const double> fractions) {
  std::vector<Sums> sums(fractions.size());
  for (const HeadTrace& trace : heads) {
    ScannedHead head(trace);
    PREFIXD_TRY(head.Prepare());
    for (size_t step = 0; step < trace.n_steps(); ++step) {
      for (size_t f = 0; f < fractions.size(); ++f) {
        PREFIXD_TRY(head.Measure(step, fractions[f], sums[f]));
      }
    }
  }
  std::vector<ScanMass> results;
  for (size_t f = 0; f < fractions.size(); ++f) results.push_back(sums[f].Result(fractions[f]));
  return results;
}

}  // namespace prefixd::bench
