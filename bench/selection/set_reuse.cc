#include "bench/selection/set_reuse.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/step/step.h"
#include "bench/prompts/head_trace.h"
#include "index/ranking/group_ranking.h"
#include "runtime/step/shared_sets.h"

namespace prefixd::bench {
namespace {

struct Step {
  std::span<const float> q;
  std::vector<uint32_t> set, wide;  // Top-K, and dilated; ascending
  std::vector<double> probability;  // per token, mean over the group
  double mass = 0;                  // mass of `set`
};

double MassOf(const Step& step, std::span<const uint32_t> set) {
  double mass = 0;
  for (const uint32_t id : set) mass += step.probability[id];
  return mass;
}

std::vector<Step> StepsOf(const HeadTrace& head, uint32_t k) {
  const RowsView rows = head.view();
  const auto n = static_cast<uint32_t>(rows.count);
  std::vector<Step> steps;
  std::vector<float> scores(size_t{head.group} * n);
  for (size_t s = 0; s < head.n_steps(); ++s) {
    Step& step = steps.emplace_back();
    step.q = head.step(s);
    Scores(step.q, head.group, head.layer, rows, scores);
    const GroupRanking ranking = RankByGroupMax(scores, head.group, n, k);
    step.set.assign(ranking.best.begin(), ranking.best.begin() + k);
    const std::vector<uint32_t> best(step.set.begin(), step.set.begin() + k / 3);
    std::ranges::sort(step.set);
    step.wide = Dilated(step.set, best, 1, {0, n});
    step.probability.assign(n, 0);
    for (uint32_t g = 0; g < head.group; ++g) {
      for (uint32_t i = 0; i < n; ++i) {
        step.probability[i] +=
            std::exp(double{scores[size_t{g} * n + i]} - ranking.lse[g]) / head.group;
      }
    }
    step.mass = MassOf(step, step.set);
  }
  return steps;
}

void AddReuse(std::span<const Step> steps, ReuseResult& sum) {
  for (size_t s = 1; s < steps.size(); ++s) {
    const size_t first = sum.steps == 0 || sum.steps > s ? 0 : s - sum.steps;
    std::vector<char> earlier(steps[s].probability.size());  // by token: whether it was retrieved
    size_t held = 0, found = 0;
    for (size_t e = first; e < s; ++e) {
      for (const uint32_t id : steps[e].set) held += !std::exchange(earlier[id], 1);
    }
    for (const uint32_t id : steps[s].set) found += earlier[id];
    const double k = double(steps[s].set.size());
    sum.found += double(found) / k;
    sum.held += double(held) / k;
  }
}

// Returns the least cosine over the group's heads, which share a set.
double Alike(std::span<const float> a, std::span<const float> b, uint32_t group) {
  const size_t dim = a.size() / group;
  double least = 1;
  for (uint32_t g = 0; g < group; ++g) {
    double ab = 0, aa = 0, bb = 0;
    for (size_t i = g * dim; i < (g + 1) * dim; ++i) {
      ab += double{a[i]} * b[i], aa += double{a[i]} * a[i], bb += double{b[i]} * b[i];
    }
    least = std::min(least, ab / std::sqrt(aa * bb + 1e-300));
  }
  return least;
}

void AddRemembered(std::span<const Step> steps, uint32_t group, RememberedResult& sum) {
  std::vector<const Step*> remembered;
  for (const Step& step : steps) {
    const Step* best = nullptr;
    double most = 0;
    for (const Step* other : remembered) {
      const double worth = sum.rule == RememberedResult::Rule::kOracle
                               ? MassOf(step, other->wide)
                               : Alike(step.q, other->q, group);
      if (!best || worth > most) best = other, most = worth;
    }
    const double least =
        sum.rule == RememberedResult::Rule::kOracle ? step.mass - sum.limit : sum.limit;
    if (best && most > least) {
      sum.mass_loss += step.mass - MassOf(step, best->wide);
    } else {
      sum.rho += 1;
      remembered.push_back(&step);
    }
  }
}

}  // namespace

Result<SetReuse> MeasureSetReuse(const RetrievalTrace& trace, double fraction) {
  const auto k = static_cast<uint32_t>(std::ceil(fraction * trace.mid.size()));
  SetReuse out;
  for (const uint32_t steps : {1u, 2u, 4u, 8u, 16u, 0u}) out.reuse.push_back({steps});
  for (const double limit : {0.9, 0.8, 0.6, 0.4}) {
    out.remembered.push_back({RememberedResult::Rule::kNearest, limit});
  }
  for (const double limit : {0.01, 0.02, 0.05, 0.1, 0.2}) {
    out.remembered.push_back({RememberedResult::Rule::kOracle, limit});
  }
  double steps = 0, pairs = 0;
  for (const HeadTrace& head : HeadTraces(trace)) {
    const std::vector<Step> of_head = StepsOf(head, k);
    if (of_head.size() < 2) return InvalidArgument("reuse takes two steps or more");
    steps += double(of_head.size());
    pairs += double(of_head.size() - 1);
    for (ReuseResult& r : out.reuse) AddReuse(of_head, r);
    for (RememberedResult& r : out.remembered) AddRemembered(of_head, head.group, r);
  }
  for (ReuseResult& r : out.reuse) r.found /= pairs, r.held /= pairs;
  for (RememberedResult& r : out.remembered) r.rho /= steps, r.mass_loss /= steps;
  return out;
}

}  // namespace prefixd::bench
