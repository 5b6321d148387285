// Measures how the background work of one prompt slows the steps of another: a session decodes
// while the summaries, choices and indexes of a second prompt are made, and in turn without.

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "bench/support/bench_main.h"
#include "measure/prompts/bench_prompt.h"
#include "measure/prompts/prompt_queries.h"
#include "measure/timing/json_file.h"
#include "measure/timing/statistics.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  uint32_t tokens = 16384, rounds = 7;
  std::filesystem::path dir;
  std::string json_file;
};

// Returns the shape of the model in models/: 4 layers, 4 query heads, 2 KV heads of 64.
KvGeometry TinyGeometry() {
  KvGeometry geometry = Llama1B();
  geometry.n_layers = 4;
  geometry.n_q_heads = 4;
  geometry.n_kv_heads = 2;
  geometry.layers.resize(4);
  return geometry;
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options), prompt_(SyntheticPrompt(TinyGeometry(), options.tokens, false)) {}

  Status Run() {
    RuntimeOptions runtime;
    runtime.dir = options_.dir;
    runtime.recluster = false;  // only builds are measured, no rewriting
    PREFIXD_ASSIGN(const auto store, LocalStore::Open(runtime));
    PREFIXD_TRY(store->RegisterModel(BenchModel(prompt_.geometry)));
    PREFIXD_ASSIGN(const std::string served, Put(*store));
    PREFIXD_TRY(store->WaitReady(served, nullptr));
    AttachSpec spec;
    spec.model = kModelName;
    spec.prefix = served;
    spec.policy.budget = 0.01;
    PREFIXD_ASSIGN(const auto session, store->Attach(spec));
    MakeQueries();
    for (int i = 0; i < 200; ++i) PREFIXD_TRY(StepAllLayers(*session));  // warm-up

    std::vector<double> quiet_ms, busy_ms, p99, slowdown, build_seconds, steps;
    for (uint32_t round = 0; round < options_.rounds; ++round) {
      std::vector<double> quiet, busy;
      while (quiet.size() < 300) PREFIXD_TRY(Timed(*session, quiet));
      prompt_.tokens[0] = 1000003 + round;  // the prompts share no prefix
      const auto begun = Clock::now();
      PREFIXD_ASSIGN(const std::string other, Put(*store));
      for (;;) {
        PREFIXD_ASSIGN(const PrefixDetail detail, store->Prefix(other));
        if (detail.summary.ingest == IngestState::kReady) break;
        if (detail.summary.ingest == IngestState::kFailed) {
          return Error{Code::kInternal, "the ingest failed: " + detail.summary.ingest_error};
        }
        for (int i = 0; i < 10; ++i) PREFIXD_TRY(Timed(*session, busy));
      }
      build_seconds.push_back(std::chrono::duration<double>(Clock::now() - begun).count());
      PREFIXD_TRY(store->Remove(other));
      steps.push_back(double(busy.size()));
      std::sort(busy.begin(), busy.end());
      p99.push_back(busy[(busy.size() - 1) * 99 / 100]);
      quiet_ms.push_back(Summarise(std::move(quiet)).median);
      busy_ms.push_back(Summarise(std::move(busy)).median);
      slowdown.push_back(busy_ms.back() / quiet_ms.back());
    }
    return Report(Summarise(quiet_ms), Summarise(busy_ms), Summarise(p99), Summarise(slowdown),
                  Summarise(build_seconds), Summarise(steps));
  }

 private:
  Result<std::string> Put(Store& store) {
    PREFIXD_ASSIGN(const auto put, store.BeginPut({kModelName, "", prompt_.tokens, "background"}));
    PREFIXD_TRY(WritePrompt(prompt_, *put));
    PREFIXD_TRY(WriteQueries(prompt_, *put));
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    return stored.prefix;
  }

  // Makes the queries of many steps, so that no step repeats the one before.
  void MakeQueries() {
    const KvGeometry& g = prompt_.geometry;
    queries_.resize(64 * size_t{g.n_layers} * g.n_q_heads * g.key_dim);
    std::vector<SyntheticKv> layers;
    for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
      layers.emplace_back(g.n_kv_heads, g.key_dim, layer + 1);
    }
    for (size_t i = 0; i * g.key_dim < queries_.size(); ++i) {
      const size_t head = i % g.n_q_heads, layer = i / g.n_q_heads % g.n_layers;
      layers[layer].Query(static_cast<uint32_t>(head / g.group_size(0)), &queries_[i * g.key_dim]);
    }
  }

  Status StepAllLayers(Session& session) {
    const KvGeometry& g = prompt_.geometry;
    const size_t floats = size_t{g.n_q_heads} * g.key_dim;
    std::vector<float> y(size_t{g.n_q_heads} * g.value_dim), lse(g.n_q_heads);
    for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
      const auto q = std::span(queries_).subspan(next_++ * floats % queries_.size(), floats);
      PREFIXD_TRY(session.Step(layer, q, y, lse, nullptr));
    }
    return {};
  }

  Status Timed(Session& session, std::vector<double>& ms) {
    const auto begun = Clock::now();
    PREFIXD_TRY(StepAllLayers(session));
    ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begun).count());
    return {};
  }

  Status Report(const Spread& quiet, const Spread& busy, const Spread& p99, const Spread& slowdown,
                const Spread& build, const Spread& steps) const {
    const auto line = [](const char* what, const Spread& s, const char* unit) {
      std::printf("%-34s %9.3f  (%.3f to %.3f) %s\n", what, s.median, s.low, s.high, unit);
    };
    std::printf("%u tokens, 4 layers of 2 KV heads, 1%% read; %u rounds\n", options_.tokens,
                options_.rounds);
    line("step, nothing else", quiet, "ms");
    line("step, a prompt being put and built", busy, "ms");
    line("  the slowest of 100", p99, "ms");
    line("put and build", build, "s");
    line("steps meanwhile", steps, "");
    line("slowdown", slowdown, "times");
    if (options_.json_file.empty()) return {};
    PREFIXD_TRY(
        WriteJson(options_.json_file,
                  nlohmann::json{{"bench", "background"},
                                 {"tokens", options_.tokens},
                                 {"quiet_ms", quiet},
                                 {"busy_ms", busy},
                                 {"busy_p99_ms", p99},
                                 {"build_seconds", build},
                                 {"ratios", {{"step_slowdown_while_building", slowdown.median}}}}));
    return {};
  }

  const Options options_;
  Prompt prompt_;
  std::vector<float> queries_;  // [steps][layers][n_q_heads][key_dim]
  size_t next_ = 0;
};

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Steps of one prompt while the derived data of another are made.");
  app.add_option("--tokens", options.tokens, "Prompt")->capture_default_str();
  app.add_option("--rounds", options.rounds, "Rounds")->capture_default_str();
  app.add_option("--dir", options.dir, "An empty directory for the store")->required();
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Bench(options).Run(); });
}
