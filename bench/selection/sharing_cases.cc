#include "bench/selection/sharing_cases.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "attention/estimators/moments.h"
#include "attention/step/step.h"
#include "bench/prompts/head_trace.h"
#include "index/ranking/group_ranking.h"
#include "index/search/key_index.h"
#include "prefixd/selection.h"
#include "runtime/step/shared_sets.h"

namespace prefixd::bench {
namespace {

// Holds one head of the trace: its rows, and for every step what its results are compared with.
class SharingHead {
 public:
  SharingHead(const RetrievalTrace& trace, size_t index, const HeadTrace& head)
      : head_(head), mid_(trace.mid) {
    const KvGeometry& g = trace.geometry;
    row_ = {g.key_dim, g.value_dim, DType::kBf16};
    const RetrievalTrace::Head& from = trace.heads[index];
    bytes_.resize(trace.n_tokens * row_.bytes());
    for (size_t t = 0; t < trace.n_tokens; ++t) {
      std::byte* out = bytes_.data() + t * row_.bytes();
      FromFloat(row_.dtype, std::span(from.keys).subspan(t * g.key_dim, g.key_dim), out);
      FromFloat(row_.dtype, std::span(from.values).subspan(t * g.value_dim, g.value_dim),
                out + row_.key_bytes());
    }
    rows_ = {bytes_.data(), trace.n_tokens, row_.bytes(), row_};
    moment_ = MomentSummary(g.key_dim, g.value_dim, false);
    moment_.Add(rows_.Sub(mid_.begin, mid_.size()));
  }

  // Adds every step to each of the results; one without sharing comes first.
  Status Measure(uint32_t k, double search_bytes, std::span<SharingResult> results) const {
    std::vector<std::unique_ptr<SharedSets>> sets;
    for (const SharingResult& r : results) {
      sets.push_back(std::make_unique<SharedSets>(r.sharing, std::vector<uint32_t>{head_.group}));
    }
    for (size_t s = 0; s < head_.n_steps(); ++s) {
      PREFIXD_ASSIGN(const Step step, Look(head_.step(s), k));
      double topk = 0;
      for (size_t i = 0; i < results.size(); ++i) {
        PREFIXD_ASSIGN(const double mass, Add(step, search_bytes, *sets[i], results[i]));
        if (i == 0) topk = mass;
        results[i].mass_loss += topk - mass;
      }
    }
    return {};
  }

 private:
  // What all settings compare a step with.
  struct Step {
    std::span<const float> q;
    std::vector<float> scores;     // [G][mid]
    std::vector<double> log_mass;  // [G] log-sum-exp of the scores
    std::vector<float> exact;      // [G][value_dim] the output of full attention
    std::vector<uint32_t> topk;    // best first
    std::vector<Cut> cuts;         // of topk
  };

  Result<Step> Look(std::span<const float> q, uint32_t k) const {
    Step step;
    step.q = q;
    step.scores.resize(size_t{head_.group} * mid_.size());
    Scores(q, head_.group, head_.layer, rows_.Sub(mid_.begin, mid_.size()), step.scores);
    const GroupRanking ranking = RankByGroupMax(step.scores, head_.group, mid_.size(), k);
    for (uint32_t i = 0; i < k; ++i) step.topk.push_back(mid_.begin + ranking.best[i]);
    step.cuts = ranking.Cuts(k);
    step.log_mass.assign(ranking.lse.begin(), ranking.lse.end());
    step.exact.resize(size_t{head_.group} * row_.value_dim);
    std::vector<float> lse(head_.group);
    PREFIXD_TRY(ExactAttention(q, head_.group, head_.layer, rows_, step.exact, lse));
    return step;
  }

  // Adds what `sum`'s setting reads in the step and its errors; returns the mass that it reads.
  Result<double> Add(const Step& step, double search_bytes, SharedSets& sets,
                     SharingResult& sum) const {
    const SharedSet shared = sum.sharing.on() ? sets.Find(0, step.q) : nullptr;
    std::vector<uint32_t> ids;
    std::vector<Cut> cuts;
    if (shared) {
      ids = shared->ids;
      cuts = CutsFromOffsets(shared->offsets, ScoresOf(step.scores, ids));
    } else {
      ids = step.topk;
      cuts = step.cuts;
      const std::vector<uint32_t> best(ids.begin(), ids.begin() + ids.size() / 3);
      std::sort(ids.begin(), ids.end());
      sets.Keep(0, step.q,
                {Dilated(ids, best, sum.sharing.dilation, mid_),
                 MakeCutOffsets(cuts, ScoresOf(step.scores, ids))});
      sum.rho += 1;
      sum.scan_bytes += search_bytes;
    }
    sum.tokens += double(ids.size()) / step.topk.size();
    for (const bool complete : {false, true}) {
      PREFIXD_ASSIGN(const double error, Error(step, ids, cuts, complete));
      (complete ? sum.error : sum.dropped_error) += error;
    }
    const double mass = Mass(step, ids);
    sum.mass += mass;
    return mass;
  }

