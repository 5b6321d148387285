// Measures a whole decode step, selection included, over a long prompt in host memory: through a
// store and a session as a decoder runs it. It is compared with exact attention over all rows: with
// its roofline (bytes over the bandwidth measured in the same rounds) and with our own pass over
// rows that lie in order.
//
// The layers are those of an 8B model (32 query heads, 8 KV heads, dh 128, bf16); all cores work.
// Layers rotate, and before each step twice the last-level cache is read, as the layers between
// would be, so that a step's data comes from memory. Keys and queries are those of synthetic heads
// (bench/prompts/head_trace.h). K is 1% of the tokens, read by the exact selector, by codes, and by
// codes with sets shared between steps; full steps read every row. The floor of steps by codes
// reads as many random places of memory of each kind as they read, and computes nothing.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "bench/attention/floors.h"
#include "bench/attention/passes.h"
#include "bench/attention/timing.h"
#include "bench/attention/what_is_read.h"
#include "bench/prompts/head_trace.h"
#include "bench/prompts/traced_store.h"
#include "bench/steps/step_modes.h"
#include "bench/support/bench_main.h"
#include "measure/timing/json_file.h"
#include "runtime/store/local_store.h"
#include "runtime/work/thread_pool.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

struct Options {
  uint32_t tokens = 131072, layers = 4, rounds = 5, steps = 16;
  StepPolicy::Sharing sharing = {.block = 8, .across = true};
  double fraction = 0.01;
  uint32_t tier_mib = 0;  // 0: large enough for every row
  std::string only, compute = "auto";
  std::filesystem::path dir;
  std::string json_file;
};

// The first steps measure the mass of the attention that is read; those after them are timed.
constexpr size_t kMassSteps = 32;
constexpr size_t kQuestion = 64;  // tokens

