// Measures what a step through the daemon costs above the same step in this process: through the
// ring, through messages, and through the ring with a client that spins. The sides take turns in
// short blocks, so that other work on the machine slows all alike.
//
// The floor is an empty call through a ring between two processes.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>
#include <vector>

#include "attention/rows/rows.h"
#include "bench/steps/busy_processes.h"
#include "bench/steps/daemon_child.h"
#include "bench/steps/ring_floor.h"
#include "bench/support/bench_main.h"
#include "measure/prompts/synthetic_kv.h"
#include "measure/timing/json_file.h"
#include "prefixd/client.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  uint32_t tokens = 4096, k = 64, blocks = 60, steps = 25, pause_us = 300, spin_us = 2000;
  uint32_t busy = 2;
  int busy_nice = 0;
  std::vector<std::string> daemon;  // further arguments
  std::string json_file;
};

struct Side {
  std::string name;
  std::unique_ptr<Store> store;
  std::vector<std::shared_ptr<Session>> sessions;
};

double At(std::vector<double>& us, double share) {
  const auto at = us.begin() + static_cast<ptrdiff_t>(share * double(us.size() - 1));
  std::ranges::nth_element(us, at);
  return *at;
}

class Bench {
 public:
  explicit Bench(const Options& o) : o_(o) {
    g_ = {2, 32, 8, 64, 64, DType::kBf16, {}};
    g_.layers.assign(g_.n_layers, {.scale = 0.125f});
  }

  Status Run() {
    PREFIXD_TRY(Prepare());
    std::printf(
        "%u tokens, k = %u, layers of 32 query and 8 KV heads of 64; %u blocks of %u calls"
        " %u us apart; us\n",
        o_.tokens, o_.k, o_.blocks, o_.steps, o_.pause_us);
    std::printf("%-24s %-10s %9s %9s | %15s %9s\n", "", "", "p50", "p99", "above embedded:", "p99");
    for (const bool busy : {false, true}) {
      const BusyProcesses spinning(busy ? o_.busy : 0, o_.busy_nice);
      const std::string beside = busy ? "busy" : "idle";
      PREFIXD_TRY(Case(beside + ", one session", 1, 1));
      PREFIXD_TRY(Case(beside + ", batch of 8", 8, 1));
      PREFIXD_TRY(Case(beside + ", 4 threads", 1, 4));
      PREFIXD_TRY(Floors(beside));
    }
    if (o_.json_file.empty()) return {};
    const auto plain = std::ranges::find_if(rows_, [](const nlohmann::json& row) {
      return row["case"] == "idle, one session" && row["side"] == "ring";
    });
    return WriteJson(
        o_.json_file,
        {{"tokens", o_.tokens},
         {"k", o_.k},
         {"blocks", o_.blocks},
         {"steps", o_.steps},
         {"pause_us", o_.pause_us},
         {"spin_us", o_.spin_us},
         {"busy", o_.busy},
         {"rows", rows_},
         {"ratios", {{"step_daemon_overhead_us", plain->at("p50_above_embedded_us")}}}});
  }

 private:
  Status Prepare() {
    SyntheticKv synthetic(g_.n_kv_heads, g_.key_dim, 1);
    const size_t token = size_t{g_.n_kv_heads} * g_.key_dim;
    std::vector<float> k(o_.tokens * token), v(k.size());
    for (uint32_t t = 0; t < o_.tokens; ++t) synthetic.Token(&k[t * token], &v[t * token]);
    k_.resize(k.size() * 2), v_.resize(k_.size());
    FromFloat(g_.dtype, k, k_.data());
    FromFloat(g_.dtype, v, v_.data());
    for (uint32_t t = 0; t < o_.tokens; ++t) tokens_.push_back(t);
    std::mt19937_64 rng(3);
    std::normal_distribution<float> normal;
    q_.resize(64 * size_t{g_.n_q_heads} * g_.key_dim);
    for (float& x : q_) x = normal(rng);

    std::vector<std::string> args = {"--host-tier-mib", "64"};
    args.insert(args.end(), o_.daemon.begin(), o_.daemon.end());
    PREFIXD_TRY(daemon_.Start(PREFIXD_BINARY, args));
    RuntimeOptions own;
    own.dir = daemon_.dir() / "own";
    own.min_free_bytes = 0;
    own.threads = 2;
    own.host_tier_bytes = 64 << 20;
    PREFIXD_TRY(AddSide("embedded", Open(own)));
    ConnectOptions ring, message, spins;
    message.shared_memory = true;
    spins.spin_us = o_.spin_us;
    PREFIXD_TRY(AddSide("ring", Connect(daemon_.address(), ring)));
    PREFIXD_TRY(AddSide("spinning", Connect(daemon_.address(), spins)));
    PREFIXD_TRY(without_ring_.Start(PREFIXD_BINARY, {"--host-tier-mib", "64", "--ring-mib", "0"}));
    return AddSide("message", Connect(without_ring_.address(), message));
  }

