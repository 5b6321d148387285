// Measures which tokens to read: the cost and recall of each index, on queries of a real decode and
// on synthetic heads of a realistic shape, with one thread.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/prompts/trace_options.h"
#include "bench/selection/selection_cases.h"
#include "bench/selection/sharing_cases.h"
#include "bench/support/bench_main.h"
#include "measure/timing/json_file.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

struct Options {
  TraceOptions trace;
  std::vector<uint32_t> sizes = {16384, 131072, 1048576};
  bool real = true;
  bool sharing = true;
  uint32_t steps = SyntheticOptions{}.steps;
  MeasureOptions measure;
  std::string json_file;
};

// `bytes_amortized_1m` is measured at this length.
constexpr uint32_t kMillion = 1048576;

json ToJson(const IndexResult& r) {
  return {{"index", r.index},
          {"bytes_per_key", r.bytes_per_key},
          {"build_seconds", r.build_seconds},
          {"effort", r.effort},
          {"keys_scanned", r.keys_scanned},
          {"bytes_fraction", r.bytes_fraction},
          {"recall_at_100", r.recall_100},
          {"recall_at_k", r.recall_k},
          {"worst_recall_at_k", r.worst_recall_k},
          {"relative_mass", r.relative_mass},
          {"median_ms", r.median_ms},
          {"p99_ms", r.p99_ms},
          {"speedup", r.speedup}};
}

void PrintHeader(const std::string& title) {
  std::printf("\n%s\n%-18s %9s %9s %6s %8s %8s %7s %7s %7s %7s %9s %9s %8s\n", title.c_str(),
              "index", "B/key", "build s", "effort", "keys", "bytes", "rec100", "recK", "worst",
              "mass", "median ms", "p99 ms", "speedup");
}

void Print(const IndexResult& r) {
  std::printf(
      "%-18s %9.1f %9.3f %6.2f %7.1f%% %7.2f%% %7.3f %7.3f %7.3f %7.4f %9.3f %9.3f %7.1fx\n",
      r.index.c_str(), r.bytes_per_key, r.build_seconds, r.effort, 100 * r.keys_scanned,
      100 * r.bytes_fraction, r.recall_100, r.recall_k, r.worst_recall_k, r.relative_mass,
      r.median_ms, r.p99_ms, r.speedup);
}

// Measures on the captured decode the least mass that sharing sets loses with searches in at most a
// tenth of the steps.
Status MeasureRealSharing(const RetrievalTrace& trace, json& ratios) {
  constexpr StepPolicy::Sharing kSettings[] = {
      {16, -1, 1, false}, {16, -1, 8, false}, {20, -1, 1, false}, {20, -1, 8, false}};
  PREFIXD_ASSIGN(const auto results, MeasureSharing(trace, 0.01, kSettings));
  if (const SharingResult* least = LeastLoss(results)) {
    ratios["cis_mass_loss"] = least->mass_loss;
    ratios["cis_rho"] = least->rho;
  }
  return {};
}

// Measures a synthetic head; at a million tokens the figures also go into the ratios.
Status MeasureSyntheticSharing(const HeadTrace& head, json& out, json& ratios) {
  constexpr StepPolicy::Sharing kSettings[] = {
      {1, 0.8, 0, false},   {16, 0.99, 1, false}, {16, 0.98, 1, false}, {16, 0.95, 1, false},
      {16, 0.99, 4, false}, {16, 0.98, 4, false}, {16, 0.8, 4, false}};
  PREFIXD_ASSIGN(const auto results, MeasureSharedSearches(head, kSettings));
  std::printf("\ncodes, sets shared between steps\n%6s %6s %9s %7s %9s %10s %9s %7s %7s\n", "block",
              "cos >", "dilation", "rho", "bytes", "amortized", "tokens/K", "recK", "mass");
  json rows = json::array();
  const SharedResult* within = nullptr;
  for (const SharedResult& r : results) {
    std::printf("%6u %6.2f %9u %7.3f %8.2f%% %9.2f%% %9.2f %7.3f %7.4f\n", r.sharing.block,
                r.sharing.similarity, r.sharing.dilation, r.rho, 100 * r.search_bytes,
                100 * r.amortized_bytes, r.tokens, r.recall_k, r.relative_mass);
    rows.push_back({{"block", r.sharing.block},
                    {"similarity", r.sharing.similarity},
                    {"dilation", r.sharing.dilation},
                    {"rho", r.rho},
                    {"search_bytes", r.search_bytes},
                    {"amortized_bytes", r.amortized_bytes},
                    {"tokens", r.tokens},
                    {"recall_at_k", r.recall_k},
                    {"relative_mass", r.relative_mass}});
    // Among the settings that share, the one that finds most is reported.
    if (r.sharing.on() && (!within || r.recall_k > within->recall_k)) within = &r;
  }
  out["cases"].back()["sharing"] = rows;
  if (head.view().count != kMillion || !within) return {};
  ratios["bytes_search_1m"] = results.front().search_bytes;
  ratios["bytes_amortized_1m"] = within->amortized_bytes;
  ratios["recall_amortized_1m"] = within->recall_k;
  ratios["rho_amortized_1m"] = within->rho;
  return {};
}

