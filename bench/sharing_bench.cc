// Measures what sharing retrieved sets between steps (CIS, [PrHS]) saves and loses, on the queries
// of a real decode: half of the steps continue the document, half answer questions about it.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/prompts/trace_options.h"
#include "bench/selection/set_reuse.h"
#include "bench/selection/sharing_cases.h"
#include "bench/support/bench_main.h"
#include "measure/timing/json_file.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

struct Options {
  TraceOptions trace;
  double fraction = 0.01;
  std::string json_file;
};

Status Run(const Options& options) {
  PREFIXD_ASSIGN(const RetrievalTrace trace, MakeTrace(options.trace));
  std::vector<StepPolicy::Sharing> settings;
  for (const uint32_t block : {8u, 16u, 20u}) {
    for (const double similarity : {0.9, 0.8, 0.6, 0.4, -1.0}) {
      settings.push_back({block, similarity, 1, false});
    }
  }
  for (const uint32_t dilation : {0u, 2u, 4u, 8u}) {
    settings.push_back({16, 0.8, dilation, false}), settings.push_back({16, -1, dilation, false});
  }
  for (const double similarity : {0.9, 0.8, 0.6}) {
    settings.push_back({1, similarity, 1, true}), settings.push_back({16, similarity, 1, true});
  }
  const auto progress = [](size_t done, size_t all) {
    std::fprintf(stderr, "\r  head %zu of %zu%s", done, all, done == all ? "\n" : "");
  };
  PREFIXD_ASSIGN(const auto results, MeasureSharing(trace, options.fraction, settings, progress));

  std::printf("real decode, %u tokens, %zu heads, K = %g%% of the mid region\n", trace.n_tokens,
              trace.heads.size(), 100 * options.fraction);
  std::printf("%6s %6s %9s %7s %7s %9s %8s %9s %9s %9s %11s\n", "block", "cos >", "dilation",
              "across", "rho", "tokens/K", "mass", "mass loss", "dropped", "completed",
              "codes read");
  json rows = json::array();
  json ratios = {{"cis_mass_loss", nullptr}, {"cis_rho", nullptr}};
  for (const SharingResult& r : results) {
    std::printf("%6u %6.2f %9u %7s %7.3f %9.2f %8.4f %9.4f %9.4f %9.4f %10.2f%%\n", r.sharing.block,
                r.sharing.similarity, r.sharing.dilation, r.sharing.across ? "yes" : "no", r.rho,
                r.tokens, r.mass, r.mass_loss, r.dropped_error, r.error, 100 * r.scan_bytes);
    rows.push_back({{"block", r.sharing.block},
                    {"similarity", r.sharing.similarity},
                    {"dilation", r.sharing.dilation},
                    {"across", r.sharing.across},
                    {"rho", r.rho},
                    {"tokens", r.tokens},
                    {"mass", r.mass},
                    {"mass_loss", r.mass_loss},
                    {"error_dropped", r.dropped_error},
                    {"error_completed", r.error},
                    {"scan_bytes", r.scan_bytes}});
  }
  if (const SharingResult* r = LeastLoss(results)) {
    ratios = {
        {"cis_mass_loss", r->mass_loss}, {"cis_rho", r->rho}, {"bytes_shared", r->scan_bytes}};
  }
  std::printf("\nleast loss at rho <= 0.1: %s\n", ratios.dump().c_str());
  PREFIXD_ASSIGN(const SetReuse reuse, MeasureSetReuse(trace, options.fraction));
  std::printf("\n%24s %22s %14s\n", "retrieved in the last", "of a step's Top-K", "tokens held/K");
  json reuse_rows = json::array(), remembered_rows = json::array();
  for (const ReuseResult& r : reuse.reuse) {
    const std::string steps = r.steps == 0 ? "all steps" : std::to_string(r.steps) + " steps";
    std::printf("%24s %22.3f %14.2f\n", steps.c_str(), r.found, r.held);
    reuse_rows.push_back({{"steps", r.steps}, {"found", r.found}, {"held", r.held}});
  }
  std::printf("\n%24s %8s %9s %11s\n", "all sets remembered", "limit", "rho", "mass loss");
  for (const RememberedResult& r : reuse.remembered) {
    const bool oracle = r.rule == RememberedResult::Rule::kOracle;
    const char* name = oracle ? "best, known beforehand" : "nearest, cosine above";
    std::printf("%24s %8.2f %9.3f %11.4f\n", name, r.limit, r.rho, r.mass_loss);
    remembered_rows.push_back({{"rule", oracle ? "oracle" : "nearest"},
                               {"limit", r.limit},
                               {"rho", r.rho},
                               {"mass_loss", r.mass_loss}});
  }
  if (options.json_file.empty()) return {};
  PREFIXD_TRY(WriteJson(options.json_file, json{{"bench", "sharing"},
                                                {"settings", rows},
                                                {"reuse", reuse_rows},
                                                {"remembered", remembered_rows},
                                                {"ratios", ratios}}));
  return {};
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("What sharing retrieved sets between steps saves and loses.");
  prefixd::bench::AddTraceSource(app, options.trace);
  prefixd::bench::AddTraceTokens(app, options.trace);
  prefixd::bench::AddTraceSteps(app, options.trace);
  app.add_option("--fraction", options.fraction, "K, of the mid region")
      ->check(CLI::Range(0.0001, 0.3))
      ->capture_default_str();
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Run(options); });
}
