#include "runtime/retention/scores.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

namespace prefixd {
namespace {

constexpr std::array<std::pair<std::string_view, RetentionPolicy>, 10> kPolicyNames{{
    {"window", RetentionPolicy::kWindow},
    {"tova", RetentionPolicy::kTova},
    {"h2o", RetentionPolicy::kH2o},
    {"local", RetentionPolicy::kLocal},
    {"snapkv", RetentionPolicy::kSnapKv},
    {"global", RetentionPolicy::kGlobal},
    {"global-sum", RetentionPolicy::kGlobalSum},
    {"global-mean", RetentionPolicy::kGlobalMean},
    {"gkv", RetentionPolicy::kGkv},
    {"kvpop", RetentionPolicy::kKvPop},
}};
constexpr double kUnseen = std::numeric_limits<double>::infinity();

// The mean over the queries that saw a token; kUnseen where none did.
std::vector<double> MeanAttention(TokenRange region, std::span<const ObservedQuery> queries) {
  std::vector<double> mean(region.size(), kUnseen);
  for (uint32_t i = 0; i < region.size(); ++i) {
    double sum = 0;
    uint32_t saw = 0;
    for (const ObservedQuery& q : queries) {
      if (q.position < region.begin + i) continue;
      sum += q.attention[i];
      ++saw;
    }
    if (saw > 0) mean[i] = sum / saw;
  }
  return mean;
}

std::vector<double> Pooled(std::span<const double> scores) {
  constexpr size_t kEdge = kSnapKvPooling / 2;
  std::vector<double> out(scores.size());
  for (size_t i = 0; i < scores.size(); ++i) {
    const size_t begin = i - std::min(i, kEdge), end = std::min(scores.size(), i + kEdge + 1);
    for (size_t j = begin; j < end; ++j) {
      // What nobody saw says nothing of its neighbours.
      if (scores[j] != kUnseen || j == i) out[i] = std::max(out[i], scores[j]);
    }
  }
  return out;
}

// Where there is a past, and nothing of it is unknown.
double Past(std::span<const double> past, size_t i) {
  return i < past.size() && !std::isnan(past[i]) ? past[i] : kUnseen;
}

double Joined(RetentionPolicy policy, double past, double now) {
  if (policy == RetentionPolicy::kGlobalSum) return kGlobalDecay * past + now;
  if (policy == RetentionPolicy::kGlobalMean) {
    return kGlobalDecay * past + (1 - kGlobalDecay) * now;
  }
  return std::max(kGlobalDecay * past, now);
}

std::vector<double> Global(RetentionPolicy policy, TokenRange region,
                           std::span<const ObservedQuery> queries, std::span<const double> past) {
  std::vector<double> global(region.size());
  for (size_t i = 0; i < global.size(); ++i) global[i] = Past(past, i);
  // The first window may be shorter, so that the last one is whole.
  size_t end = queries.size() % kObservedQueries;
  if (end == 0) end = std::min<size_t>(kObservedQueries, queries.size());
  for (size_t begin = 0; begin < queries.size(); begin = end, end += kObservedQueries) {
    const auto now = MeanAttention(region, queries.subspan(begin, end - begin));
    double largest = 0;
    for (const double s : now) {
      if (s != kUnseen) largest = std::max(largest, s);
    }
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i] == kUnseen) continue;
      const double share = largest > 0 ? now[i] / largest : 0;
      global[i] = global[i] == kUnseen ? share : Joined(policy, global[i], share);
    }
  }
  return global;
}

std::vector<double> AddedUp(TokenRange region, std::span<const ObservedQuery> queries,
                            std::span<const double> past) {
  std::vector<double> sum(region.size());
  for (uint32_t i = 0; i < region.size(); ++i) {
    sum[i] = Past(past, i);
    for (const ObservedQuery& q : queries) {
      if (q.position < region.begin + i) continue;
      sum[i] = (sum[i] == kUnseen ? 0 : sum[i]) + q.attention[i];
    }
  }
  return sum;
}

}  // namespace

Result<RetentionPolicy> RetentionPolicyFromName(std::string_view name) {
  for (const auto& [known, policy] : kPolicyNames) {
    if (known == name) return policy;
  }
  std::string names;
  for (const auto& [known, policy] : kPolicyNames) {
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  return InvalidArgument("there is no retention policy '" + std::string(name) + "'; there are " +
                         names);
}

GroupShare ShareOf(RetentionPolicy policy) {
  return policy == RetentionPolicy::kTova || policy == RetentionPolicy::kH2o ? GroupShare::kMean
                                                                             : GroupShare::kLargest;
}

ObservedQuery Observe(std::span<const float> scores, uint32_t group, uint32_t position,
                      TokenRange region, GroupShare share) {
  ObservedQuery out{position, std::vector<double>(region.size())};
  const size_t tokens = scores.size() / group;
  const size_t seen = std::min<size_t>(tokens, size_t{position} + 1);
  for (uint32_t g = 0; g < group && seen > 0; ++g) {
    const auto own = scores.subspan(g * tokens, seen);
    const double top = *std::ranges::max_element(own);
    double sum = 0;
    for (const float s : own) sum += std::exp(s - top);
    for (uint32_t t = region.begin; t < std::min<size_t>(region.end, seen); ++t) {
      double& given = out.attention[t - region.begin];
      const double of_head = std::exp(own[t] - top) / sum;
      given = share == GroupShare::kMean ? given + of_head / group : std::max(given, of_head);
    }
  }
  return out;
}

std::vector<double> RetentionScores(RetentionPolicy policy, TokenRange region,
                                    std::span<const ObservedQuery> queries,
                                    std::span<const double> past) {
  switch (policy) {
    case RetentionPolicy::kWindow: {
      std::vector<double> age(region.size());
      std::iota(age.begin(), age.end(), 0.0);
      return age;
    }
    case RetentionPolicy::kGlobal:
    case RetentionPolicy::kGlobalSum:
    case RetentionPolicy::kGlobalMean:
    case RetentionPolicy::kGkv:
      return Global(policy, region, queries, past);
    case RetentionPolicy::kH2o:
      return AddedUp(region, queries, past);
    case RetentionPolicy::kTova:
      return MeanAttention(region, queries.last(std::min<size_t>(queries.size(), 1)));
    case RetentionPolicy::kLocal:
    case RetentionPolicy::kSnapKv:
    case RetentionPolicy::kKvPop:
      break;
  }
  const auto last = queries.last(std::min<size_t>(queries.size(), kObservedQueries));
  std::vector<double> local = MeanAttention(region, last);
  return policy == RetentionPolicy::kSnapKv ? Pooled(local) : local;
}

std::vector<uint32_t> HighestScored(std::span<const double> scores, TokenRange region, uint32_t n) {
  std::vector<uint32_t> tokens(region.size());
  std::iota(tokens.begin(), tokens.end(), region.begin);
  n = std::min(n, region.size());
  std::nth_element(tokens.begin(), tokens.begin() + n, tokens.end(), [&](uint32_t a, uint32_t b) {
    const double of_a = scores[a - region.begin], of_b = scores[b - region.begin];
    return of_a != of_b ? of_a > of_b : a > b;
  });
  tokens.resize(n);
  std::ranges::sort(tokens);
  return tokens;
}

}  // namespace prefixd