Status Run(const Options& options) {
  json out = {{"bench", "selection"},
              {"rounds", options.measure.rounds},
              {"steps", options.steps},
              {"only", options.measure.only},
              {"efforts", options.measure.efforts},
              {"indexes_timed_by", options.measure.cpu_time ? "process" : "clock"},
              {"cases", json::array()}},
       ratios = json::object();
  const auto add = [&](const std::string& name, const std::vector<IndexResult>& results) {
    PrintHeader(name);
    json rows = json::array();
    for (const IndexResult& r : results) {
      Print(r);
      rows.push_back(ToJson(r));
    }
    out["cases"].push_back({{"case", name}, {"indexes", rows}});
  };
  if (options.real) {
    PREFIXD_ASSIGN(const RetrievalTrace trace, MakeTrace(options.trace));
    const std::vector<HeadTrace> heads = HeadTraces(trace);
    PREFIXD_ASSIGN(const auto results, MeasureIndexes(heads, options.measure));
    add("real decode, " + std::to_string(trace.n_tokens) + " tokens, " +
            std::to_string(heads.size()) + " heads, K = 1%",
        results);
    for (const IndexResult& r : results) {
      if (r.index != "codes") continue;
      ratios["recall_flat_codes"] = r.recall_k;
      ratios["bytes_flat_codes"] = r.bytes_fraction;
    }
    if (options.sharing) PREFIXD_TRY(MeasureRealSharing(trace, ratios));
  }
  for (const uint32_t n : options.sizes) {
    SyntheticOptions synthetic;
    synthetic.n_tokens = n;
    synthetic.steps = options.steps;
    const std::vector<HeadTrace> head = {SyntheticHead(synthetic)};
    PREFIXD_ASSIGN(const auto results, MeasureIndexes(head, options.measure));
    add("synthetic, " + std::to_string(n) + " tokens, K = 1%", results);
    if (options.sharing) PREFIXD_TRY(MeasureSyntheticSharing(head.front(), out, ratios));
    const auto find = [&](const char* name) {
      const auto it = std::ranges::find(results, name, &IndexResult::index);
      return it == results.end() ? nullptr : &*it;
    };
    const IndexResult* codes = find("codes");
    if (codes && n == 131072) ratios["speedup_flat_codes_128k"] = codes->speedup;
    if (const IndexResult* ivf = find("faiss ivf"); codes && ivf) {
      const std::string at = "ivf_" + std::to_string(n / 1024) + "k";
      ratios["codes_faster_than_" + at] = ivf->median_ms / codes->median_ms;
      ratios["codes_built_faster_than_" + at] = ivf->build_seconds / codes->build_seconds;
    }
  }
  PREFIXD_ASSIGN(const ScanResult scan, MeasureScan(options.measure.rounds * 3));
  std::printf("\nscan of codes: %.1f GB/s for 1 head, %.1f for 4; memory reads %.1f GB/s\n",
              scan.one_head / 1e9, scan.four_heads / 1e9, scan.bandwidth / 1e9);
  ratios["scan_bandwidth_fraction"] = scan.four_heads_fraction;
  out["scan"] = {{"one_head_bytes_per_second", scan.one_head},
                 {"four_heads_bytes_per_second", scan.four_heads},
                 {"memory_bytes_per_second", scan.bandwidth}};
  out["ratios"] = ratios;
  std::printf("\n");
  for (const auto& [name, value] : ratios.items()) {
    std::printf("  %-28s %8.4f\n", name.c_str(), value.get<double>());
  }
  if (options.json_file.empty()) return {};
  PREFIXD_TRY(WriteJson(options.json_file, out));
  return {};
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Cost and quality of every way to choose the tokens a step reads.");
  prefixd::bench::AddTraceSource(app, options.trace);
  prefixd::bench::AddTraceTokens(app, options.trace);
  app.add_option("--sizes", options.sizes, "Lengths of the synthetic heads")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--rounds", options.measure.rounds, "Passes over the queries")
      ->capture_default_str();
  app.add_option("--steps", options.steps, "Steps of the synthetic heads")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--only", options.measure.only,
                 "Only indexes whose names contain this (and exact)");
  app.add_option("--effort", options.measure.efforts,
                 "Search with each of these efforts, in the index's own measure, instead of tuning "
                 "(with --only, whose index they are)")
      ->needs("--only")
      ->delimiter(',');
  app.add_flag("--cpu-time", options.measure.cpu_time,
               "Times are the process's own, not the clock's: for runs beside other work");
  app.add_flag("!--no-real", options.real, "Leave the real decode out");
  app.add_flag("!--no-sharing", options.sharing, "Leave sets shared between steps out");
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Run(options); });
}
