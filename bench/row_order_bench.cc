// Which order of rows makes a step read the fewest pages? Captures what a real model retrieves
// (exact Top-K sets of every layer and KV head over a decode) and counts the pages of each order.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/row_orders.h"
#include "bench/support/bench_main.h"
#include "bench/support/json_file.h"
#include "bench/support/trace_options.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

struct Options {
  TraceOptions trace;
  std::string json_file;
};

std::vector<OrderVariant> Variants(uint32_t n_tokens) {
  std::vector<OrderVariant> variants;
  for (const auto part : {storage::RowPart::kRow, storage::RowPart::kValue}) {
    variants.push_back({part, 0, false});
    for (const uint32_t chunk : {2048u, 4096u, 8192u, 16384u}) {
      if (chunk / 2 >= n_tokens) continue;  // the same as the chunk before
      for (const bool by_scores : {false, true}) variants.push_back({part, chunk, by_scores});
    }
  }
  return variants;
}

Status Run(const Options& options) {
  PREFIXD_ASSIGN(const RetrievalTrace trace, CaptureTrace(options.trace));
  const std::vector<double>& fractions = options.trace.fractions;
  const size_t steps = trace.heads[0].sets[0].size();
  std::printf("%u tokens, %zu steps, %zu heads; pages read and amplification of one step\n",
              trace.n_tokens, steps, trace.heads.size());
  std::printf("%-32s", "");
  for (const double f : fractions) std::printf("   %22s %4g%%", "K =", 100 * f);
  std::printf("\n%-32s", "order");
  for (size_t i = 0; i < fractions.size(); ++i)
    std::printf("   %7s %6s %5s %6s", "pages", "ampl.", "best", "/arr.");
  std::printf("   ms/16k head\n");
  json rows = json::array();
  std::vector<PageReads> arrival;
  for (const OrderVariant& variant : Variants(trace.n_tokens)) {
    PREFIXD_ASSIGN(const OrderResult result, MeasureOrder(trace, variant));
    if (arrival.empty()) arrival = result.reads;  // whole rows in order of arrival come first
    std::printf("%-32s", result.name.c_str());
    json row = {{"order", result.name}, {"ms_per_16k_head", 1e3 * result.seconds_per_16k_head}};
    for (size_t f = 0; f < fractions.size(); ++f) {
      const PageReads& r = result.reads[f];
      const double to_arrival = r.pages / arrival[f].pages;
      std::printf("   %7.1f %6.2f %5.2f %6.3f", r.pages, r.amplification, r.best, to_arrival);
      row["reads"].push_back({{"fraction", fractions[f]},
                              {"rows", r.rows},
                              {"pages", r.pages},
                              {"amplification", r.amplification},
                              {"best_packing", r.best},
                              {"pages_to_arrival", to_arrival}});
    }
    std::printf("   %6.1f\n", 1e3 * result.seconds_per_16k_head);
    rows.push_back(std::move(row));
  }
  if (options.json_file.empty()) return {};
  PREFIXD_TRY(WriteJson(options.json_file,
                        json{{"tokens", trace.n_tokens}, {"steps", steps}, {"orders", rows}}));
  return {};
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Pages that a real model's retrieval reads, for several orders of rows.");
  prefixd::bench::AddTraceSource(app, options.trace);
  prefixd::bench::AddTraceTokens(app, options.trace);
  prefixd::bench::AddTraceSteps(app, options.trace);
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Run(options); });
}
