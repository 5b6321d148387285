#include "runtime/ingest/choice.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "attention/reference/diagnostics.h"
#include "attention/step/budget.h"
#include "attention/step/step.h"
#include "base/check.h"
#include "index/ranking/group_ranking.h"
#include "prefixd/merge.h"
#include "prefixd/selection.h"
#include "runtime/step/estimator_input.h"
#include "runtime/summaries/materialised_summaries.h"
#include "runtime/summaries/token_features.h"
#include "storage/segment/stored_part.h"

namespace prefixd {
namespace {

// Measuring costs samples x tokens, so longer prefixes get fewer samples.
constexpr uint64_t kSampleTokens = 16 * 16384;
constexpr size_t kMinSamples = 4;

// One candidate at one budget.
struct Trial {
  size_t budget = 0;
  EstimatorVariant estimator = EstimatorKind::kNone;
  uint32_t k = 0;
};

// What is tried on the heads of a layer: layers whose rows differ can pay for different estimators.
struct Trials {
  std::vector<double> budgets;
  std::vector<Trial> all;
  uint32_t most = 0;  // largest k in any trial
};

struct Inputs {
  const DerivedContext& context;
  const Model& model;
  const storage::StoredPrefix& prefix;
  const QuerySamples& samples;
  const FeatureMapSet* maps = nullptr;
  std::vector<SegmentPart> parts;  // the chain, up to P
  Partition partition;
  std::vector<Trials> trials;  // [layers]
  KeptSummaries kept;
};

// Gathers everything that the trials of one head need, by streaming its rows.
class HeadSamples {
 public:
  HeadSamples(const Inputs& in, uint32_t layer, uint32_t kv_head)
      : in_(in),
        most_(in.trials[layer].most),
        layer_geometry_(in.model.spec.geometry.layers[layer]),
        shape_(in.model.spec.geometry.layer(layer)),
        layer_(layer),
        kv_head_(kv_head),
        n_(in.partition.tail.end),
        mid_(in.partition.mid) {}

  Status Read() {
    PickQueries();
    if (count_ == 0) return {};
    PREFIXD_TRY(ReadScores());
    rankings_.clear();
    for (size_t s = 0; s < count_; ++s) {
      rankings_.push_back(RankByGroupMax(scores(s), group(), mid_.size(), most_));
    }
    return ReadRetrieved();
  }

  size_t count() const { return count_; }
  uint32_t group() const { return shape_.group_size(); }
  std::span<const float> queries(size_t s) const { return Part(queries_, s, shape_.key_dim); }
  std::span<const float> exact(size_t s) const { return Part(exact_, s, shape_.value_dim); }
  std::span<const float> scores(size_t s) const { return Part(scores_, s, mid_.size()); }
  const GroupRanking& ranking(size_t s) const { return rankings_[s]; }
  // Returns the k best rows of sample s, best first.
  RowsView retrieved(size_t s, uint32_t k) const {
    const RowShape row = shape_.row();
    return {retrieved_.data() + s * most_ * row.bytes(), k, row.bytes(), row};
  }
  RowsView sinks() const { return Anchors(0, in_.partition.sink.size()); }
  RowsView tail() const { return Anchors(in_.partition.sink.size(), in_.partition.tail.size()); }
  std::span<const uint16_t> clusters() const { return clusters_; }  // [mid], if a trial needs them

 private:
  std::span<const float> Part(const std::vector<float>& all, size_t s, size_t dim) const {
    return std::span(all).subspan(s * group() * dim, group() * dim);
  }
  RowsView Anchors(size_t first, size_t n) const {
    const RowShape row = shape_.row();
    return {anchors_.data() + first * row.bytes(), n, row.bytes(), row};
  }

  // Picks samples spread over the kept positions, which ascend.
  void PickQueries() {
    const QuerySamples::Layer& samples = in_.samples.layers[layer_];
    const size_t wanted = std::max<size_t>(kMinSamples, kSampleTokens / n_);
    count_ = std::min(samples.positions.size(), wanted);
    for (size_t s = 0; s < count_; ++s) {
      const size_t at = s * samples.positions.size() / count_;
      const float* q =
          samples.q.data() + (at * shape_.n_q_heads + size_t{kv_head_} * group()) * shape_.key_dim;
      queries_.insert(queries_.end(), q, q + size_t{group()} * shape_.key_dim);
    }
  }

