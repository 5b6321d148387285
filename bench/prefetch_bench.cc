// Measures how prefetching rows near the set that a step retrieved changes the time of the next
// step, on the queries of a real decode (half of the steps continue the document, half answer
// questions about it) and of synthetic heads.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/prompts/head_trace.h"
#include "bench/prompts/retrieval_trace.h"
#include "bench/prompts/trace_options.h"
#include "bench/steps/prefetch_steps.h"
#include "bench/support/bench_main.h"
#include "measure/timing/json_file.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

struct Options {
  TraceOptions trace;
  double fraction = 0.01;
  uint32_t synthetic_tokens = 32768;
  uint32_t synthetic_layers = 2, synthetic_heads = 4;
  std::filesystem::path dir;
  uint32_t rounds = 3;
  std::vector<double> tiers = {1.25, 0.1};
  std::string json_file;
};

Status Decode(const std::string& of, std::span<const HeadTrace> heads, uint32_t n_layers,
              const Options& options, json& rows) {
  PrefetchSetting setting;
  setting.dir = options.dir / "prefetch";
  setting.n_layers = n_layers;
  setting.fraction = options.fraction;
  setting.rounds = options.rounds;
  setting.tiers = options.tiers;
  setting.pauses_ms = {5, 20};
  setting.prefetch = {{0, 0}, {1, 0}, {4, 0}, {4, 4}};
  PREFIXD_ASSIGN(const auto cases, MeasurePrefetch(heads, setting));
  std::printf("\ndecoding from a tier that holds one step's rows, %s; of a token: all layers\n",
              of.c_str());
  std::printf("%5s %6s %8s %5s %22s %10s %10s %9s %9s\n", "tier", "pause", "forward", "back", "ms",
              "reading", "SSD pages", "ahead", "used");
  for (const PrefetchCase& c : cases) {
    std::printf("%5.2f %3u ms %8u %5u %7.2f (%5.2f - %5.2f) %7.2f ms %10.1f %9.1f %9.1f\n", c.tier,
                c.pause_ms, c.prefetch.forward, c.prefetch.back, c.ms.median, c.ms.low, c.ms.high,
                c.read_ms.median, c.ssd_pages, c.prefetched_pages, c.prefetch_used_pages);
    rows.push_back({{"heads", of},
                    {"tier", c.tier},
                    {"pause_ms", c.pause_ms},
                    {"forward", c.prefetch.forward},
                    {"back", c.prefetch.back},
                    {"ms", c.ms},
                    {"read_ms", c.read_ms.median},
                    {"ssd_pages", c.ssd_pages},
                    {"prefetched_pages", c.prefetched_pages},
                    {"prefetch_used_pages", c.prefetch_used_pages}});
  }
  return {};
}

Status Run(const Options& options) {
  json steps = json::array();
  PREFIXD_ASSIGN(const RetrievalTrace trace, MakeTrace(options.trace));
  const std::vector<HeadTrace> real = HeadTraces(trace);
  std::vector<HeadTrace> synthetic;
  for (uint64_t seed = 1; seed <= options.synthetic_layers * options.synthetic_heads; ++seed) {
    SyntheticOptions head;
    head.n_tokens = options.synthetic_tokens;
    head.seed = seed;
    synthetic.push_back(SyntheticHead(head));
  }
  PREFIXD_TRY(Decode("real decode", real, trace.geometry.n_layers, options, steps));
  PREFIXD_TRY(Decode("synthetic", synthetic, options.synthetic_layers, options, steps));
  if (options.json_file.empty()) return {};
  return WriteJson(options.json_file, {{"bench", "prefetch"}, {"steps", steps}});
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Rows read ahead of a step: what it saves.");
  prefixd::bench::AddTraceSource(app, options.trace);
  prefixd::bench::AddTraceTokens(app, options.trace);
  prefixd::bench::AddTraceSteps(app, options.trace);
  app.add_option("--fraction", options.fraction, "K, of the mid region")
      ->check(CLI::Range(0.0001, 0.3))
      ->capture_default_str();
  app.add_option("--synthetic-tokens", options.synthetic_tokens, "Of each synthetic head")
      ->check(CLI::Range(2048, 1 << 20))
      ->capture_default_str();
  app.add_option("--synthetic-layers", options.synthetic_layers, "Layers of synthetic heads")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--synthetic-heads", options.synthetic_heads, "KV heads of such a layer")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--dir", options.dir, "On the disk to be measured")->required();
  app.add_option("--tiers", options.tiers, "Sizes of the host tier, of all rows")
      ->delimiter(',')
      ->check(CLI::Range(0.001, 10.0))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "Decodes of each setting")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Run(options); });
}
