#include "runtime/step/check_policy.h"

#include <cmath>
#include <string>
#include <utility>

#include "index/search/key_index.h"
#include "runtime/retention/scores.h"

namespace prefixd {
namespace {

constexpr uint32_t kMostBlock = 256, kMostDilation = 16;
constexpr uint32_t kMostReach = 64, kLeastPrefetchMib = 4, kMostPrefetchMib = 65536;
constexpr uint32_t kMostRetained = 4096;

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

Status CheckRetain(const StepPolicy::Retain& retain) {
  if (retain.tokens > kMostRetained) {
    return InvalidArgument("retain.tokens is at most " + std::to_string(kMostRetained) +
                           " of each KV head, not " + std::to_string(retain.tokens));
  }
  const auto by = RetentionPolicyFromName(retain.by);
  return by.ok() ? Status() : InvalidArgument("retain.by: " + by.error().message);
}

// The scan estimator needs the scores of all keys under each query.
Status CheckScan(const EstimatorVariant& estimator, const StepPolicy& policy) {
  if (estimator.kind != EstimatorKind::kScan || !policy.sharing.on()) {
    return {};
  }
  return InvalidArgument(
      "estimator scan is made of the scores that a search gives every key, and steps that share a "
      "set have none; use another estimator, or no sharing");
}

}  // namespace

Status CheckPolicy(const RuntimeOptions& options, const StepPolicy& policy) {
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
  PREFIXD_TRY(CheckRetain(policy.retain));
  PREFIXD_TRY(CheckSharing(policy));
  return CheckPrefetch(options, policy);
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

}  // namespace prefixd