  // Calls visit(run, rows) for every row once, in order.
  template <typename Visit>
  Status Stream(Visit visit) {
    const RowShape row = shape_.row();
    const auto scratch = in_.context.scratch.Acquire();
    for (uint32_t at = 0; at < n_;) {
      const TokenRange run{at, std::min(n_, RunEnd(in_.prefix.parts(), at, kRunTokens))};
      const auto bytes = Scratch::Take(scratch->rows, run.size() * row.bytes());
      PREFIXD_TRY(in_.prefix.ReadRange(layer_, kv_head_, run, bytes, nullptr));
      PREFIXD_TRY(visit(run, RowsView{bytes.data(), run.size(), row.bytes(), row}));
      at = run.end;
    }
    return {};
  }

  Status ReadScores() {
    const RowShape row = shape_.row();
    const auto heads = static_cast<uint32_t>(count_ * group());
    const size_t head = in_.model.heads.of(layer_, kv_head_);
    const PrefixClusters* clusters = nullptr;
    for (const auto& [variant, kept] : in_.kept) {
      const auto of = kept.find(head);
      if (of != kept.end() && of->second->clusters) clusters = of->second->clusters.get();
    }
    exact_.assign(size_t{heads} * row.value_dim, 0);
    scores_.resize(size_t{heads} * mid_.size());
    anchors_.resize(in_.partition.anchor_count() * row.bytes());
    std::vector<float> lse(heads, -std::numeric_limits<float>::infinity());
    std::vector<float> run_y(exact_.size()), run_lse(heads), block;
    return Stream([&](TokenRange run, const RowsView& rows) -> Status {
      const LayerGeometry& layer = layer_geometry_;
      PREFIXD_TRY(ExactAttention(queries_, heads, layer, rows, run_y, run_lse));
      for (uint32_t h = 0; h < heads; ++h) {
        const size_t at = size_t{h} * row.value_dim;
        MergeStates(std::span(exact_).subspan(at, row.value_dim), &lse[h],
                    std::span(run_y).subspan(at, row.value_dim), run_lse[h]);
      }
      block.resize(size_t{heads} * rows.count);
      Scores(queries_, heads, layer, rows, block);
      for (uint32_t t = run.begin; t < run.end; ++t) {
        const size_t i = t - run.begin;
        if (mid_.contains(t)) continue;
        const size_t at = t < mid_.begin ? t : in_.partition.sink.size() + t - mid_.end;
        std::memcpy(anchors_.data() + at * row.bytes(), rows.key(i), row.bytes());
      }
      const uint32_t begin = std::max(run.begin, mid_.begin), end = std::min(run.end, mid_.end);
      for (uint32_t h = 0; h < heads && begin < end; ++h) {
        std::copy_n(block.data() + size_t{h} * rows.count + (begin - run.begin), end - begin,
                    scores_.data() + size_t{h} * mid_.size() + (begin - mid_.begin));
      }
      if (clusters && begin < end && in_.model.Summarised(layer_)) {
        const auto of_run =
            clusters->Of(head, {begin, end}, rows.Sub(begin - run.begin, end - begin));
        clusters_.insert(clusters_.end(), of_run.begin(), of_run.end());
      }
      return {};
    });
  }

  // Reads the rows that any trial retrieves, in one pass in order of position.
  Status ReadRetrieved() {
    const RowShape row = shape_.row();
    struct Wanted {
      uint32_t token;
      size_t slot;
      bool operator<(const Wanted& o) const { return token < o.token; }
    };
    std::vector<Wanted> wanted;
    for (size_t s = 0; s < count_; ++s) {
      const std::vector<uint32_t>& best = rankings_[s].best;
      const size_t k = std::min<size_t>(best.size(), most_);
      for (size_t i = 0; i < k; ++i) wanted.push_back({mid_.begin + best[i], s * most_ + i});
    }
    if (wanted.empty()) return {};
    std::sort(wanted.begin(), wanted.end());
    retrieved_.resize(count_ * most_ * row.bytes());
    auto next = wanted.begin();
    PREFIXD_TRY(Stream([&](TokenRange run, const RowsView& rows) -> Status {
      for (; next != wanted.end() && next->token < run.end; ++next) {
        std::memcpy(retrieved_.data() + next->slot * row.bytes(), rows.key(next->token - run.begin),
                    row.bytes());
      }
      return {};
    }));
    PREFIXD_CHECK(next == wanted.end());  // the runs were ascending and left nothing out
    return {};
  }

