// Measures many sessions on one prefix: their steps in one batch, whose searches read the codes
// once, and in turn the same steps one session after the other.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
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
  uint32_t tokens = 65536, layers = 2, rounds = 15;
  std::string selector = "codes";
  uint32_t threads = 0;
  std::filesystem::path dir;
  std::string json_file;
};

// The layers are those of an 8B model.
KvGeometry Geometry(uint32_t layers) {
  KvGeometry g{layers, 32, 8, 128, 128, DType::kBf16, {}};
  g.layers.assign(layers, {.scale = 1.0f / std::sqrt(float(g.key_dim))});
  return g;
}

// Holds the cost of one session's step of one layer.
struct Cost {
  std::vector<double> ms;
  double select_ms = 0, scan_bytes = 0;  // means
};

struct Line {
  uint32_t sessions = 0;
  Cost batched, alone;
  std::vector<double> speedup;  // of each pair
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {}

  Status Run() {
    PREFIXD_TRY(Prepare());
    std::printf("%u tokens, %u layers of 32 query and 8 KV heads of 128, 1%% read, selector %s\n",
                options_.tokens, options_.layers, options_.selector.c_str());
    std::printf("%9s %22s %22s %22s %13s %13s\n", "sessions", "ms a step, batched", "alone",
                "alone / batched", "MB scanned", "alone");
    nlohmann::json rows = nlohmann::json::array(), ratios;
    for (const uint32_t n : {1u, 2u, 4u, 8u}) {
      PREFIXD_ASSIGN(const Line line, Measure(n));
      const Spread batched = Summarise(line.batched.ms), alone = Summarise(line.alone.ms),
                   speedup = Summarise(line.speedup);
      const auto print = [](const Spread& s) {
        std::printf("   %6.3f (%.3f-%.3f)", s.median, s.low, s.high);
      };
      std::printf("%9u", n);
      print(batched), print(alone), print(speedup);
      std::printf(" %13.2f %13.2f\n", line.batched.scan_bytes / 1e6, line.alone.scan_bytes / 1e6);
      const auto json = [](const Cost& cost) {
        return nlohmann::json{{"ms", Summarise(cost.ms)},
                              {"select_cpu_ms", cost.select_ms},
                              {"scan_bytes", cost.scan_bytes}};
      };
      rows.push_back({{"sessions", n},
                      {"batched", json(line.batched)},
                      {"alone", json(line.alone)},
                      {"speedup", speedup.median}});
      const std::string suffix = "_" + std::to_string(n) + "_sessions";
      ratios["batch_speedup" + suffix] = speedup.median;
      ratios["batch_bytes" + suffix] = line.batched.scan_bytes / line.alone.scan_bytes;
    }
    if (options_.json_file.empty()) return {};
    return WriteJson(options_.json_file, nlohmann::json{{"bench", "batch"},
                                                        {"tokens", options_.tokens},
                                                        {"layers", options_.layers},
                                                        {"selector", options_.selector},
                                                        {"rows", rows},
                                                        {"ratios", ratios}});
  }

 private:
  static constexpr uint32_t kMostSessions = 8, kQueries = 64;

