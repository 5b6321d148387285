#include "runtime/ingest/choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "attention/reference/diagnostics.h"
#include "attention/step/budget.h"
#include "attention/step/step.h"
#include "runtime/indexes/indexes.h"
#include "runtime/ingest/head_samples.h"
#include "runtime/step/estimator_input.h"
#include "runtime/summaries/materialised_summaries.h"
#include "runtime/summaries/token_features.h"
#include "storage/segment/stored_part.h"

namespace prefixd {
namespace {

// What a budget leaves beside an estimator. apart: see ApartTokens.
Result<BudgetPlan> PlanOf(const RuntimeOptions& options, const RowShape& row,
                          const EstimatorVariant& estimator, const FeatureMapSet* maps,
                          double row_bytes, uint32_t n_tokens, double budget, double apart = 0) {
  return PlanBudget(n_tokens, options.anchors, budget,
                    EstimatorTokens(options, row, estimator, maps, row_bytes) + apart, 1,
                    RetrievedTokenCost(options, row, estimator, maps, row_bytes));
}

// A trial reads about so many rows, with so many queries at least where there are as many.
constexpr size_t kTrialRows = 16384, kLeastTried = 4;

// Tries estimators on one head.
class HeadTrials {
 public:
  HeadTrials(const ChoiceInputs& in, uint32_t layer, uint32_t kv_head)
      : in_(in),
        layer_(layer),
        head_(in.model.heads.of(layer, kv_head)),
        row_(in.model.spec.geometry.row(layer)),
        group_(in.model.spec.geometry.group_size(layer)),
        mid_count_(in.partition.mid.size()),
        trials_(in.trials[layer]),
        samples_(in, layer, kv_head),
        y_(size_t{group_} * row_.value_dim),
        lse_(group_),
        rho_(group_) {}

  Status Measure(const WorkProgress& progress, std::vector<HeadChoice>& out);

 private:
  const KeptSummary* Kept(const EstimatorVariant& estimator) const {
    const auto of = in_.kept.find(estimator.Kept());
    if (of == in_.kept.end()) return nullptr;
    const auto it = of->second.find(head_);
    return it == of->second.end() ? nullptr : it->second.get();
  }
  Status LoadFeatures();
  Result<EstimatorError> Try(const Trial& trial, uint32_t k, const KeptSummary* kept);
  void ByRank(const Trial& trial, size_t s, uint32_t k, const KeptSummary* kept,
              EstimatorInput& input, GroupStepInput& step);

