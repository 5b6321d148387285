#include "runtime/retention/rank_tokens.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/step/step.h"
#include "runtime/retention/redundancy.h"

namespace prefixd {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// Tokens that a scorer has ranked keep that: all lose alike with age.
std::vector<double> Priorities(const RankInput& in) {
  std::vector<double> out(in.past.begin(), in.past.end());
  out.resize(in.region.size(), kNone);
  const auto fresh = std::ranges::find_if(out, [](double x) { return std::isnan(x); });
  const auto known = static_cast<uint32_t>(fresh - out.begin());
  const std::vector<double> scored =
      TokenPriorities(*in.scorer, in.rows, {in.region.begin + known, in.region.end});
  for (size_t i = 0; i < scored.size(); ++i) {
    const size_t row = in.region.begin + known + i;
    const double further = in.positions.empty() ? 0 : in.positions[row] - double(row);
    if (std::isnan(out[known + i])) out[known + i] = scored[i] - further * in.scorer->log_decay;
  }
  return out;
}

// What nobody saw, or no scorer has ranked yet, is new next time, too.
std::vector<double> Remembered(std::span<const double> scores) {
  std::vector<double> memory(scores.begin(), scores.end());
  for (double& x : memory) x = std::isinf(x) ? kNone : x;
  return memory;
}

std::vector<ObservedQuery> ObserveAll(const RankInput& in) {
  std::vector<ObservedQuery> observed;
  std::vector<float> scores(in.group * in.rows.count);
  for (const SeenQuery& query : in.queries) {
    Scores(query.q, in.group, in.layer, in.rows, scores);
    observed.push_back(Observe(scores, in.group, query.position, in.region, ShareOf(in.policy)));
  }
  return observed;
}

}  // namespace

Ranking RankTokens(const RankInput& in) {
  Ranking out;
  if (in.policy == RetentionPolicy::kKvPop) {
    out.scores = Priorities(in);
    out.memory = Remembered(out.scores);
    return out;
  }
  std::vector<ObservedQuery> observed;
  if (NeedsQueries(in.policy)) observed = ObserveAll(in);
  out.scores = RetentionScores(in.policy, in.region, observed, in.past);
  // Scores that overflow say nothing.
  for (double& x : out.scores) x = std::isnan(x) ? -std::numeric_limits<double>::infinity() : x;
  if (Remembers(in.policy)) out.memory = Remembered(out.scores);
  if (in.policy == RetentionPolicy::kGkv) {
    TakeOffRedundancy(Redundancy(in.rows, in.region), out.scores);
  }
  return out;
}

uint64_t RankBytes(const RankInput& in) {
  const uint64_t queries = NeedsQueries(in.policy) ? in.queries.size() : 0;
  return in.rows.count * in.group * sizeof(float) +
         (queries + 3) * in.region.size() * sizeof(double) +
         (in.policy == RetentionPolicy::kGkv ? RedundancyBytes(in.region, in.rows.shape) : 0);
}

}  // namespace prefixd
