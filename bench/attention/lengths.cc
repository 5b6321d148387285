#include <algorithm>
#include <cstdio>
#include <string>

#include "bench/attention/floors.h"
#include "bench/attention/measure.h"
#include "bench/attention/passes.h"
#include "bench/attention/timing.h"

namespace prefixd::bench {
namespace {

constexpr uint32_t kFixedK = 1024, kSuffixTokens = 16;
constexpr int kStepsPerRound = 9;

// Holds the samples for one number of retrieved tokens, one per round.
struct StepSamples {
  uint32_t k;
  std::vector<double> step, gather;
};

struct Samples {
  std::vector<double> bandwidth, roofline, exact, suffix;
  StepSamples fixed, percent;
};

// Measures steps and gathers of the same number of rows in turn, each over rows that were not read
// before.
void MeasureSteps(Team& team, const Layers& layers, const Model& model, std::mt19937_64& rng,
                  StepSamples& out) {
  Stepper stepper(team, layers, model, out.k);
  std::vector<double> step, gather;
  for (int i = 0; i < kStepsPerRound; ++i) {
    const size_t a = rng() % layers.count(), b = rng() % layers.count();
    const std::vector<uint32_t> ids_a = RandomSets(rng, layers.n_tokens(), out.k);
    const std::vector<uint32_t> ids_b = RandomSets(rng, layers.n_tokens(), out.k);
    gather.push_back(GatherSeconds(team, layers, a, ids_a));
    step.push_back(stepper.Run(Variant::kNone, b, ids_b));
  }
  out.step.push_back(Median(step));
  out.gather.push_back(Median(gather));
}

Samples MeasureLength(Team& team, const RowMemory& memory, const Layers& layers, const Model& model,
                      int rounds) {
  Samples s{{}, {}, {}, {}, {kFixedK, {}, {}}, {}};
  s.percent.k = (layers.n_tokens() + 99) / 100 - kAnchors;
  std::mt19937_64 rng(layers.n_tokens());
  const size_t sample = std::min(memory.bytes(), layers.bytes());
  for (int round = 0; round < rounds; ++round) {
    const size_t layer = rng() % layers.count(), other = rng() % layers.count();
    s.bandwidth.push_back(ReadBandwidth(team, memory, layer * layers.bytes(), sample));
    s.roofline.push_back(static_cast<double>(layers.bytes()) / s.bandwidth.back());
    s.exact.push_back(ExactPass(team, layers, other, model));
    MeasureSteps(team, layers, model, rng, s.fixed);
    MeasureSteps(team, layers, model, rng, s.percent);
  }
  if (layers.n_tokens() <= 16384) {
    for (int round = 0; round < std::min(rounds, 3); ++round) {
      s.suffix.push_back(SuffixPass(team, layers, rng() % layers.count(), model, kSuffixTokens));
    }
  }
  return s;
}

void PrintStep(const char* name, const Samples& s, const StepSamples& k) {
  std::printf(
      "  step, %-7s K = %-6u %9.3f ms   the rows alone %.3f ms   faster than exact: its roofline "
      "%.1fx, our pass %.1fx\n",
      name, k.k, Median(k.step) * 1e3, Median(k.gather) * 1e3, Median(Ratios(s.roofline, k.step)),
      Median(Ratios(s.exact, k.step)));
}

std::vector<double> Scaled(std::vector<double> x, double factor) {
  for (double& v : x) v *= factor;
  return x;
}

void AddValues(const Samples& s, double rotated_bytes, const std::string& at, Report& report) {
  report.Value("rotated_gb" + at, {rotated_bytes * 1e-9});
  report.Value("bandwidth_gb_s" + at, Scaled(s.bandwidth, 1e-9));
  report.Value("exact_roofline_ms" + at, Scaled(s.roofline, 1e3));
  report.Value("exact_ms" + at, Scaled(s.exact, 1e3));
  report.Value("step_k1024_ms" + at, Scaled(s.fixed.step, 1e3));
  report.Value("gather_k1024_ms" + at, Scaled(s.fixed.gather, 1e3));
  report.Value("step_1pct_ms" + at, Scaled(s.percent.step, 1e3));
  report.Value("gather_1pct_ms" + at, Scaled(s.percent.gather, 1e3));
  if (!s.suffix.empty()) report.Value("suffix_16_tokens_ms" + at, Scaled(s.suffix, 1e3));
}

}  // namespace

void MeasureLengths(Team& team, const RowMemory& memory, int rounds, Report& report) {
  std::vector<double> step_16k, gather_16k;
  for (const uint32_t n : {16384u, 131072u, 1048576u}) {
    const Layers layers(memory, n);
    if (layers.count() == 0) continue;
    const Model model = MakeModel(layers);
    const Samples s = MeasureLength(team, memory, layers, model, rounds);
    std::printf("\nN = %u   memory read %.1f GB/s; steps rotate over %zu layers, %.2f GB in all\n",
                n, Median(s.bandwidth) / 1e9, layers.count(),
                static_cast<double>(layers.count() * layers.bytes()) / 1e9);
    std::printf("  exact over everything      %9.3f ms   roofline %.3f ms (%.0f%% of bandwidth)\n",
                Median(s.exact) * 1e3, Median(s.roofline) * 1e3,
                100 * Median(Ratios(s.roofline, s.exact)));
    PrintStep("fixed", s, s.fixed);
    PrintStep("1%", s, s.percent);
    AddValues(s, static_cast<double>(layers.count() * layers.bytes()),
              "_" + std::to_string(n / 1024) + "k", report);
    if (!s.suffix.empty()) {
      // Each element of each row costs two multiply-adds for every query head of every suffix
      // token.
      const double flop = 4.0 * kDim * n * kKvHeads * kGroup * kSuffixTokens;
      std::printf("  exact, %u suffix tokens    %9.3f ms   %.0f GFLOP/s, %.1f one-token passes\n",
                  kSuffixTokens, Median(s.suffix) * 1e3, flop / Median(s.suffix) / 1e9,
                  Median(s.suffix) / Median(s.exact));
    }
    if (n == 16384) step_16k = s.fixed.step, gather_16k = s.fixed.gather;
    if (n == 1048576 && !step_16k.empty()) {
      report.Ratio("step_growth_16k_1m", Ratios(s.fixed.step, step_16k));
      report.Ratio("gather_growth_16k_1m", Ratios(s.fixed.gather, gather_16k));
    }
    if (n != 131072) continue;
    report.Ratio("given_set_speedup_128k", Ratios(s.roofline, s.percent.step));
    report.Ratio("given_set_speedup_128k_own_pass", Ratios(s.exact, s.percent.step));
    report.Ratio("given_set_over_gather_floor", Ratios(s.percent.step, s.percent.gather));
    report.Ratio("gather_floor_speedup_128k", Ratios(s.roofline, s.percent.gather));
    report.Ratio("exact_bandwidth_fraction", Ratios(s.roofline, s.exact));
  }
}

}  // namespace prefixd::bench
