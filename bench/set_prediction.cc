#include "bench/set_prediction.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "index/ranking/group_ranking.h"
#include "attention/step/step.h"

namespace prefixd::bench {
namespace {

// Tokens, best first.
std::vector<std::vector<uint32_t>> SetsOf(const HeadTrace& head, double fraction) {
  const RowsView rows = head.view();
  const auto n = static_cast<uint32_t>(rows.count);
  const auto k = static_cast<uint32_t>(std::ceil(fraction * n));
  std::vector<std::vector<uint32_t>> sets;
  std::vector<float> scores(size_t{head.group} * n);
  for (size_t s = 0; s < head.n_steps(); ++s) {
    Scores(head.step(s), head.group, head.layer, rows, scores);
    GroupRanking ranking = RankByGroupMax(scores, head.group, n, k);
    ranking.best.resize(k);
    sets.push_back(std::move(ranking.best));
  }
  return sets;
}

std::set<uint32_t> Foretell(const Prediction& rule, std::span<const uint32_t> best, uint32_t n) {
  std::set<uint32_t> out(best.begin(), best.end());
  const size_t widened = rule.best_third ? best.size() / 3 : best.size();
  for (const uint32_t id : best.first(widened)) {
    const uint32_t begin = id - std::min(id, rule.back), end = std::min(n, id + rule.forward + 1);
    for (uint32_t t = begin; t < end; ++t) out.insert(t);
  }
  return out;
}

// Adds sums over the head's steps to `sum`.
void AddHead(std::span<const std::vector<uint32_t>> sets, uint32_t n, Prediction& sum) {
  const double k = double(sets[0].size());
  std::set<uint32_t> used(sets[0].begin(), sets[0].end());  // without reading ahead
  std::set<uint32_t> held = used, unused;                   // with it
  double missed = 0, left = 0;
  for (size_t s = 1; s < sets.size(); ++s) {
    const std::set<uint32_t> foretold = Foretell(sum, sets[s - 1], n);
    sum.foretold += double(foretold.size()) / k;
    for (const uint32_t id : foretold) {
      if (!held.insert(id).second) continue;
      sum.ahead += 1 / k;
      unused.insert(id);
    }
    for (const uint32_t id : sets[s]) {
      sum.found += foretold.contains(id) ? 1 / k : 0;
      missed += used.insert(id).second ? 1 : 0;
      left += held.insert(id).second ? 1 : 0;
      unused.erase(id);
    }
  }
  sum.missed += missed / k;
  sum.left += left / k;
  sum.in_vain += double(unused.size()) / k;
  if (missed > 0) sum.best_head = std::max(sum.best_head, 1 - left / missed);
}

}  // namespace

Result<std::vector<Prediction>> MeasurePredictions(std::span<const HeadTrace> heads,
                                                   double fraction) {
  std::vector<Prediction> rules;
  for (const bool best_third : {false, true}) {
    for (const auto& [back, forward] : std::initializer_list<std::pair<uint32_t, uint32_t>>{
             {0, 0}, {0, 1}, {1, 1}, {0, 2}, {2, 2}, {0, 4}, {4, 4}, {8, 8}}) {
      if (best_third && forward == 0) continue;
      rules.push_back({back, forward, best_third});
    }
  }
  double steps = 0;
  for (const HeadTrace& head : heads) {
    const auto sets = SetsOf(head, fraction);
    if (sets.size() < 2) return InvalidArgument("foretelling takes two steps or more");
    steps += double(sets.size() - 1);
    for (Prediction& rule : rules) AddHead(sets, static_cast<uint32_t>(head.view().count), rule);
  }
  for (Prediction& rule : rules) {
    for (double* sum :
         {&rule.found, &rule.foretold, &rule.missed, &rule.left, &rule.ahead, &rule.in_vain}) {
      *sum /= steps;
    }
  }
  return rules;
}

}  // namespace prefixd::bench
