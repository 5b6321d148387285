// What the set that a step retrieves tells of the next one's: on the queries of a real decode (half
// of the steps continue the document, half answer questions about it) and of synthetic heads.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/set_prediction.h"
#include "bench/support/head_trace.h"
#include "bench/support/json_file.h"
#include "bench/support/retrieval_trace.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

struct Options {
  TraceOptions trace;
  double fraction = 0.01;
  uint32_t synthetic_tokens = 32768;
  std::string json_file;
};

Status Predict(const std::string& of, std::span<const HeadTrace> heads, double fraction,
               json& rows) {
  PREFIXD_ASSIGN(const auto rules, MeasurePredictions(heads, fraction));
  std::printf("\nforetold by the last set, %s, K = %g%%, figures in multiples of K\n", of.c_str(),
              100 * fraction);
  std::printf("%5s %8s %6s %9s %9s %9s %9s %9s %9s %10s\n", "back", "forward", "of", "foretold",
              "found", "missed", "left", "ahead", "in vain", "best head");
  for (const Prediction& r : rules) {
    std::printf("%5u %8u %6s %9.2f %9.3f %9.3f %9.3f %9.3f %9.3f %10.3f\n", r.back, r.forward,
                r.best_third ? "third" : "all", r.foretold, r.found, r.missed, r.left, r.ahead,
                r.in_vain, r.best_head);
    rows.push_back({{"heads", of},
                    {"back", r.back},
                    {"forward", r.forward},
                    {"best_third", r.best_third},
                    {"foretold", r.foretold},
                    {"found", r.found},
                    {"missed", r.missed},
                    {"left", r.left},
                    {"ahead", r.ahead},
                    {"in_vain", r.in_vain},
                    {"best_head", r.best_head}});
  }
  return {};
}

Status Run(const Options& options) {
  json rows = json::array();
  PREFIXD_ASSIGN(const RetrievalTrace trace, CaptureTrace(options.trace));
  PREFIXD_TRY(Predict("real decode", HeadTraces(trace), options.fraction, rows));
  std::vector<HeadTrace> synthetic;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    SyntheticOptions head;
    head.n_tokens = options.synthetic_tokens;
    head.seed = seed;
    synthetic.push_back(SyntheticHead(head));
  }
  PREFIXD_TRY(Predict("synthetic", synthetic, options.fraction, rows));
  if (options.json_file.empty()) return {};
  return WriteJson(options.json_file, {{"bench", "prefetch"}, {"predictions", rows}});
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("What a step's retrieved set tells of the next one's.");
  app.add_option("--model", options.trace.model_dir, "Checkpoint directory")->capture_default_str();
  app.add_option("--document", options.trace.document, "UTF-8 text")->capture_default_str();
  app.add_option("--tokens", options.trace.prompt_tokens, "At most this many prompt tokens")
      ->check(CLI::Range(2048, 1 << 20))
      ->capture_default_str();
  app.add_option("--steps", options.trace.steps, "Decoded steps")->capture_default_str();
  app.add_option("--fraction", options.fraction, "K, of the mid region")
      ->check(CLI::Range(0.0001, 0.3))
      ->capture_default_str();
  app.add_option("--synthetic-tokens", options.synthetic_tokens, "Of each synthetic head")
      ->check(CLI::Range(2048, 1 << 20))
      ->capture_default_str();
  app.add_option("--json", options.json_file, "Also write the figures here");
  CLI11_PARSE(app, argc, argv);
  const prefixd::Status status = prefixd::bench::Run(options);
  if (!status.ok()) {
    std::fprintf(stderr, "prefetch_bench: %s\n", status.error().ToString().c_str());
    return 1;
  }
  return 0;
}
