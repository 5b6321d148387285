// Measures the time and memory that a prompt's derived data take: puts, then waits until ready. The
// store's log has the time of each stage.

#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "bench/support/bench_main.h"
#include "measure/prompts/bench_prompt.h"
#include "measure/prompts/prompt_queries.h"
#include "measure/timing/json_file.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  uint32_t tokens = 16384;
  std::filesystem::path dir;
  bool build_ivf = true;
  std::string json_file;
};

double PeakMiB() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

Status Measure(const Options& options) {
  RuntimeOptions runtime;
  runtime.dir = options.dir;
  runtime.build_ivf = options.build_ivf;
  runtime.recluster = false;
  PREFIXD_ASSIGN(const auto store, LocalStore::Open(runtime));
  PrefixDetail detail;
  double seconds = 0, before = 0;
  {
    const Prompt prompt = SyntheticPrompt(Llama1B(), options.tokens, /*huge_pages=*/true);
    PREFIXD_TRY(store->RegisterModel(BenchModel(prompt.geometry)));
    PREFIXD_ASSIGN(const auto put, store->BeginPut({kModelName, "", prompt.tokens, "ingest"}));
    PREFIXD_TRY(WritePrompt(prompt, *put));
    PREFIXD_TRY(WriteQueries(prompt, *put));
    before = PeakMiB();
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    const auto begun = Clock::now();
    PREFIXD_TRY(store->WaitReady(stored.prefix, [&](uint64_t done, uint64_t total, auto unit) {
      std::fprintf(stderr, "\r%llu / %llu %.*s", static_cast<unsigned long long>(done),
                   static_cast<unsigned long long>(total), static_cast<int>(unit.size()),
                   unit.data());
      return true;
    }));
    seconds = std::chrono::duration<double>(Clock::now() - begun).count();
    PREFIXD_ASSIGN(detail, store->Prefix(stored.prefix));
  }
  const double peak = PeakMiB() - before;
  std::printf("%u tokens of 16 layers x 8 KV heads: ready after %.1f s, at most %.0f MiB more\n",
              options.tokens, seconds, peak);
  if (options.json_file.empty()) return {};
  PREFIXD_TRY(
      WriteJson(options.json_file, nlohmann::json{{"tokens", options.tokens},
                                                  {"seconds", seconds},
                                                  {"peak_mib_more", peak},
                                                  {"build_ivf", options.build_ivf},
                                                  {"bytes_stored", detail.summary.own_bytes}}));
  return {};
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Time and memory of making summaries, choices and indexes of a stored prompt.");
  app.add_option("--tokens", options.tokens, "Prompt")->capture_default_str();
  app.add_option("--dir", options.dir, "An empty directory for the store")->required();
  app.add_option("--build-ivf", options.build_ivf, "Indexes too")->capture_default_str();
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Measure(options); });
}
