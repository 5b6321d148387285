#include "runtime/ingest/retention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

namespace prefixd {
namespace {

constexpr std::array<std::pair<std::string_view, RetentionPolicy>, 6> kPolicyNames{{
    {"window", RetentionPolicy::kWindow},
    {"local", RetentionPolicy::kLocal},
    {"snapkv", RetentionPolicy::kSnapKv},
    {"global", RetentionPolicy::kGlobal},
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

std::vector<double> Global(TokenRange region, std::span<const ObservedQuery> queries) {
  std::vector<double> global(region.size(), kUnseen);
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
      global[i] = global[i] == kUnseen ? share : std::max(kGlobalDecay * global[i], share);
    }
  }
  return global;
}

}  // namespace

Result<RetentionPolicy> RetentionPolicyFromName(std::string_view name) {
  for (const auto& [known, policy] : kPolicyNames) {
    if (known == name) return policy;
  }
  return InvalidArgument(
      "a prefix is compressed by window, local, snapkv, global, gkv or kvpop, not by '" +
      std::string(name) + "'");
}

ObservedQuery Observe(std::span<const float> scores, uint32_t group, uint32_t position,
                      TokenRange region) {
  ObservedQuery out{position, std::vector<double>(region.size())};
  const size_t tokens = scores.size() / group;
  const size_t seen = std::min<size_t>(tokens, size_t{position} + 1);
  for (uint32_t g = 0; g < group && seen > 0; ++g) {
    const auto own = scores.subspan(g * tokens, seen);
    const double top = *std::ranges::max_element(own);
    double sum = 0;
    for (const float s : own) sum += std::exp(s - top);
    for (uint32_t t = region.begin; t < std::min<size_t>(region.end, seen); ++t) {
      double& largest = out.attention[t - region.begin];
      largest = std::max(largest, std::exp(own[t] - top) / sum);
    }
  }
  return out;
}

std::vector<double> RetentionScores(RetentionPolicy policy, TokenRange region,
                                    std::span<const ObservedQuery> queries) {
  if (policy == RetentionPolicy::kWindow) {
    std::vector<double> age(region.size());
    std::iota(age.begin(), age.end(), 0.0);
    return age;
  }
  if (policy == RetentionPolicy::kGlobal || policy == RetentionPolicy::kGkv) {
    return Global(region, queries);
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
