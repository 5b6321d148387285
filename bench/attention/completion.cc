#include <algorithm>
#include <cstdio>
#include <iterator>
#include <numeric>
#include <string>

#include "bench/attention/measure.h"
#include "bench/attention/passes.h"
#include "bench/attention/timing.h"

namespace prefixd::bench {
namespace {

constexpr uint32_t kTokens = 131072;
constexpr int kStepsPerRound = 9;

using Times = std::vector<double>[std::size(kVariants)];  // [variant][round]

// Runs all variants step by step, so that a drift of the machine affects all of them alike. Each
// step has another order, so that no variant always follows one that fills the caches with its own
// data. in_cache: all steps use one set, after a step that does not count; otherwise each step has
// its own rows.
void MeasureVariants(Stepper& stepper, const Layers& layers, int rounds, bool in_cache,
                     Times& times) {
  std::mt19937_64 rng(stepper.k());
  std::vector<uint32_t> ids = RandomSets(rng, layers.n_tokens(), stepper.k());
  size_t layer = 0;
  std::vector<size_t> order(std::size(kVariants));
  std::iota(order.begin(), order.end(), 0);
  for (int round = 0; round < rounds; ++round) {
    std::vector<double> some[std::size(kVariants)];
    for (int i = 0; i < kStepsPerRound; ++i) {
      std::shuffle(order.begin(), order.end(), rng);
      if (in_cache) stepper.Run(Variant::kNone, layer, ids);
      for (const size_t v : order) {
        if (kVariants[v] == Variant::kPhiRecompute && i % 4 != 0) continue;
        if (!in_cache) {
          layer = rng() % layers.count();
          ids = RandomSets(rng, layers.n_tokens(), stepper.k());
        }
        some[v].push_back(stepper.Run(kVariants[v], layer, ids));
      }
    }
    for (size_t v = 0; v < std::size(kVariants); ++v) times[v].push_back(Median(some[v]));
  }
}

std::vector<double> Overhead(const Times& times, size_t v) {
  std::vector<double> overhead = Ratios(times[v], times[0]);
  for (double& x : overhead) x -= 1;
  return overhead;
}

}  // namespace

void MeasureCompletion(Team& team, const RowMemory& memory, int rounds, Report& report) {
  const Layers layers(memory, kTokens);
  if (layers.count() == 0) return;
  const Model model = MakeModel(layers);
  for (const uint32_t k : {1024u, 4000u}) {
    for (const bool in_cache : {false, true}) {
      Stepper stepper(team, layers, model, k);
      Times times;
      MeasureVariants(stepper, layers, rounds, in_cache, times);
      std::printf("\n  completion at K = %u, rows %s\n", k,
                  in_cache ? "still in cache" : "from memory");
      for (size_t v = 0; v < std::size(kVariants); ++v) {
        const std::vector<double> overhead = Overhead(times, v);
        std::printf("    %-20s %9.3f ms   %+.1f%%\n", VariantName(kVariants[v]),
                    Median(times[v]) * 1e3, 100 * Median(overhead));
        std::vector<double> ms = times[v];
        for (double& t : ms) t *= 1e3;
        const std::string key = VariantKey(kVariants[v]);
        const std::string where = in_cache ? "_in_cache" : "";
        report.Value(key + "_k" + std::to_string(k) + where + "_ms", ms);
        if (k != 1024) continue;
        if (kVariants[v] == Variant::kRank8) report.Ratio("moment_overhead" + where, overhead);
        if (kVariants[v] == Variant::kPhiStored) {
          report.Ratio("phi_stored_overhead" + where, overhead);
        }
        if (kVariants[v] == Variant::kPhiRecompute) {
          report.Ratio("phi_recompute_overhead" + where, overhead);
        }
      }
    }
  }
}

}  // namespace prefixd::bench
