#include "runtime/plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "runtime/choice.h"

namespace prefixd {
namespace {

Status CheckPolicy(const StepPolicy& policy) {
  if (!policy.k && !(policy.budget > 0 && policy.budget <= 1)) {
    return InvalidArgument("a step's budget is a fraction of the prefix in (0, 1], not " +
                           std::to_string(policy.budget));
  }
  if (policy.l_gen == 0) return InvalidArgument("l_gen must be at least 1 generated token");
  switch (policy.estimator) {
    case EstimatorKind::kNone:
    case EstimatorKind::kPhi:
    case EstimatorKind::kMoment:
    case EstimatorKind::kAuto:
      break;
    default:
      return InvalidArgument("estimator '" + std::string(EstimatorName(policy.estimator)) +
                             "' is not built by this store; use none, phi, moment or auto");
  }
  if (policy.selector != "auto" && policy.selector != "exact" && policy.selector != "ivf") {
    return InvalidArgument("no selector named '" + policy.selector + "'; use auto, exact or ivf");
  }
  return {};
}

class Planner {
 public:
  Planner(const Rooms& rooms, const PreparedPrefix& prefix, const StepPolicy& policy)
      : rooms_(rooms), prefix_(prefix), model_(*prefix.model()), policy_(policy) {}

  Result<HeadPlan> Fixed(EstimatorKind estimator, uint32_t layer) const {
    if (!model_.Summarised(layer)) estimator = EstimatorKind::kNone;
    const double cost =
        EstimatorTokens(model_, estimator, rooms_.options->moment_cross, prefix_.maps());
    if (policy_.k) {
      return HeadPlan{estimator, std::min(*policy_.k, prefix_.partition().mid.size()),
                      cost / policy_.l_gen};
    }
    PREFIXD_ASSIGN(const auto plan, PlanBudget(prefix_.n_tokens(), rooms_.options->anchors,
                                               policy_.budget, cost, policy_.l_gen));
    return HeadPlan{estimator, plan.k, plan.estimator_tokens};
  }

  // The best of what was measured at the nearest budget, of those that this budget can pay for.
  Result<HeadPlan> Auto(const HeadChoice* choice, uint32_t layer) const {
    std::vector<EstimatorKind> order;
    if (!choice) {
      order = {EstimatorKind::kMoment, EstimatorKind::kNone};
    } else {
      std::vector<std::pair<double, EstimatorKind>> measured;
      const auto add = [&](double error, EstimatorKind estimator) {
        if (!std::isnan(error)) measured.emplace_back(error, estimator);
      };
      add(choice->error_none, EstimatorKind::kNone);
      add(choice->error_moment, EstimatorKind::kMoment);
      if (prefix_.has_phi_caches()) add(choice->error_phi, EstimatorKind::kPhi);
      std::stable_sort(measured.begin(), measured.end(),
                       [](const auto& a, const auto& b) { return a.first < b.first; });
      for (const auto& [error, estimator] : measured) order.push_back(estimator);
      order.push_back(EstimatorKind::kNone);
    }
    for (EstimatorKind estimator : order) {
      if (auto plan = Fixed(estimator, layer); plan.ok()) return plan;
    }
    return Fixed(EstimatorKind::kNone, layer);  // says why not
  }

  // The choice of each head measured nearest to this budget, by ratio.
  std::map<size_t, HeadChoice> NearestChoices() const {
    const double n = prefix_.n_tokens();
    const double budget =
        policy_.k ? (*policy_.k + prefix_.partition().anchor_count()) / n : policy_.budget;
    const auto distance = [&](const HeadChoice& c) {
      return std::abs(std::log(c.budget / budget));
    };
    std::map<size_t, HeadChoice> nearest;
    for (const HeadChoice& choice : prefix_.Choices()) {
      const size_t head = size_t{choice.layer} * model_.spec.geometry.n_kv_heads + choice.kv_head;
      const auto [it, fresh] = nearest.emplace(head, choice);
      if (!fresh && distance(choice) < distance(it->second)) it->second = choice;
    }
    return nearest;
  }

