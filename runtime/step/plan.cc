#include "runtime/step/plan.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "attention/step/budget.h"
#include "runtime/indexes/indexes.h"
#include "runtime/prefix/visible_mid.h"
#include "runtime/summaries/head_choice.h"
#include "storage/segment/stored_part.h"

namespace prefixd {
namespace {

constexpr uint32_t kMostBlock = 256, kMostDilation = 16;
constexpr uint32_t kMostReach = 64, kLeastPrefetchMib = 4, kMostPrefetchMib = 65536;

Status CheckSharing(const StepPolicy& policy) {
  const StepPolicy::Sharing& sharing = policy.sharing;
  if (sharing.block == 0 || sharing.block > kMostBlock) {
    return InvalidArgument("sharing.block is a number of steps from 1 (every step retrieves) to " +
                           std::to_string(kMostBlock) + ", not " + std::to_string(sharing.block));
  }
  if (!(sharing.similarity >= -1 && sharing.similarity <= 1)) {
    return InvalidArgument("sharing.similarity is a cosine from -1 to 1, not " +
                           std::to_string(sharing.similarity));
  }
  if (sharing.dilation > kMostDilation) {
    return InvalidArgument("sharing.dilation is at most " + std::to_string(kMostDilation) +
                           " tokens, not " + std::to_string(sharing.dilation));
  }
  if (!sharing.on()) return {};
  if (policy.mode != StepMode::kRetrieve) {
    return InvalidArgument("mode '" + std::string(StepModeName(policy.mode)) +
                           "' retrieves nothing that steps could share; use mode retrieve, or "
                           "sharing.block 1");
  }
  if (policy.adaptive) {
    return InvalidArgument(
        "adaptive spreads tokens anew in every step, and a set that is shared keeps its size; use "
        "one of the two");
  }
  return {};
}

Status CheckWindow(const StepPolicy& policy) {
  const StepPolicy::Window& window = policy.window;
  if (!(window.phi > 0 && window.phi <= 1)) {
    return InvalidArgument("window.phi is above 0 and at most 1 (no window), not " +
                           std::to_string(window.phi));
  }
  if (!(window.alpha >= 0) || !std::isfinite(window.alpha)) {
    return InvalidArgument("window.alpha is a finite number of 0 or more, not " +
                           std::to_string(window.alpha));
  }
  if (window.on() && policy.mode != StepMode::kRetrieve) {
    return InvalidArgument("mode '" + std::string(StepModeName(policy.mode)) +
                           "' retrieves nothing that a window could narrow; use mode retrieve, or "
                           "window.phi 1");
  }
  return {};
}

Status CheckPrefetch(const RuntimeOptions& options, const StepPolicy& policy) {
  const StepPolicy::Prefetch& prefetch = policy.prefetch;
  for (const auto& [name, reach] :
       {std::pair("prefetch.forward", prefetch.forward), {"prefetch.back", prefetch.back}}) {
    if (reach <= kMostReach) continue;
    return InvalidArgument(std::string(name) + " is at most " + std::to_string(kMostReach) +
                           " tokens, not " + std::to_string(reach));
  }
  if (!prefetch.on()) return {};
  if (prefetch.max_mib < kLeastPrefetchMib || prefetch.max_mib > kMostPrefetchMib) {
    return InvalidArgument("prefetch.max_mib is from " + std::to_string(kLeastPrefetchMib) +
                           " to " + std::to_string(kMostPrefetchMib) + ", not " +
                           std::to_string(prefetch.max_mib) +
                           "; without prefetch.forward and prefetch.back nothing is prefetched");
  }
  if (policy.mode != StepMode::kRetrieve) {
    return InvalidArgument("mode '" + std::string(StepModeName(policy.mode)) +
                           "' retrieves nothing that could be prefetched; use mode retrieve, or no "
                           "prefetch");
  }
  if (options.host_tier_bytes == 0) {
    return Error{Code::kFailedPrecondition,
                 "rows are prefetched into the host tier, and this store has none "
                 "(store.host_tier_mib is 0); give it one, or use no prefetch"};
  }
  return {};
}

// The scan estimator needs the scores of all keys under each query.
Status CheckScan(const EstimatorVariant& estimator, const StepPolicy& policy) {
  if (estimator.kind != EstimatorKind::kScan || (!policy.sharing.on() && !policy.window.on())) {
    return {};
  }
  return InvalidArgument(
      "estimator scan is made of the scores that a search gives every key, and steps that share a "
      "set or see a window have none; use another estimator, or neither sharing nor window");
}

Status CheckPolicy(const StepPolicy& policy) {
  PREFIXD_TRY(CheckScan(policy.estimator, policy));
  for (const StepPolicy::Fixed& fixed : policy.fixed) {
    PREFIXD_TRY(CheckScan(fixed.estimator, policy));
  }
  if (!policy.k && !(policy.budget > 0 && policy.budget <= 1)) {
    return InvalidArgument("a step's budget is a fraction of the prefix in (0, 1], not " +
                           std::to_string(policy.budget));
  }
  if (policy.l_gen == 0) return InvalidArgument("l_gen must be at least 1 generated token");
  if (policy.selector != "auto" && !index::IndexFromName(policy.selector).ok()) {
    return InvalidArgument("no selector named '" + policy.selector +
                           "'; use auto, exact, codes or ivf");
  }
  PREFIXD_TRY(CheckSharing(policy));
  return CheckWindow(policy);
}

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
        choices_(Nearest(choices)) {
    for (uint32_t l = 0; l < model_.spec.geometry.n_layers; ++l) {
      row_bytes_.push_back(
          storage::MeanRowBytes(prefix.stored().parts(), model_.spec.geometry.row(l)));
    }
    for (const StepPolicy::Fixed& fixed : policy.fixed) {
      if (fixed.estimator.kind == EstimatorKind::kAuto) continue;
      const size_t head = model_.heads.of(fixed.layer, fixed.kv_head);
      fixed_.emplace(head, fixed.estimator);
    }
  }