  const ChoiceInputs& in_;
  const uint32_t layer_;
  const size_t head_;
  const RowShape row_;
  const uint32_t group_, mid_count_;
  const Trials& trials_;
  HeadSamples samples_;
  std::optional<TokenFeatures> features_;
  std::vector<float> y_, lse_, rho_;
  // Of the step that is tried.
  std::vector<Cut> cuts_;
  std::vector<uint32_t> ids_;
};

Status HeadTrials::LoadFeatures() {
  const bool phi = std::ranges::any_of(
      trials_.all, [](const Trial& t) { return t.estimator.kind == EstimatorKind::kPhi; });
  if (!phi || !in_.model.Summarised(layer_)) return {};
  const SummaryKind kind = SummaryKind::Phi(in_.model, *in_.maps, in_.context.options);
  if (!kind.stored_features()) return {};
  PREFIXD_ASSIGN(features_,
                 TokenFeatures::OfMid(in_.context, in_.model, *in_.maps, kind.feature_format(),
                                      in_.parts, in_.partition.mid, head_, nullptr));
  return {};
}

Status HeadTrials::Measure(const WorkProgress& progress, std::vector<HeadChoice>& out) {
  PREFIXD_TRY(samples_.Read());
  out.clear();
  for (double budget : trials_.budgets) {
    out.push_back({layer_, in_.model.heads.head_of(head_), EstimatorKind::kNone, budget, {}});
  }
  if (samples_.count() == 0) return {};
  PREFIXD_TRY(LoadFeatures());
  for (const Trial& trial : trials_.all) {
    PREFIXD_TRY(progress.Check());
    if (trial.estimator.kind != EstimatorKind::kNone && !in_.model.Summarised(layer_)) continue;
    const KeptSummary* kept = Kept(trial.estimator);
    uint32_t k = std::min(trial.k, mid_count_);
    if (kept && ApartTokens(kept->summary, trials_.row_bytes) > 0) {
      const auto less =
          PlanOf(in_.context.options, row_, trial.estimator, in_.maps, trials_.row_bytes,
                 in_.partition.tail.end, trials_.budgets[trial.budget],
                 ApartTokens(kept->summary, trials_.row_bytes));
      if (!less.ok()) continue;
      k = less->k;
    }
    std::vector<EstimatorError>& errors = out[trial.budget].errors;
    PREFIXD_ASSIGN(const EstimatorError error, Try(trial, k, kept));
    if (std::isfinite(error.error)) errors.push_back(error);
  }
  for (HeadChoice& choice : out) {
    OrderByPreference(choice.errors);
    const auto first = FirstOf(choice.errors, in_.has_codes);
    if (first != choice.errors.end()) choice.chosen = first->estimator;
  }
  return {};
}

Result<EstimatorError> HeadTrials::Try(const Trial& trial, uint32_t k, const KeptSummary* kept) {
  double sum = 0;
  // Large budgets are tried with fewer queries, spread over them all: the same for all estimators.
  const size_t all = samples_.count();
  const auto rows = static_cast<size_t>(trials_.budgets[trial.budget] * in_.partition.tail.end);
  const size_t step_by = std::max<size_t>(1, std::min(all * rows / kTrialRows, all / kLeastTried));
  size_t tried = 0;
  for (size_t s = 0; s < all; s += step_by, ++tried) {
    GroupStepInput step;
    step.queries = samples_.queries(s);
    step.group = group_;
    step.layer = in_.model.spec.geometry.layers[layer_];
    step.sinks = samples_.sinks();
    step.tail = samples_.tail();
    step.mid_count = mid_count_;
    EstimatorInput input;
    ByRank(trial, s, k, kept, input, step);
    PREFIXD_TRY(GroupStep(step, {y_, lse_, rho_}));
    for (uint32_t g = 0; g < group_; ++g) {
      const size_t at = size_t{g} * row_.value_dim;
      sum += RelativeL1(std::span<const float>(y_).subspan(at, row_.value_dim),
                        samples_.exact(s).subspan(at, row_.value_dim));
    }
  }
  return EstimatorError{trial.estimator, sum / static_cast<double>(tried * group_)};
}

void HeadTrials::ByRank(const Trial& trial, size_t s, uint32_t k, const KeptSummary* kept,
                        EstimatorInput& input, GroupStepInput& step) {
  const GroupRanking& ranking = samples_.ranking(s);
  step.retrieved = samples_.retrieved(s, k);
  cuts_ = ranking.Cuts(k);
  step.cuts = cuts_;
  if (!kept || k >= mid_count_) return;
  input.Attach(trial.estimator, kept->summary, in_.maps, head_, step);
  const auto best = std::span(ranking.best).first(k);
  if (trial.estimator.kind == EstimatorKind::kPhi && features_) {
    ids_.clear();
    for (uint32_t i : best) ids_.push_back(in_.partition.mid.begin + i);
    input.AttachFeatures(*features_, ids_, step);
  }
  if (trial.estimator.clustered()) input.AttachClusters(samples_.clusters(), best, step);
  if (trial.estimator.kind == EstimatorKind::kScan) {
    input.AttachScan(samples_.clusters(), samples_.scores(s), best, step);
  }
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
  trials.row_bytes = storage::MeanRowBytes(parts, row);
  for (double budget : options.choice_budgets) {
    const size_t first = trials.all.size();
    for (const EstimatorVariant& estimator : candidates) {
      if (auto plan = PlanOf(options, row, estimator, maps, trials.row_bytes, n_tokens, budget);
          plan.ok()) {
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
  ChoiceInputs in{context,
                  model,
                  prefix,
                  samples,
                  model.MapsFor(prefix.n_tokens()),
                  {},
                  Partition::Of(cut, options.anchors),
                  {},
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
  in.has_codes = HasCodes(context, in.parts, in.partition.mid);
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
      PREFIXD_TRY(HeadTrials(in, layer, kv_head).Measure(progress, by_head[head]));
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