  Status Prepare() {
    const Prompt prompt = SyntheticPrompt(Geometry(options_.layers), options_.tokens, false);
    geometry_ = prompt.geometry;
    RuntimeOptions runtime;
    runtime.dir = options_.dir;
    runtime.recluster = false;
    runtime.threads = options_.threads;
    runtime.host_tier_bytes = prompt.row_bytes() * 3 / 2;
    runtime.selector_memory_bytes = prompt.row_bytes() * 2;
    PREFIXD_ASSIGN(store_, LocalStore::Open(runtime));
    PREFIXD_TRY(store_->RegisterModel(BenchModel(geometry_)));
    PREFIXD_ASSIGN(const auto put, store_->BeginPut({kModelName, "", prompt.tokens, "batch"}));
    PREFIXD_TRY(WritePrompt(prompt, *put));
    PREFIXD_TRY(WriteQueries(prompt, *put));
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    PREFIXD_TRY(store_->WaitReady(stored.prefix, nullptr));
    AttachSpec spec;
    spec.model = kModelName;
    spec.prefix = stored.prefix;
    spec.policy.budget = 0.01;
    spec.policy.selector = options_.selector;
    for (uint32_t i = 0; i < kMostSessions; ++i) {
      PREFIXD_ASSIGN(auto session, store_->Attach(spec));
      sessions_.push_back(std::move(session));
    }
    SyntheticKv synthetic(geometry_.n_kv_heads, geometry_.key_dim, 1);
    queries_.resize(kQueries * QueryFloats());
    for (size_t i = 0; i * geometry_.key_dim < queries_.size(); ++i) {
      const size_t head = i % geometry_.n_q_heads;
      synthetic.Query(static_cast<uint32_t>(head / geometry_.group_size(0)),
                      &queries_[i * geometry_.key_dim]);
    }
    y_.resize(kMostSessions * size_t{geometry_.n_q_heads} * geometry_.value_dim);
    lse_.resize(kMostSessions * size_t{geometry_.n_q_heads});
    return {};
  }
  size_t QueryFloats() const { return size_t{geometry_.n_q_heads} * geometry_.key_dim; }

  // Runs one step of all layers of `n` sessions; every session has its own query.
  Status Steps(uint32_t n, bool batched, Cost& cost) {
    const size_t values = size_t{geometry_.n_q_heads} * geometry_.value_dim;
    std::vector<StepInfo> infos(n);
    const double of_each = 1.0 / (double(n) * geometry_.n_layers);
    const auto begun = Clock::now();
    for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
      std::vector<StepRequest> requests;
      for (uint32_t i = 0; i < n; ++i) {
        const size_t query = (next_ + i * 7 + layer * 3) % kQueries * QueryFloats();
        requests.push_back({sessions_[i].get(),
                            layer,
                            std::span(queries_).subspan(query, QueryFloats()),
                            std::span(y_).subspan(i * values, values),
                            std::span(lse_).subspan(i * geometry_.n_q_heads, geometry_.n_q_heads),
                            &infos[i],
                            {}});
      }
      const size_t at_once = batched ? n : 1;
      for (size_t first = 0; first < n; first += at_once) {
        store_->StepBatch(std::span(requests).subspan(first, at_once));
      }
      for (uint32_t i = 0; i < n; ++i) {
        if (!requests[i].status.ok()) return std::move(requests[i].status);
        cost.scan_bytes += double(infos[i].ledger.scan_bytes) * of_each / options_.rounds;
        cost.select_ms += double(infos[i].ledger.select_ns) * 1e-6 * of_each / options_.rounds;
      }
    }
    cost.ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begun).count() *
                      of_each);
    return {};
  }

  Result<Line> Measure(uint32_t n) {
    Line line;
    line.sessions = n;
    Cost warm_up;
    for (const bool batched : {false, true}) PREFIXD_TRY(Steps(n, batched, warm_up));
    for (uint32_t round = 0; round < options_.rounds; ++round, ++next_) {
      PREFIXD_TRY(Steps(n, true, line.batched));
      PREFIXD_TRY(Steps(n, false, line.alone));
      line.speedup.push_back(line.alone.ms.back() / line.batched.ms.back());
    }
    return line;
  }

  const Options options_;
  KvGeometry geometry_;
  std::unique_ptr<LocalStore> store_;
  std::vector<std::shared_ptr<Session>> sessions_;
  std::vector<float> queries_, y_, lse_;
  size_t next_ = 0;
};

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Steps of many sessions on one prefix, in batches and one after the other.");
  app.add_option("--tokens", options.tokens, "Prompt")->capture_default_str();
  app.add_option("--layers", options.layers, "Layers of the model")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "Rounds")->capture_default_str();
  app.add_option("--selector", options.selector, "codes, exact, ...")->capture_default_str();
  app.add_option("--threads", options.threads, "Compute threads; 0: one per core")
      ->capture_default_str();
  app.add_option("--dir", options.dir, "An empty directory for the store")->required();
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Bench(options).Run(); });
}