  bool tuned() const { return !choices_.empty(); }

  Result<HeadPlan> Plan(size_t head) const {
    const uint32_t layer = prefix_.layer_of(head);
    if (const auto fixed = fixed_.find(head); fixed != fixed_.end()) {
      return Fixed(fixed->second, layer);
    }
    if (policy_.estimator.kind != EstimatorKind::kAuto) return Fixed(policy_.estimator, layer);
    const auto choice = choices_.find(head);
    return Auto(choice == choices_.end() ? nullptr : &choice->second, layer);
  }

 private:
  Result<HeadPlan> Fixed(EstimatorVariant estimator, uint32_t layer) const {
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
    const double cost = EstimatorTokens(options_, row, head.reads(), prefix_.maps(), row_bytes);
    const double token = RetrievedTokenCost(options_, row, estimator, prefix_.maps(), row_bytes);
    if (policy_.k) {
      head.k = std::min(*policy_.k, prefix_.partition().mid.size());
      head.summary_tokens = cost / policy_.l_gen;
      return head;
    }
    PREFIXD_ASSIGN(const auto plan, PlanBudget(prefix_.n_tokens(), options_.anchors, policy_.budget,
                                               cost, policy_.l_gen, token));
    head.k = policy_.sharing.on() ? WithNeighbours(plan.k, policy_.sharing.dilation) : plan.k;
    head.summary_tokens = plan.estimator_tokens;
    return head;
  }

  // Whether this prefix has what the estimator reads. Moments are always stored, or made on the
  // spot.
  bool Available(const EstimatorVariant& estimator) const {
    if (estimator.kind == EstimatorKind::kPhi) return prefix_.has_phi_caches();
    if (estimator.kind == EstimatorKind::kScan) {
      // An exact search computes every score anyway. With codes, the scores and their sums make a
      // step's search 2 to 3.5 times as long as a search that scans all blocks, and no budget
      // counts that: only policies that name scan get it there.
      const bool every_key = !policy_.sharing.on() && !policy_.window.on();
      return selector_ == index::IndexKind::kExact && every_key && prefix_.has_clusters();
    }
    return !estimator.clustered() || prefix_.has_clusters();
  }

  // Takes the preferred estimator measured at the nearest budget among those that this budget can
  // pay for while it still retrieves: the measurements included retrieval, and an estimate cannot
  // replace the needle that the last tokens find.
  Result<HeadPlan> Auto(const HeadChoice* choice, uint32_t layer) const {
    std::vector<EstimatorVariant> order;
    if (!choice) {
      order = {EstimatorKind::kMoment};
    } else {
      for (const EstimatorError& e : choice->errors) {
        if (Available(e.estimator)) order.push_back(e.estimator);
      }
    }
    auto plain = Fixed(EstimatorKind::kNone, layer);  // where even this fails: its error
    for (const EstimatorVariant& estimator : order) {
      auto plan = Fixed(estimator, layer);
      if (plan.ok() && (plan->k > 0 || !plain.ok() || plain->k == 0)) return plan;
    }
    return plain;
  }