  const Inputs& in_;
  const uint32_t most_;
  const LayerGeometry& layer_geometry_;
  const LayerShape shape_;
  const uint32_t layer_, kv_head_, n_;
  const TokenRange mid_;
  size_t count_ = 0;
  std::vector<float> queries_, exact_, scores_;  // [count][G][...]
  std::vector<GroupRanking> rankings_;           // [count]
  std::vector<uint16_t> clusters_;               // [mid]
  std::vector<std::byte> anchors_;
  std::vector<std::byte> retrieved_;  // [count][most] rows, best first
};

Status MeasureHead(const Inputs& in, uint32_t layer, uint32_t kv_head,
                   std::vector<HeadChoice>& out) {
  const KvGeometry& geometry = in.model.spec.geometry;
  const RowShape row = geometry.row(layer);
  const size_t head = in.model.heads.of(layer, kv_head);
  const uint32_t group = geometry.group_size(layer), mid_count = in.partition.mid.size();
  const Trials& trials = in.trials[layer];
  HeadSamples samples(in, layer, kv_head);
  PREFIXD_TRY(samples.Read());
  out.clear();
  for (double budget : trials.budgets) {
    out.push_back({layer, kv_head, EstimatorKind::kNone, budget, {}});
  }
  if (samples.count() == 0) return {};

  std::vector<float> y(size_t{group} * row.value_dim), lse(group), rho(group);
  std::optional<TokenFeatures> features;
  const bool phi = std::ranges::any_of(
      trials.all, [](const Trial& t) { return t.estimator.kind == EstimatorKind::kPhi; });
  if (phi && in.model.Summarised(layer)) {
    const SummaryKind kind = SummaryKind::Phi(in.model, *in.maps, in.context.options);
    if (kind.stored_features()) {
      PREFIXD_ASSIGN(features,
                     TokenFeatures::OfMid(in.context, in.model, *in.maps, kind.feature_format(),
                                          in.parts, in.partition.mid, head, nullptr));
    }
  }
  std::vector<uint32_t> ids;
  for (const Trial& trial : trials.all) {
    if (trial.estimator.kind != EstimatorKind::kNone && !in.model.Summarised(layer)) continue;
    const KeptSummary* kept = nullptr;
    if (const auto of = in.kept.find(trial.estimator.Kept()); of != in.kept.end()) {
      if (const auto it = of->second.find(head); it != of->second.end()) kept = it->second.get();
    }
    double sum = 0;
    for (size_t s = 0; s < samples.count(); ++s) {
      const GroupRanking& ranking = samples.ranking(s);
      const uint32_t k = std::min(trial.k, mid_count);
      GroupStepInput step;
      step.queries = samples.queries(s);
      step.group = group;
      step.layer = geometry.layers[layer];
      step.sinks = samples.sinks();
      step.tail = samples.tail();
      step.retrieved = samples.retrieved(s, k);
      const std::vector<Cut> cuts = ranking.Cuts(k);
      step.cuts = cuts;
      step.mid_count = mid_count;
      EstimatorInput input;
      if (kept && k < mid_count) {
        input.Attach(trial.estimator, kept->summary, in.maps, head, step);
        const auto best = std::span(ranking.best).first(k);
        if (trial.estimator.kind == EstimatorKind::kPhi && features) {
          ids.clear();
          for (uint32_t i : best) ids.push_back(in.partition.mid.begin + i);
          input.AttachFeatures(*features, ids, step);
        }
        if (trial.estimator.clustered()) input.AttachClusters(samples.clusters(), best, step);
        if (trial.estimator.kind == EstimatorKind::kScan) {
          input.AttachScan(samples.clusters(), samples.scores(s), best, step);
        }
      }
      PREFIXD_TRY(GroupStep(step, {y, lse, rho}));
      for (uint32_t g = 0; g < group; ++g) {
        const size_t at = size_t{g} * row.value_dim;
        sum += RelativeL1(std::span<const float>(y).subspan(at, row.value_dim),
                          samples.exact(s).subspan(at, row.value_dim));
      }
    }
    const double error = sum / double(samples.count() * group);
    if (std::isfinite(error)) out[trial.budget].errors.push_back({trial.estimator, error});
  }
  for (HeadChoice& choice : out) {
    OrderByPreference(choice.errors);
    if (!choice.errors.empty()) choice.chosen = choice.errors.front().estimator;
  }
  return {};
}

// Returns the configured estimators that this model supports, cheapest first.
std::vector<EstimatorVariant> Candidates(const RuntimeOptions& options, const RowShape& row,
                                         const FeatureMapSet* maps) {
  std::vector<EstimatorVariant> out = options.estimators;
  std::erase_if(out, [&](const EstimatorVariant& v) {
    return v.kind == EstimatorKind::kPhi && maps == nullptr;
  });
  std::stable_sort(out.begin(), out.end(), [&](const auto& a, const auto& b) {
    const auto cost = [&](const EstimatorVariant& v) {
      return EstimatorTokens(options, row, v, maps, 1);
    };
    return cost(a) < cost(b);
  });
  return out;
}

Trials TrialsOf(const RuntimeOptions& options, const RowShape& row, const FeatureMapSet* maps,
                std::span<const StoredPart> parts, uint32_t n_tokens) {
  Trials trials;
  if (row.bytes() == 0) return trials;  // the layer has no rows
  const auto candidates = Candidates(options, row, maps);
  const double row_bytes = storage::MeanRowBytes(parts, row);
  for (double budget : options.choice_budgets) {
    const size_t first = trials.all.size();
    for (const EstimatorVariant& estimator : candidates) {
      const double cost = EstimatorTokens(options, row, estimator, maps, row_bytes);
      const double token = RetrievedTokenCost(options, row, estimator, maps, row_bytes);
      if (auto plan = PlanBudget(n_tokens, options.anchors, budget, cost, 1, token); plan.ok()) {
        trials.all.push_back({trials.budgets.size(), estimator, plan->k});
        trials.most = std::max(trials.most, plan->k);
      }
    }
    if (trials.all.size() > first) trials.budgets.push_back(budget);
  }
  return trials;
}

}  // namespace

Result<std::vector<HeadChoice>> MeasureChoices(const DerivedContext& context, const Model& model,
                                               const storage::StoredPrefix& prefix,
                                               const QuerySamples& samples,
                                               WorkProgress& progress) {
  const RuntimeOptions& options = context.options;
  const KvGeometry& geometry = model.spec.geometry;
  const uint32_t cut = std::min(prefix.n_tokens(), LastQuarterBegin(samples.prompt_tokens));
  Inputs in{context,
            model,
            prefix,
            samples,
            model.MapsFor(prefix.n_tokens()),
            {},
            Partition::Of(cut, options.anchors),
            {},
            {}};
  for (uint32_t l = 0; l < geometry.n_layers; ++l) {
    in.trials.push_back(TrialsOf(options, geometry.row(l), in.maps, prefix.parts(), cut));
  }
  const size_t heads = HeadCount(model);
  if (samples.empty() || in.partition.mid.size() == 0 ||
      std::ranges::all_of(in.trials, [](const Trials& of) { return of.all.empty(); })) {
    progress.done += heads;
    return std::vector<HeadChoice>{};
  }
  PREFIXD_ASSIGN(in.parts, ChainParts(context.segments, prefix.info(), cut));
  HeadsOfVariants wanted;
  for (size_t head = 0; head < heads; ++head) {
    for (const Trial& trial : in.trials[model.heads.layer_of(head)].all) {
      std::vector<size_t>& of = wanted[trial.estimator.Kept()];
      if (of.empty() || of.back() != head) of.push_back(head);
    }
  }
  PREFIXD_ASSIGN(in.kept, LoadMaterialised({context, model, prefix, in.parts, in.partition.mid,
                                            in.maps, std::numeric_limits<uint64_t>::max(),
                                            WorkPriority::kBackground, nullptr},
                                           wanted));
  std::vector<std::vector<HeadChoice>> by_head(heads);
  const auto measure = [&](size_t head) -> Status {
    PREFIXD_TRY(progress.Check());
    const uint32_t layer = model.heads.layer_of(head), kv_head = model.heads.head_of(head);
    if (geometry.layers[layer].sliding_window == 0) {
      PREFIXD_TRY(MeasureHead(in, layer, kv_head, by_head[head]));
    }
    ++progress.done;
    return {};
  };
  PREFIXD_TRY(context.pool.ParallelFor(heads, measure, WorkPriority::kBackground));
  std::vector<HeadChoice> choices;
  for (const auto& of_head : by_head) choices.insert(choices.end(), of_head.begin(), of_head.end());
  return choices;
}

}  // namespace prefixd