  Status AddSide(const std::string& name, Result<std::unique_ptr<Store>> store) {
    if (!store.ok()) return store.error();
    Side side{name, *std::move(store), {}};
    PREFIXD_TRY(side.store->RegisterModel({"bench", g_, {{"weights", "synthetic"}}, {}}));
    PREFIXD_ASSIGN(const auto put, side.store->BeginPut({"bench", "", tokens_, "bench"}));
    const TokenRange missing = put->missing();
    const size_t token = g_.n_kv_heads * g_.row(0).key_bytes();
    for (uint32_t layer = 0; layer < g_.n_layers && missing.size() > 0; ++layer) {
      PREFIXD_TRY(put->Write(layer, missing.begin, missing.size(),
                             std::span(k_).subspan(missing.begin * token),
                             std::span(v_).subspan(missing.begin * token)));
    }
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    PREFIXD_TRY(side.store->WaitReady(stored.prefix, nullptr));
    AttachSpec spec{"bench", "", tokens_};
    spec.policy.k = o_.k;
    spec.policy.estimator = EstimatorKind::kMoment;
    for (int i = 0; i < 8; ++i) {
      PREFIXD_ASSIGN(side.sessions.emplace_back(), side.store->Attach(spec));
    }
    sides_.push_back(std::move(side));
    return {};
  }

  // One block of calls by one thread: steps of `batch` sessions from `first` on.
  Status Block(Side& side, size_t first, uint32_t batch, std::vector<double>* us) {
    const size_t nq = size_t{g_.n_q_heads} * g_.key_dim, ny = size_t{g_.n_q_heads} * g_.value_dim;
    std::vector<float> y(batch * ny), lse(batch * g_.n_q_heads);
    for (uint32_t i = 0; i < o_.steps + 3; ++i) {
      std::vector<StepRequest> steps;
      for (uint32_t b = 0; b < batch; ++b) {
        const size_t query = (i + b * 7) % 64;
        steps.push_back({side.sessions[first + b].get(),
                         i % g_.n_layers,
                         std::span(q_).subspan(query * nq, nq),
                         std::span(y).subspan(b * ny, ny),
                         std::span(lse).subspan(b * g_.n_q_heads, g_.n_q_heads),
                         nullptr,
                         {}});
      }
      std::this_thread::sleep_for(std::chrono::microseconds(o_.pause_us));
      const auto begun = Clock::now();
      side.store->StepBatch(steps);
      const std::chrono::duration<double, std::micro> took = Clock::now() - begun;
      for (const StepRequest& step : steps) PREFIXD_TRY(step.status);
      if (i >= 3) us->push_back(took.count());  // the first of a block find caches of others
    }
    return {};
  }

  Status Case(const std::string& name, uint32_t batch, uint32_t threads) {
    std::vector<std::vector<double>> us(sides_.size());
    for (uint32_t block = 0; block < o_.blocks; ++block) {
      for (size_t s = 0; s < sides_.size(); ++s) {
        std::vector<std::vector<double>> each(threads);
        std::vector<Status> done(threads);
        std::vector<std::thread> team;
        for (uint32_t t = 1; t < threads; ++t) {
          team.emplace_back([&, t] { done[t] = Block(sides_[s], t, batch, &each[t]); });
        }
        done[0] = Block(sides_[s], 0, batch, &each[0]);
        for (std::thread& thread : team) thread.join();
        for (uint32_t t = 0; t < threads; ++t) {
          PREFIXD_TRY(done[t]);
          us[s].insert(us[s].end(), each[t].begin(), each[t].end());
        }
      }
    }
    const double p50 = At(us[0], 0.5), p99 = At(us[0], 0.99);
    for (size_t s = 0; s < sides_.size(); ++s) {
      Line(name, sides_[s].name, us[s], s > 0 ? p50 : 0, s > 0 ? p99 : 0);
    }
    return {};
  }

  Status Floors(const std::string& beside) {
    for (const bool spins : {false, true}) {
      PREFIXD_ASSIGN(auto us, RingFloor(o_.blocks * o_.steps, o_.pause_us, spins));
      Line(beside + ", empty call", spins ? "spinning" : "ring", us, 0, 0);
    }
    return {};
  }

  void Line(const std::string& name, const std::string& side, std::vector<double>& us, double p50,
            double p99) {
    const double mine50 = At(us, 0.5), mine99 = At(us, 0.99);
    std::printf("%-24s %-10s %9.1f %9.1f", name.c_str(), side.c_str(), mine50, mine99);
    nlohmann::json row = {{"case", name}, {"side", side}, {"p50_us", mine50}, {"p99_us", mine99}};
    if (p50 > 0) {
      std::printf(" | %15.1f %9.1f", mine50 - p50, mine99 - p99);
      row["p50_above_embedded_us"] = mine50 - p50;
      row["p99_above_embedded_us"] = mine99 - p99;
    }
    std::printf("\n");
    std::fflush(stdout);
    rows_.push_back(std::move(row));
  }

  const Options& o_;
  KvGeometry g_;
  std::vector<uint32_t> tokens_;
  std::vector<std::byte> k_, v_;
  std::vector<float> q_;
  DaemonChild daemon_, without_ring_;
  std::vector<Side> sides_;
  nlohmann::json rows_ = nlohmann::json::array();
};

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Measures steps through the daemon above steps in this process.");
  app.add_option("--tokens", options.tokens, "Tokens of the prefix")->capture_default_str();
  app.add_option("--k", options.k, "Tokens retrieved")->capture_default_str();
  app.add_option("--blocks", options.blocks, "Blocks of each side")->capture_default_str();
  app.add_option("--steps", options.steps, "Calls of a block")->capture_default_str();
  app.add_option("--pause-us", options.pause_us, "Sleep before a call")->capture_default_str();
  app.add_option("--spin-us", options.spin_us, "Of the spinning client")->capture_default_str();
  app.add_option("--busy", options.busy, "Spinning processes beside it")->capture_default_str();
  app.add_option("--busy-nice", options.busy_nice, "Their nice value")->capture_default_str();
  app.add_option("--daemon", options.daemon, "Arguments of the daemon with a ring")->delimiter(' ');
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Bench(options).Run(); });
}