 private:
  const Rooms& rooms_;
  const PreparedPrefix& prefix_;
  const Model& model_;
  const StepPolicy& policy_;
};

std::string Describe(const PreparedPrefix& prefix, const SessionPlan& plan, bool tuned) {
  const std::string phi =
      "phi" + (prefix.maps() ? " (length " + std::to_string(prefix.maps()->length) + ")" : "");
  switch (plan.policy.estimator) {
    case EstimatorKind::kNone:
      return "none";
    case EstimatorKind::kMoment:
      return "moment";
    case EstimatorKind::kPhi:
      return phi;
    case EstimatorKind::kCentroid:
    case EstimatorKind::kClusterMoment:
    case EstimatorKind::kScan:
      return std::string(EstimatorName(plan.policy.estimator));
    case EstimatorKind::kAuto:
      break;
  }
  size_t none = 0, moment = 0, with_phi = 0;
  for (size_t head = 0; head < plan.heads.size(); ++head) {
    if (prefix.model()->spec.geometry.layers[prefix.layer_of(head)].sliding_window > 0) continue;
    const EstimatorKind estimator = plan.heads[head].estimator;
    ++(estimator == EstimatorKind::kPhi      ? with_phi
       : estimator == EstimatorKind::kMoment ? moment
                                             : none);
  }
  if (!tuned) return moment > 0 ? "moment, untuned" : "none, untuned";
  return "chosen per head: none " + std::to_string(none) + ", moment " + std::to_string(moment) +
         ", " + phi + " " + std::to_string(with_phi);
}

}  // namespace

Result<std::shared_ptr<const SessionPlan>> MakePlan(const Rooms& rooms,
                                                    std::shared_ptr<PreparedPrefix> prefix,
                                                    const StepPolicy& policy,
                                                    std::vector<storage::ReadStats>* reads) {
  PREFIXD_TRY(CheckPolicy(policy));
  auto plan = std::make_shared<SessionPlan>();
  plan->policy = policy;
  plan->prefix = prefix;
  if (policy.mode == StepMode::kFull) plan->estimator = "exact";
  if (policy.mode == StepMode::kAnchors) plan->estimator = "anchors only";
  if (policy.mode != StepMode::kRetrieve) return std::shared_ptr<const SessionPlan>(plan);

  const Model& model = *prefix->model();
  if (policy.estimator == EstimatorKind::kPhi) {
    PREFIXD_ASSIGN(plan->phi, prefix->Phi(reads));  // says what is missing before any budget
  }
  const Planner planner(rooms, *prefix, policy);
  const auto choices = policy.estimator == EstimatorKind::kAuto ? planner.NearestChoices()
                                                                : std::map<size_t, HeadChoice>{};
  bool moments = false, phi = false;
  plan->heads.resize(prefix->heads());
  for (size_t head = 0; head < plan->heads.size(); ++head) {
    const uint32_t layer = prefix->layer_of(head);
    if (model.spec.geometry.layers[layer].sliding_window > 0) continue;
    const auto choice = choices.find(head);
    auto head_plan = policy.estimator == EstimatorKind::kAuto
                         ? planner.Auto(choice == choices.end() ? nullptr : &choice->second, layer)
                         : planner.Fixed(policy.estimator, layer);
    if (!head_plan.ok()) return std::move(head_plan).error();
    plan->heads[head] = *head_plan;
    moments |= head_plan->estimator == EstimatorKind::kMoment;
    phi |= head_plan->estimator == EstimatorKind::kPhi;
  }
  if (moments) {
    PREFIXD_ASSIGN(plan->moments, prefix->Moments(reads));
  }
  if (phi && !plan->phi) {
    PREFIXD_ASSIGN(plan->phi, prefix->Phi(reads));
  }

  const bool large = prefix->partition().mid.size() >= rooms.options->ivf_min_tokens;
  plan->ivf = policy.selector == "ivf" || (policy.selector == "auto" && large);
  if (plan->ivf && !prefix->has_ivf()) {
    if (policy.selector == "ivf") {
      return Error{Code::kFailedPrecondition,
                   "this prefix has no IVF index (it is built in the background for segments of "
                   "at least " +
                       std::to_string(rooms.options->ivf_min_tokens) +
                       " tokens); wait until it is ready or use selector exact"};
    }
    plan->ivf = false;
  }
  plan->estimator = Describe(*prefix, *plan, !choices.empty());
  return std::shared_ptr<const SessionPlan>(plan);
}

}  // namespace prefixd
