#include "runtime/step/plan.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "attention/step/budget.h"
#include "attention/step/spread.h"
#include "runtime/indexes/indexes.h"
#include "runtime/step/check_policy.h"
#include "runtime/summaries/head_choice.h"
#include "storage/segment/stored_part.h"

namespace prefixd {
namespace {

// Returns the largest k such that k tokens, and the neighbours of their best third, are at most
// `tokens`.
uint32_t WithNeighbours(uint32_t tokens, uint32_t dilation) {
  auto k = static_cast<uint32_t>(tokens / (1 + 2.0 * dilation / 3));
  while (k < tokens && uint64_t{k} + 1 + 2 * uint64_t{dilation} * ((k + 1) / 3) <= tokens) ++k;
  return k;
}

// Whether a search yields the score of every candidate, as the scan estimator needs.
bool ScoresAll(index::IndexKind selector) {
  return selector == index::IndexKind::kExact || selector == index::IndexKind::kCodes;
}

class Planner {
 public:
  // choices: those of the prefix, where the policy leaves the estimator to them.
  Planner(const RuntimeOptions& options, const PreparedPrefix& prefix, const StepPolicy& policy,
          index::IndexKind selector, std::span<const HeadChoice> choices)
      : options_(options),
        prefix_(prefix),
        model_(*prefix.model()),
        policy_(policy),
        selector_(selector),
        choices_(ByHead(choices)),
        budgets_(prefix.heads(), policy.budget) {
    for (uint32_t l = 0; l < model_.spec.geometry.n_layers; ++l) {
      row_bytes_.push_back(
          storage::MeanRowBytes(prefix.stored().parts(), model_.spec.geometry.row(l)));
    }
    for (const StepPolicy::Fixed& fixed : policy.fixed) {
      if (fixed.estimator.kind == EstimatorKind::kAuto) continue;
      const size_t head = model_.heads.of(fixed.layer, fixed.kv_head);
      fixed_.emplace(head, fixed.estimator);
    }
    if (policy.spread && !policy.k) Spread();
  }

  bool tuned() const { return !choices_.empty(); }

  // Charges what a head's summary turned out to keep beyond what all of its kind do. A choice whose
  // summary the budget cannot pay for then gives way to none.
  Status Charge(size_t head, HeadPlan& plan) const {
    const uint32_t layer = prefix_.layer_of(head);
    const double apart = plan.summary ? ApartTokens(plan.summary->summary, row_bytes_[layer]) : 0;
    if (apart == 0) return {};
    auto charged = Fixed(plan.estimator, head, apart);
    const bool chosen = policy_.estimator.kind == EstimatorKind::kAuto && !fixed_.contains(head);
    if (!charged.ok() && chosen) charged = Fixed(EstimatorKind::kNone, head);
    if (!charged.ok()) return charged.error();
    if (charged->estimator == plan.estimator) charged->summary = std::move(plan.summary);
    plan = *std::move(charged);
    return {};
  }

  Result<HeadPlan> Plan(size_t head) const {
    if (const auto fixed = fixed_.find(head); fixed != fixed_.end()) {
      return Fixed(fixed->second, head);
    }
    return policy_.estimator.kind == EstimatorKind::kAuto ? Auto(head)
                                                          : Fixed(policy_.estimator, head);
  }

 private:
  // apart: see ApartTokens.
  Result<HeadPlan> Fixed(EstimatorVariant estimator, size_t of_head, double apart = 0) const {
    const uint32_t layer = prefix_.layer_of(of_head);
    if (!model_.Summarised(layer) || prefix_.partition().mid.size() == 0) {
      estimator = EstimatorKind::kNone;
    }
    // Keys in pruned lists have no scores, so moments take the scan's place.
    if (estimator.kind == EstimatorKind::kScan && !ScoresAll(selector_)) {
      estimator = EstimatorKind::kMoment;
    }
    HeadPlan head{estimator, 0, 0, nullptr, false};
    head.watched = estimator.kind == EstimatorKind::kNone && model_.Summarised(layer) &&
                   (policy_.adaptive || policy_.report_missing);
    const RowShape row = model_.spec.geometry.row(layer);
    const double row_bytes = row_bytes_[layer];
    const double cost =
        EstimatorTokens(options_, row, head.reads(), prefix_.maps(), row_bytes) + apart;
    const double token = RetrievedTokenCost(options_, row, estimator, prefix_.maps(), row_bytes);
    if (policy_.k) {
      head.k = std::min(*policy_.k, prefix_.partition().mid.size());
      head.summary_tokens = cost / policy_.l_gen;
      return head;
    }
    PREFIXD_ASSIGN(const auto plan, PlanBudget(prefix_.n_tokens(), options_.anchors,
                                               budgets_[of_head], cost, policy_.l_gen, token));
    head.k = policy_.sharing.on() ? WithNeighbours(plan.k, policy_.sharing.dilation) : plan.k;
    head.summary_tokens = plan.estimator_tokens;
    return head;
  }