  // Returns the scores of `ids` alone, [G][ids.size()].
  std::vector<float> ScoresOf(std::span<const float> scores, std::span<const uint32_t> ids) const {
    std::vector<float> out;
    for (uint32_t g = 0; g < head_.group; ++g) {
      for (const uint32_t id : ids) out.push_back(scores[g * mid_.size() + id - mid_.begin]);
    }
    return out;
  }
  // Returns the mass of `ids`, mean over the group.
  double Mass(const Step& step, std::span<const uint32_t> ids) const {
    double mean = 0;
    for (uint32_t g = 0; g < head_.group; ++g) {
      const float* row = step.scores.data() + size_t{g} * mid_.size();
      for (const uint32_t id : ids) {
        mean += std::exp(double{row[id - mid_.begin]} - step.log_mass[g]) / head_.group;
      }
    }
    return mean;
  }

  // Returns the relative l1 error of the output, mean over the group.
  Result<double> Error(const Step& step, std::span<const uint32_t> ids, std::span<const Cut> cuts,
                       bool complete) const {
    std::vector<RowRef> refs;
    for (const uint32_t id : ids) refs.push_back({rows_.key(id), rows_.value(id)});
    GroupStepInput in;
    in.queries = step.q;
    in.group = head_.group;
    in.layer = head_.layer;
    in.sinks = rows_.Sub(0, mid_.begin);
    in.tail = rows_.Sub(mid_.end, rows_.count - mid_.end);
    in.retrieved = ScatteredRows(refs, row_);
    in.cuts = cuts;
    in.mid_count = mid_.size();
    if (complete) in.estimator = EstimatorKind::kMoment, in.moment = &moment_;
    const size_t n = size_t{head_.group} * row_.value_dim;
    std::vector<float> y(n), lse(head_.group), rho(head_.group);
    PREFIXD_TRY(GroupStep(in, {y, lse, rho}));
    double mean = 0;
    for (uint32_t g = 0; g < head_.group; ++g) {
      double off = 0, size = 0;
      for (size_t i = g * row_.value_dim; i < (g + 1) * size_t{row_.value_dim}; ++i) {
        off += std::abs(double{y[i]} - step.exact[i]);
        size += std::abs(double{step.exact[i]});
      }
      mean += off / (size + 1e-12) / head_.group;
    }
    return mean;
  }

  const HeadTrace& head_;
  const TokenRange mid_;
  RowShape row_;
  std::vector<std::byte> bytes_;
  RowsView rows_;
  MomentSummary moment_;
};

// Returns what one search of the default index reads, as a share of all keys.
Result<double> CodesBytes(const HeadTrace& head, uint32_t k) {
  const TokenRange all{0, static_cast<uint32_t>(head.view().count)};
  PREFIXD_ASSIGN(const auto index, index::BuildCodesIndex(head.view(), all));
  index::SearchRequest request;
  request.queries = head.step(0);
  request.group = head.group;
  request.layer = head.layer;
  request.candidates = all;
  request.k = k;
  request.keys = head.view();
  PREFIXD_ASSIGN(const Selection selection, index->Search(request));
  return double(selection.bytes_scanned) / double(head.view().count * head.shape.bytes());
}

}  // namespace

Result<std::vector<SharingResult>> MeasureSharing(const RetrievalTrace& trace, double fraction,
                                                  std::span<const StepPolicy::Sharing> settings,
                                                  const HeadsDone& progress) {
  const std::vector<HeadTrace> traces = HeadTraces(trace);
  const auto k = static_cast<uint32_t>(std::ceil(fraction * trace.mid.size()));
  std::vector<SharingResult> results(settings.size() + 1);
  for (size_t i = 0; i < settings.size(); ++i) results[i + 1].sharing = settings[i];
  double steps = 0;
  for (size_t h = 0; h < traces.size(); ++h) {
    PREFIXD_ASSIGN(const double bytes, CodesBytes(traces[h], k));
    PREFIXD_TRY(SharingHead(trace, h, traces[h]).Measure(k, bytes, results));
    steps += double(traces[h].n_steps());
    if (progress) progress(h + 1, traces.size());
  }
  for (SharingResult& r : results) {
    for (double* sum :
         {&r.rho, &r.tokens, &r.mass, &r.mass_loss, &r.dropped_error, &r.error, &r.scan_bytes}) {
      *sum /= steps;
    }
  }
  return results;
}

const SharingResult* LeastLoss(std::span<const SharingResult> results) {
  constexpr double kMostRho = 0.1;
  constexpr uint32_t kLeastBlock = 16;
  const SharingResult* least = nullptr;
  for (const SharingResult& r : results) {
    if (r.sharing.block < kLeastBlock || r.sharing.across || r.rho > kMostRho) continue;
    if (!least || r.mass_loss < least->mass_loss) least = &r;
  }
  return least;
}

}  // namespace prefixd::bench