Spread Scaled(const std::vector<double>& samples, double factor) {
  const Spread s = Summarise(samples);
  return {s.median * factor, s.low * factor, s.high * factor};
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {}

  Status Run() {
    PREFIXD_TRY(MakeHeads());
    TracedPrompt prompt(heads_, options_.layers);
    prompt_ = &prompt;
    PREFIXD_TRY(Store());
    const auto k = static_cast<uint32_t>(std::ceil(options_.fraction * options_.tokens));
    std::vector<Mode> modes = Modes(k, options_.sharing, options_.only);
    if (modes.empty()) return InvalidArgument("no mode is called '" + options_.only + "'");
    PREFIXD_TRY(Warm(modes));
    PREFIXD_TRY(Mass(modes));
    PREFIXD_TRY(Time(modes));
    PREFIXD_TRY(Question());
    Floors(modes);
    return Report(k, modes);
  }

 private:
  size_t QueryFloats() const { return size_t{prompt_->geometry().n_q_heads} * kDim; }

  Status MakeHeads() {
    std::printf("making %u layers of %u tokens\n", options_.layers, options_.tokens);
    heads_.resize(size_t{options_.layers} * kKvHeads);
    ThreadPool pool(0);
    return pool.ParallelFor(heads_.size(), [&](size_t h) -> Status {
      heads_[h] = SyntheticHead(Head(h));
      return {};
    });
  }
  SyntheticOptions Head(size_t h) const {
    SyntheticOptions head;
    head.n_tokens = options_.tokens;
    head.key_dim = kDim;
    head.group = kGroup;
    head.steps = kMassSteps + options_.rounds * options_.steps;
    head.seed = h + 1;
    return head;
  }

  Status Store() {
    RuntimeOptions runtime;
    runtime.dir = options_.dir;
    runtime.host_tier_bytes =
        options_.tier_mib > 0 ? uint64_t{options_.tier_mib} << 20 : prompt_->row_bytes() / 4 * 5;
    runtime.selector_memory_bytes = prompt_->row_bytes();
    runtime.scrub_bytes_per_second = 0;
    runtime.query_samples = 64;
    runtime.compute = options_.compute;
    PREFIXD_ASSIGN(store_, LocalStore::Open(runtime));
    PREFIXD_TRY(prompt_->Register(*store_));
    PREFIXD_ASSIGN(const PrefixMatch match,
                   store_->Match({.model = prompt_->model(), .tokens = prompt_->tokens()}));
    if (match.n_tokens == options_.tokens) {
      std::printf("the store has them already\n");
      prefix_ = match.prefix;
    } else {
      std::printf("putting them into a store, building codes, reclustering rows\n");
      PREFIXD_ASSIGN(prefix_, prompt_->Put(*store_, SampledAt(Head(0))));
    }
    PREFIXD_TRY(store_->WaitReady(prefix_, nullptr));
    return store_->WaitRewritten(nullptr);
  }

  Result<std::shared_ptr<Session>> Attach(const StepPolicy& policy) {
    AttachSpec spec;
    spec.model = prompt_->model();
    spec.prefix = prefix_;
    spec.policy = policy;
    return store_->Attach(spec);
  }

  Status Step(Session& session, uint32_t layer, size_t step, StepInfo* info) {
    const std::vector<float> q = prompt_->Queries(layer, step);
    y_.resize(QueryFloats());
    lse_.resize(prompt_->geometry().n_q_heads);
    const auto begun = std::chrono::steady_clock::now();
    PREFIXD_TRY(session.Step(layer, q, y_, lse_, info));
    seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    return {};
  }

  // Loads every row into the host tier, and the selectors' data into memory.
  Status Warm(const std::vector<Mode>& modes) {
    StepPolicy full;
    full.mode = StepMode::kFull;
    PREFIXD_ASSIGN(const auto session, Attach(full));
    for (const Mode& mode : modes) {
      PREFIXD_ASSIGN(const auto of_mode, Attach(mode.policy));
      for (uint32_t layer = 0; layer < options_.layers; ++layer) {
        PREFIXD_TRY(Step(*session, layer, 0, nullptr));
        PREFIXD_TRY(Step(*of_mode, layer, 0, nullptr));
      }
    }
    while (store_->Stats().value().preload_queue > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return {};
  }

  // Measures on the first steps the part of the attention that each mode reads.
  Status Mass(std::vector<Mode>& modes) {
    StepPolicy full;
    full.mode = StepMode::kFull;
    PREFIXD_ASSIGN(const auto exact, Attach(full));
    std::vector<std::vector<float>> whole;
    for (size_t step = 0; step < kMassSteps; ++step) {
      PREFIXD_TRY(Step(*exact, 0, step, nullptr));
      whole.push_back(lse_);
    }
    for (Mode& mode : modes) {
      StepPolicy policy = mode.policy;  // without an estimate, to measure only what is read
      policy.estimator = EstimatorKind::kNone;
      PREFIXD_ASSIGN(const auto session, Attach(policy));
      for (size_t step = 0; step < kMassSteps; ++step) {
        PREFIXD_TRY(Step(*session, 0, step, nullptr));
        for (size_t h = 0; h < lse_.size(); ++h) {
          mode.mass +=
              std::exp(double{lse_[h]} - whole[step][h]) / double(kMassSteps * lse_.size());
        }
      }
    }
    return {};
  }

  // Measures exact attention of a question's tokens, all at once, over everything.
  Status Question() {
    PREFIXD_ASSIGN(const auto session, Attach({}));
    std::vector<float> queries;
    for (size_t step = 0; step < kQuestion; ++step) {
      const std::vector<float> q = prompt_->Queries(0, step);
      queries.insert(queries.end(), q.begin(), q.end());
    }
    std::vector<float> y(kQuestion * QueryFloats()), lse(kQuestion * prompt_->geometry().n_q_heads);
    for (uint32_t round = 0; round <= options_.rounds; ++round) {
      const auto begun = std::chrono::steady_clock::now();
      PREFIXD_TRY(session->AttendExact(round % options_.layers, kQuestion, queries, y, lse));
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
      if (round > 0) question_.push_back(took.count());  // the first one makes room
    }
    return {};
  }

  size_t MemoryBytes() const {
    const size_t of_layer = size_t{options_.tokens} * kKvHeads * kRow.bytes();
    return std::max(4 * LastLevelCacheBytes(), of_layer * std::max(options_.layers, 3u));
  }

  Status Time(std::vector<Mode>& modes) {
    // A team spins while it has nothing to do, so it exists only while it works.
    auto team = std::make_unique<Team>(threads_);
    const RowMemory memory(*team, MemoryBytes());
    const Layers layers(memory, options_.tokens);
    const Model model = MakeModel(layers);
    for (uint32_t round = 0; round < options_.rounds; ++round) {
      const size_t layer = round % layers.count();
      if (!team) team = std::make_unique<Team>(threads_);
      bandwidth_.push_back(ReadBandwidth(*team, memory, layer * layers.bytes(), layers.bytes()));
      roofline_.push_back(double(layers.bytes()) / bandwidth_.back());
      exact_.push_back(ExactPass(*team, layers, (layer + 1) % layers.count(), model));
      team.reset();
      for (size_t m = 0; m < modes.size(); ++m) {
        Mode& mode = modes[(m + round) % modes.size()];
        // The steps of one round follow one another, because sharing needs that.
        PREFIXD_ASSIGN(const auto session, Attach(mode.policy));
        std::vector<double> ms;
        for (uint32_t s = 0; s < options_.steps; ++s) {
          for (uint32_t l = 0; l < options_.layers; ++l) {
            Sweep(memory);
            StepInfo info;
            PREFIXD_TRY(Step(*session, l, kMassSteps + size_t{round} * options_.steps + s, &info));
            ms.push_back(seconds_ * 1e3);
            mode.spent += info.ledger;
          }
        }
        // Some steps of a decode search and others share; a token waits for their mean.
        double sum = 0;
        for (const double x : ms) sum += x;
        mode.ms.push_back(sum / double(ms.size()));
        const uint64_t read = mode.spent.physical_bytes[static_cast<size_t>(Tier::kSsd)];
        if (read > 0 && options_.tier_mib == 0) {
          return Error{Code::kInternal, "steps were to find everything in memory and read " +
                                            std::to_string(read) + " bytes from the disk"};
        }
      }
    }
    return {};
  }

  static bool HasFloor(const Mode& mode) { return mode.policy.selector == "codes"; }

  void Floors(std::vector<Mode>& modes) {
    if (std::ranges::none_of(modes, HasFloor)) return;
    std::unique_ptr<RowMemory> memory, others;
    {
      Team team(threads_);
      memory = std::make_unique<RowMemory>(team, MemoryBytes());
      others = std::make_unique<RowMemory>(team, 2 * LastLevelCacheBytes());
    }
    const Layers layers(*memory, options_.tokens);
    std::mt19937_64 rng(1);
    for (Mode& mode : modes) {
      if (!HasFloor(mode)) continue;
      const uint32_t k = *mode.policy.k;
      for (uint32_t round = 0; round < std::max(options_.rounds, 5u); ++round) {
        const auto ms = [&](const std::vector<std::vector<Pieces>>& read) {
          Sweep(*others);
          Team team(threads_);
          return PiecesSeconds(team, read) * 1e3;
        };
        const size_t layer = round % layers.count();
        const double searches = mode.spent.retrieval_ratio();
        double floor = searches * ms(ReadBySearch(mode.spent, k, layers, layer, rng));
        if (searches < 1) floor += (1 - searches) * ms(ReadBySharing(mode.spent, k, layers, layer));
        mode.floor_ms.push_back(floor);
      }
    }
  }

  // Empties the caches of the last steps' data.
  void Sweep(const RowMemory& memory) {
    const size_t bytes = std::min(memory.bytes(), 2 * LastLevelCacheBytes());
    Team team(threads_);
    swept_ = swept_ + bytes + bytes > memory.bytes() ? 0 : swept_ + bytes;
    ReadBandwidth(team, memory, swept_, bytes);
  }

  Status Report(uint32_t k, const std::vector<Mode>& modes) const {
    const std::string at = "_" + std::to_string(options_.tokens / 1024) + "k";
    std::printf("\n%u tokens, K = %u, %u layers in turns; memory read %.1f GB/s\n", options_.tokens,
                k, options_.layers, Median(bandwidth_) / 1e9);
    std::printf("exact over everything: roofline %.3f ms, our own pass %.3f ms\n",
                Median(roofline_) * 1e3, Median(exact_) * 1e3);
    std::printf("%-26s %22s %9s %9s %9s %9s %8s %7s %7s\n", "a layer's step", "ms", "roofline",
                "our pass", "select", "read", "compute", "search", "mass");
    json rows = json::array(), ratios;
    for (const Mode& mode : modes) {
      const Spread ms = Summarise(mode.ms);
      std::vector<double> seconds = mode.ms;
      for (double& x : seconds) x *= 1e-3;
      const std::vector<double> over_roofline = Ratios(roofline_, seconds),
                                over_pass = Ratios(exact_, seconds);
      const auto us = [&](uint64_t ns) { return double(ns) * 1e-3 / double(mode.spent.steps); };
      std::printf(
          "%-26s %7.3f (%6.3f-%6.3f) %8.1fx %8.1fx %6.0f us %6.0f us %5.0f us %7.2f %7.3f\n",
          mode.name, ms.median, ms.low, ms.high, Median(over_roofline), Median(over_pass),
          us(mode.spent.select_ns), us(mode.spent.read_ns), us(mode.spent.compute_ns),
          mode.spent.retrieval_ratio(), mode.mass);
      json row = {{"mode", mode.key},
                  {"ms", Summarise(mode.ms)},
                  {"speedup_over_roofline", Summarise(over_roofline)},
                  {"speedup_over_own_pass", Summarise(over_pass)},
                  {"select_us_of_head", us(mode.spent.select_ns)},
                  {"read_us_of_head", us(mode.spent.read_ns)},
                  {"compute_us_of_head", us(mode.spent.compute_ns)},
                  {"retrieval_ratio", mode.spent.retrieval_ratio()},
                  {"scan_bytes_of_head", double(mode.spent.scan_bytes) / double(mode.spent.steps)},
                  {"mass", mode.mass}};
      if (!mode.floor_ms.empty()) {
        row["floor_ms"] = Summarise(mode.floor_ms);
        row["floor_speedup_over_roofline"] = Median(roofline_) * 1e3 / Median(mode.floor_ms);
      }
      rows.push_back(std::move(row));
      const std::string name = std::string(mode.key) == "codes_auto"
                                   ? "step_speedup"
                                   : std::string("step_speedup_") + mode.key;
      ratios[name + at] = Median(over_roofline);
      ratios[name + at + "_own_pass"] = Median(over_pass);
    }
    for (const Mode& mode : modes) {
      if (mode.floor_ms.empty()) continue;
      const double floor = Median(mode.floor_ms);
      std::printf("reading what '%s' reads, nothing computed: %.3f ms, %.1fx the roofline\n",
                  mode.name, floor, Median(roofline_) * 1e3 / floor);
    }
    const Spread question = Scaled(question_, 1e3);
    const std::string compute = store_->Stats().value().compute;
    std::printf("a question of %zu tokens over everything, a layer: %.2f ms (%.2f-%.2f); %s\n",
                kQuestion, question.median, question.low, question.high, compute.c_str());
    std::printf(
        "select, read, compute: of one KV head, on its thread; search: searches of those "
        "that a search for every step would be\n");
    if (options_.json_file.empty()) return {};
    return WriteJson(options_.json_file, json{{"bench", "step"},
                                              {"tokens", options_.tokens},
                                              {"layers", options_.layers},
                                              {"k", k},
                                              {"threads", threads_},
                                              {"tier_mib", options_.tier_mib},
                                              {"sharing",
                                               {{"block", options_.sharing.block},
                                                {"similarity", options_.sharing.similarity},
                                                {"dilation", options_.sharing.dilation}}},
                                              {"bandwidth_gb_s", Scaled(bandwidth_, 1e-9)},
                                              {"roofline_ms", Scaled(roofline_, 1e3)},
                                              {"exact_ms", Scaled(exact_, 1e3)},
                                              {"compute", compute},
                                              {"question_tokens", kQuestion},
                                              {"question_ms", question},
                                              {"modes", rows},
                                              {"ratios", ratios}});
  }

  const Options options_;
  const unsigned threads_ = std::max(1u, std::thread::hardware_concurrency());
  std::vector<HeadTrace> heads_;
  const TracedPrompt* prompt_ = nullptr;
  std::unique_ptr<prefixd::LocalStore> store_;
  std::string prefix_;
  std::vector<float> y_, lse_;
  double seconds_ = 0;
  size_t swept_ = 0;  // start of the last sweep
  std::vector<double> bandwidth_, roofline_, exact_, question_;
};

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("A decode step with its selection, against exact attention over everything.");
  app.add_option("--tokens", options.tokens, "Prompt")
      ->check(CLI::Range(16384, 1 << 20))
      ->capture_default_str();
  app.add_option("--layers", options.layers, "Layers, in turns")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  app.add_option("--fraction", options.fraction, "K, of the prompt")
      ->check(CLI::Range(0.0001, 0.3))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "Rounds")
      ->check(CLI::Range(1, 99))
      ->capture_default_str();
  app.add_option("--steps", options.steps, "Decode steps of a round")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--block", options.sharing.block, "Sharing: steps of a block")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--similarity", options.sharing.similarity, "Sharing: cosine of queries alike")
      ->check(CLI::Range(-1.0, 1.0))
      ->capture_default_str();
  app.add_option("--dilation", options.sharing.dilation, "Sharing: neighbours to either side")
      ->check(CLI::Range(0, 16))
      ->capture_default_str();
  app.add_option("--compute", options.compute, "compute.backend of the store")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--tier-mib", options.tier_mib,
                 "Host tier; what it has no room for is read from the disk; 0: room for all rows")
      ->capture_default_str();
  app.add_option("--only", options.only, "Modes whose name in the JSON contains this");
  app.add_option("--dir", options.dir,
                 "For the store: empty, or as a run with the same prompt left it")
      ->required();
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Bench(options).Run(); });
}