  // Returns each head's choice measured at the budget nearest to this one, by ratio.
  std::map<size_t, HeadChoice> Nearest(std::span<const HeadChoice> choices) const {
    const double n = prefix_.n_tokens();
    const double budget =
        policy_.k ? (*policy_.k + prefix_.partition().anchor_count()) / n : policy_.budget;
    const auto distance = [&](const HeadChoice& c) {
      return std::abs(std::log(c.budget / budget));
    };
    std::map<size_t, HeadChoice> nearest;
    for (const HeadChoice& choice : choices) {
      const bool known = choice.layer < model_.heads.layers() &&
                         choice.kv_head < model_.heads.heads_in(choice.layer);
      if (!known) continue;
      const size_t head = model_.heads.of(choice.layer, choice.kv_head);
      const auto [it, fresh] = nearest.emplace(head, choice);
      if (!fresh && distance(choice) < distance(it->second)) it->second = choice;
    }
    return nearest;
  }

  const RuntimeOptions& options_;
  const PreparedPrefix& prefix_;
  const Model& model_;
  const StepPolicy& policy_;
  const index::IndexKind selector_;
  std::vector<double> row_bytes_;  // [layers]
  const std::map<size_t, HeadChoice> choices_;
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

// Defaults to codes where there are some, then IVF; an index that the policy names must exist.
Result<index::IndexKind> ChooseSelector(const RuntimeOptions& options, const PreparedPrefix& prefix,
                                        const StepPolicy& policy) {
  using index::IndexKind;
  if (policy.selector == "auto") {
    for (const IndexKind kind : {IndexKind::kCodes, IndexKind::kIvf}) {
      const bool large =
          kind == IndexKind::kCodes || prefix.partition().mid.size() >= options.ivf_min_tokens;
      if (large && prefix.has_index(kind)) return kind;
    }
    return IndexKind::kExact;
  }
  PREFIXD_ASSIGN(const IndexKind kind, index::IndexFromName(policy.selector));
  if (kind == IndexKind::kExact || prefix.has_index(kind)) return kind;
  return Error{Code::kFailedPrecondition,
               "this prefix has no index '" + policy.selector + "' (with ingest.build_" +
                   policy.selector + " one is built in the background for segments of at least " +
                   std::to_string(IndexMinTokens(options, kind)) +
                   " tokens); wait until it is ready or use selector exact"};
}

Status CheckFixed(const StepPolicy& policy, const HeadIndex& heads) {
  if (policy.fixed.size() > heads.count()) {
    return InvalidArgument("estimators are fixed for " + std::to_string(policy.fixed.size()) +
                           " heads, and the model has " + std::to_string(heads.count()));
  }
  for (const StepPolicy::Fixed& fixed : policy.fixed) {
    if (fixed.layer >= heads.layers() || fixed.kv_head >= heads.heads_in(fixed.layer)) {
      return InvalidArgument("an estimator is fixed for layer " + std::to_string(fixed.layer) +
                             ", KV head " + std::to_string(fixed.kv_head) +
                             ", which the model has not");
    }
  }
  return {};
}

}  // namespace

TokenRange SessionPlan::Candidates(size_t head) const {
  return VisibleMid(policy.window, prefix->layer_of(head), prefix->model()->spec.geometry.n_layers,
                    prefix->partition());
}

Result<std::shared_ptr<const SessionPlan>> MakePlan(const RuntimeOptions& options,
                                                    Prefetcher& prefetcher,
                                                    std::shared_ptr<PreparedPrefix> prefix,
                                                    const StepPolicy& policy,
                                                    std::vector<storage::ReadStats>* reads) {
  PREFIXD_TRY(CheckPolicy(policy));
  PREFIXD_TRY(CheckPrefetch(options, policy));
  auto plan = std::make_shared<SessionPlan>();
  plan->policy = policy;
  plan->prefix = prefix;
  if (policy.mode == StepMode::kFull) plan->estimator = "exact";
  if (policy.mode == StepMode::kAnchors) plan->estimator = "anchors only";
  if (policy.mode != StepMode::kRetrieve) return std::shared_ptr<const SessionPlan>(plan);

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
  PREFIXD_ASSIGN(KeptSummaries kept, prefix->Summaries(wanted, reads));
  for (auto& [variant, heads] : kept) {
    for (auto& [head, summary] : heads) plan->heads[head].summary = std::move(summary);
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
  return std::shared_ptr<const SessionPlan>(plan);
}

}  // namespace prefixd