  // Whether this prefix and selector have what the measured estimator reads. Moments are always
  // stored, or made on the spot.
  bool Available(const EstimatorError& measured) const {
    const EstimatorVariant& estimator = measured.estimator;
    if (estimator.kind == EstimatorKind::kPhi) return prefix_.has_phi_caches();
    if (estimator.kind == EstimatorKind::kScan) {
      const bool every_key = !policy_.sharing.on();
      const bool codes = selector_ == index::IndexKind::kCodes;
      return ScoresAll(selector_) && IsChosen(estimator, codes) && every_key &&
             prefix_.has_clusters();
    }
    return !estimator.clustered() || prefix_.has_clusters();
  }

  // Takes the preferred estimator measured at the nearest budget among those that this budget can
  // pay for while it still retrieves: the measurements included retrieval, and an estimate cannot
  // replace the needle that the last tokens find.
  Result<HeadPlan> Auto(size_t head) const {
    std::vector<EstimatorVariant> order;
    if (const HeadChoice* choice = Nearest(head)) {
      for (const EstimatorError& e : choice->errors) {
        if (Available(e)) order.push_back(e.estimator);
      }
    } else {
      order = {EstimatorKind::kMoment};
    }
    auto plain = Fixed(EstimatorKind::kNone, head);  // where even this fails: its error
    for (const EstimatorVariant& estimator : order) {
      auto plan = Fixed(estimator, head);
      if (plan.ok() && (plan->k > 0 || !plain.ok() || plain->k == 0)) return plan;
    }
    return plain;
  }

  // Returns what was measured at the budget nearest to this head's, by ratio; null: nothing was.
  const HeadChoice* Nearest(size_t head) const {
    const auto own = choices_.find(head);
    if (own == choices_.end()) return nullptr;
    const double n = prefix_.n_tokens();
    const double budget =
        policy_.k ? (*policy_.k + prefix_.partition().anchor_count()) / n : budgets_[head];
    const HeadChoice* nearest = nullptr;
    const auto distance = [&](const HeadChoice& c) {
      return std::abs(std::log(c.budget / budget));
    };
    for (const HeadChoice& choice : own->second) {
      if (!nearest || distance(choice) < distance(*nearest)) nearest = &choice;
    }
    return nearest;
  }

  std::map<size_t, std::vector<HeadChoice>> ByHead(std::span<const HeadChoice> choices) const {
    std::map<size_t, std::vector<HeadChoice>> heads;
    for (const HeadChoice& choice : choices) {
      const bool known = choice.layer < model_.heads.layers() &&
                         choice.kv_head < model_.heads.heads_in(choice.layer);
      if (known) heads[model_.heads.of(choice.layer, choice.kv_head)].push_back(choice);
    }
    return heads;
  }

  // What this head was measured to lose, by tokens beside the anchors, with the estimators that
  // would be chosen. Empty, so that it keeps its share, where the policy names its estimator.
  std::vector<LossCurve::Point> Curve(size_t head) const {
    std::vector<LossCurve::Point> points;
    const auto own = choices_.find(head);
    if (own == choices_.end() || fixed_.contains(head)) return points;
    for (const HeadChoice& choice : own->second) {
      const auto of = std::ranges::find_if(choice.errors,
                                           [&](const EstimatorError& e) { return Available(e); });
      const double tokens = choice.budget * prefix_.n_tokens() - prefix_.partition().anchor_count();
      if (of != choice.errors.end() && tokens >= 1)
        points.push_back({tokens, of->error * of->error});
    }
    std::ranges::sort(points, {}, &LossCurve::Point::tokens);
    return points;
  }

  // Sets each head's budget. Tokens move between heads whose tokens are of one size.
  void Spread() {
    const double n = prefix_.n_tokens();
    const uint32_t anchors = prefix_.partition().anchor_count();
    const auto equal = PlanBudget(prefix_.n_tokens(), options_.anchors, policy_.budget, 0);
    if (!equal.ok() || equal->total_tokens <= anchors) return;
    std::map<double, std::vector<size_t>> heads;  // by the bytes of a token
    for (size_t head = 0; head < budgets_.size(); ++head) {
      const uint32_t layer = prefix_.layer_of(head);
      if (model_.spec.geometry.layers[layer].sliding_window == 0) {
        heads[row_bytes_[layer]].push_back(head);
      }
    }
    for (const auto& [bytes, alike] : heads) {
      std::vector<LossCurve> curves;
      for (const size_t head : alike) {
        curves.push_back({Curve(head), equal->total_tokens - anchors});
      }
      const std::vector<uint32_t> tokens = SpreadTokens(curves);
      for (size_t i = 0; i < alike.size(); ++i) {
        if (tokens[i] != curves[i].equal) budgets_[alike[i]] = (tokens[i] + anchors) / n;
      }
    }
  }

  const RuntimeOptions& options_;
  const PreparedPrefix& prefix_;
  const Model& model_;
  const StepPolicy& policy_;
  const index::IndexKind selector_;
  std::vector<double> row_bytes_;  // [layers]
  const std::map<size_t, std::vector<HeadChoice>> choices_;
  std::vector<double> budgets_;  // [heads], fractions of the prefix
  std::map<size_t, EstimatorVariant> fixed_;
};

// Explains which estimator replaces a scan that the policy names but the selector cannot serve;
// else empty.
std::string WithoutScan(const SessionPlan& plan) {
  const auto scans = [](const EstimatorVariant& e) { return e.kind == EstimatorKind::kScan; };
  const bool asked = scans(plan.policy.estimator) ||
                     std::ranges::any_of(plan.policy.fixed, scans, &StepPolicy::Fixed::estimator);
  if (!asked || ScoresAll(plan.selector)) return "";
  return "moment in place of scan, for which selector " +
         std::string(index::IndexName(plan.selector)) + " scores too few keys (use codes or exact)";
}

// Lists estimators and their heads by name: "none 3, moment/r8 12, phi (length 8192) 1".
std::string Describe(const PreparedPrefix& prefix, const SessionPlan& plan, bool tuned) {
  const auto name = [&](const EstimatorVariant& estimator) {
    const bool phi = estimator.kind == EstimatorKind::kPhi && prefix.maps();
    return estimator.Name() +
           (phi ? " (length " + std::to_string(prefix.maps()->length) + ")" : "");
  };
  const bool automatic = plan.policy.estimator.kind == EstimatorKind::kAuto;
  const std::string without_scan = WithoutScan(plan);
  if (!automatic && plan.policy.fixed.empty()) {
    return without_scan.empty() ? name(plan.policy.estimator) : without_scan;
  }
  std::map<EstimatorVariant, size_t> heads;
  for (size_t head = 0; head < plan.heads.size(); ++head) {
    if (prefix.model()->spec.geometry.layers[prefix.layer_of(head)].sliding_window > 0) continue;
    ++heads[plan.heads[head].estimator];
  }
  if (automatic && !tuned && plan.policy.fixed.empty()) {
    return heads.contains(EstimatorKind::kMoment) ? "moment, untuned" : "none, untuned";
  }
  std::string text;
  for (const auto& [estimator, count] : heads) {
    text +=
        (text.empty() ? "chosen per head: " : ", ") + name(estimator) + " " + std::to_string(count);
  }
  return without_scan.empty() ? text : text + "; " + without_scan;
}

// Defaults to codes where there are some, then IVF; an index that the policy names must exist, but
// for own tokens that moved: their parts are too small for one at first.
Result<index::IndexKind> ChooseSelector(const RuntimeOptions& options, const PreparedPrefix& prefix,
                                        const StepPolicy& policy) {
  using index::IndexKind;
  const auto usual = [&] {
    for (const IndexKind kind : {IndexKind::kCodes, IndexKind::kIvf}) {
      const bool large =
          kind == IndexKind::kCodes || prefix.partition().mid.size() >= options.ivf_min_tokens;
      if (large && prefix.has_index(kind)) return kind;
    }
    return IndexKind::kExact;
  };
  if (policy.selector == "auto") return usual();
  PREFIXD_ASSIGN(const IndexKind kind, index::IndexFromName(policy.selector));
  if (kind == IndexKind::kExact || prefix.has_index(kind)) return kind;
  if (prefix.compressed()) {
    return Error{
        Code::kFailedPrecondition,
        "this prefix is compressed and has no indexes: the keys that are left are searched "
        "exactly; use selector auto or exact"};
  }
  if (prefix.stored().info().live) return usual();
  return Error{Code::kFailedPrecondition,
               "this prefix has no index '" + policy.selector + "' (with ingest.build_" +
                   policy.selector + " one is built in the background for segments of at least " +
                   std::to_string(IndexMinTokens(options, kind)) +
                   " tokens); wait until it is ready or use selector exact"};
}

}  // namespace

Result<std::shared_ptr<SessionPlan>> MakePlan(const RuntimeOptions& options, Prefetcher& prefetcher,
                                              std::shared_ptr<PreparedPrefix> prefix,
                                              const StepPolicy& policy,
                                              std::vector<storage::ReadStats>* reads,
                                              WorkPriority priority) {
  PREFIXD_TRY(CheckPolicy(options, policy));
  auto plan = std::make_shared<SessionPlan>();
  plan->policy = policy;
  plan->prefix = prefix;
  if (policy.mode == StepMode::kFull && prefix->compressed()) {
    return storage::Compressed(prefix->stored().info().id);
  }
  if (policy.mode == StepMode::kFull) plan->estimator = "exact";
  if (policy.mode == StepMode::kAnchors) plan->estimator = "anchors only";
  if (policy.mode != StepMode::kRetrieve) return plan;

  const KvGeometry& geometry = prefix->model()->spec.geometry;
  PREFIXD_TRY(CheckFixed(policy, prefix->model()->heads));
  uint64_t prefetched_bytes = 0;
  if (policy.prefetch.on()) {
    uint64_t heads = 0;
    for (uint32_t l = 0; l < geometry.n_layers; ++l) {
      if (geometry.layers[l].sliding_window == 0) heads += geometry.layer(l).n_kv_heads;
    }
    PREFIXD_ASSIGN(prefetched_bytes,
                   PrefetchBytes(heads, policy.prefetch, options.host_tier_bytes));
  }
  // Summaries that the policy names must exist; this error comes before any about the budget.
  PREFIXD_TRY(prefix->CheckStored(policy.estimator));
  PREFIXD_ASSIGN(plan->selector, ChooseSelector(options, *prefix, policy));
  std::vector<HeadChoice> choices;
  if (policy.estimator.kind == EstimatorKind::kAuto) {
    PREFIXD_ASSIGN(choices, prefix->Choices());
  }
  const Planner planner(options, *prefix, policy, plan->selector, choices);
  HeadsOfVariants wanted;
  plan->heads.resize(prefix->heads());
  for (size_t head = 0; head < plan->heads.size(); ++head) {
    if (geometry.layers[prefix->layer_of(head)].sliding_window > 0) continue;
    PREFIXD_ASSIGN(plan->heads[head], planner.Plan(head));
    wanted[plan->heads[head].reads().Kept()].push_back(head);
  }
  PREFIXD_ASSIGN(KeptSummaries kept, prefix->Summaries(wanted, priority, reads));
  for (auto& [variant, heads] : kept) {
    for (auto& [head, summary] : heads) {
      plan->heads[head].summary = std::move(summary);
      PREFIXD_TRY(planner.Charge(head, plan->heads[head]));
    }
  }
  if (policy.sharing.on()) {
    std::vector<uint32_t> groups;
    for (size_t head = 0; head < prefix->heads(); ++head) {
      groups.push_back(geometry.group_size(prefix->layer_of(head)));
    }
    plan->shared = std::make_unique<SharedSets>(policy.sharing, groups, prefix->account());
  }
  if (prefetched_bytes > 0) {
    plan->ahead = std::make_unique<SessionPrefetch>(prefetcher, *prefix, policy, prefetched_bytes);
  }
  plan->estimator = Describe(*prefix, *plan, planner.tuned());
  return plan;
}

}  // namespace prefixd
