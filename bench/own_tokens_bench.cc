// Measures a decode step over a prefix and own tokens, for one layer: StepAppend, where the session
// keeps the own tokens, beside Step and the engine's own exact attention over rows that it keeps
// itself, merged; in this process and through a daemon. The sides take turns, step by step.
//
// The engine's side is the same exact kernel over rows in order, half of the KV heads on a thread
// that each step starts: no measure of what an engine with threads of its own can reach.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>
#include <vector>

#include "attention/rows/rows.h"
#include "attention/step/step.h"
#include "bench/steps/daemon_child.h"
#include "bench/support/bench_main.h"
#include "measure/prompts/synthetic_kv.h"
#include "measure/timing/json_file.h"
#include "prefixd/client.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  uint32_t tokens = 4096, k = 64, steps = 200;
  std::vector<uint32_t> own = {1024, 8192};
  std::string json_file;
};

class Bench {
 public:
  explicit Bench(const Options& o) : o_(o) {
    g_ = {1, 32, 8, 64, 64, DType::kBf16, {}};
    g_.layers.assign(1, {.scale = 0.125f});
  }

  Status Run() {
    PREFIXD_TRY(Prepare());
    std::printf(
        "%u tokens, k = %u, a layer of 32 query and 8 KV heads of 64, bf16; %u steps each, in "
        "turns; "
        "us\n%-10s %10s | %10s %20s | %10s %20s | %s\n",
        o_.tokens, o_.k, o_.steps, "side", "own tokens", "StepAppend", "p25..p75", "Step+merge",
        "p25..p75", "ratio");
    for (const uint32_t own : o_.own) {
      for (Side& side : sides_) PREFIXD_TRY(Measure(side, own));
    }
    if (o_.json_file.empty()) return {};
    return WriteJson(o_.json_file,
                     {{"tokens", o_.tokens}, {"k", o_.k}, {"steps", o_.steps}, {"rows", rows_}});
  }

 private:
  struct Side {
    std::string name;
    std::unique_ptr<Store> store;
  };

  Status Prepare() {
    const uint32_t most = std::ranges::max(o_.own) + o_.steps + 16;
    SyntheticKv synthetic(g_.n_kv_heads, g_.key_dim, 1);
    const size_t token = size_t{g_.n_kv_heads} * g_.key_dim;
    const auto rows = [&](uint32_t n, std::vector<std::byte>& k_out,
                          std::vector<std::byte>& v_out) {
      std::vector<float> k(n * token), v(k.size());
      for (uint32_t t = 0; t < n; ++t) synthetic.Token(&k[t * token], &v[t * token]);
      k_out.resize(k.size() * 2), v_out.resize(k_out.size());
      FromFloat(g_.dtype, k, k_out.data());
      FromFloat(g_.dtype, v, v_out.data());
    };
    rows(o_.tokens, k_, v_);
    rows(most, own_k_, own_v_);
    for (uint32_t t = 0; t < o_.tokens; ++t) tokens_.push_back(t);
    std::mt19937_64 rng(3);
    std::normal_distribution<float> normal;
    q_.resize(64 * size_t{g_.n_q_heads} * g_.key_dim);
    for (float& x : q_) x = normal(rng);
    PREFIXD_TRY(daemon_.Start(PREFIXD_BINARY, {"--host-tier-mib", "64"}));
    RuntimeOptions own;
    own.dir = daemon_.dir() / "own";
    own.min_free_bytes = 0;
    own.threads = 2;
    own.host_tier_bytes = 64 << 20;
    PREFIXD_TRY(AddSide("embedded", Open(own)));
    return AddSide("ring", Connect(daemon_.address(), {}));
  }

  Status AddSide(const std::string& name, Result<std::unique_ptr<Store>> store) {
    if (!store.ok()) return store.error();
    PREFIXD_TRY((*store)->RegisterModel({"bench", g_, {{"weights", "synthetic"}}, {}}));
    PREFIXD_ASSIGN(const auto put, (*store)->BeginPut({"bench", "", tokens_, "bench"}));
    PREFIXD_TRY(put->Write(0, 0, o_.tokens, k_, v_));
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    PREFIXD_TRY((*store)->WaitReady(stored.prefix, nullptr));
    sides_.push_back({name, *std::move(store)});
    return {};
  }

  // The engine's rows of one KV head lie one after another, as the session's do.
  std::vector<std::vector<std::byte>> EngineRows() const {
    const size_t half = g_.row(0).key_bytes(), n = own_k_.size() / (g_.n_kv_heads * half);
    std::vector<std::vector<std::byte>> heads(g_.n_kv_heads);
    for (uint32_t h = 0; h < g_.n_kv_heads; ++h) {
      for (size_t t = 0; t < n; ++t) {
        const size_t at = (t * g_.n_kv_heads + h) * half;
        heads[h].insert(heads[h].end(), &own_k_[at], &own_k_[at] + half);
        heads[h].insert(heads[h].end(), &own_v_[at], &own_v_[at] + half);
      }
    }
    return heads;
  }

  Status MergeEngines(const std::vector<std::vector<std::byte>>& rows, uint32_t own,
                      std::span<const float> q, std::span<float> y, std::span<float> lse) const {
    const uint32_t group = g_.group_size(0), dim = g_.key_dim;
    std::vector<Status> done(2);
    const auto some = [&](uint32_t first) {
      std::vector<float> own_y(group * dim), own_lse(group);
      for (uint32_t h = first; h < g_.n_kv_heads && done[first].ok(); h += 2) {
        done[first] =
            ExactAttention(q.subspan(h * group * dim, group * dim), group, g_.layers[0],
                           {rows[h].data(), own, g_.row(0).bytes(), g_.row(0)}, own_y, own_lse);
        for (uint32_t i = 0; i < group; ++i) {
          MergeStates(y.subspan((h * group + i) * dim, dim), &lse[h * group + i],
                      std::span(own_y).subspan(i * dim, dim), own_lse[i]);
        }
      }
    };
    std::thread other(some, 1);
    some(0);
    other.join();
    PREFIXD_TRY(done[0]);
    return done[1];
  }

  Status Measure(Side& side, uint32_t own) {
    AttachSpec spec{"bench", "", tokens_};
    spec.policy.k = o_.k;
    spec.policy.estimator = EstimatorKind::kMoment;
    PREFIXD_ASSIGN(const auto session, side.store->Attach(spec));
    const size_t token = g_.n_kv_heads * g_.row(0).key_bytes();
    const std::span<const std::byte> k(own_k_), v(own_v_);
    PREFIXD_TRY(session->Append(0, own, k.first(own * token), v.first(own * token)));
    const auto engine = EngineRows();
    const size_t nq = size_t{g_.n_q_heads} * g_.key_dim;
    std::vector<float> y(nq), lse(g_.n_q_heads), other_y(nq), other_lse(g_.n_q_heads);
    std::vector<double> append_us, merge_us;
    double error = 0;
    for (uint32_t i = 0; i < o_.steps + 8; ++i) {
      const auto q = std::span(q_).subspan(i % 64 * nq, nq);
      const auto appends = [&]() -> Status {
        const auto begun = Clock::now();
        PREFIXD_TRY(session->StepAppend(0, q, k.subspan((own + i) * token, token),
                                        v.subspan((own + i) * token, token), y, lse, nullptr));
        const std::chrono::duration<double, std::micro> took = Clock::now() - begun;
        if (i >= 8) append_us.push_back(took.count());
        return {};
      };
      const auto merges = [&]() -> Status {
        const auto begun = Clock::now();
        PREFIXD_TRY(session->Step(0, q, other_y, other_lse, nullptr));
        PREFIXD_TRY(MergeEngines(engine, own + i + 1, q, other_y, other_lse));
        const std::chrono::duration<double, std::micro> took = Clock::now() - begun;
        if (i >= 8) merge_us.push_back(took.count());
        return {};
      };
      PREFIXD_TRY(i % 2 ? appends() : merges());
      PREFIXD_TRY(i % 2 ? merges() : appends());
      for (size_t l = 0; l < nq; ++l) error = std::max(error, std::abs(double{y[l]} - other_y[l]));
    }
    if (error > 1e-4) {
      return Error{Code::kInternal, "the two sides differ by " + std::to_string(error)};
    }
    const Spread a = Summarise(append_us), b = Summarise(merge_us);
    std::printf("%-10s %10u | %10.1f %9.1f..%9.1f | %10.1f %9.1f..%9.1f | %.2f\n",
                side.name.c_str(), own, a.median, a.low, a.high, b.median, b.low, b.high,
                a.median / b.median);
    std::fflush(stdout);
    rows_.push_back(
        {{"side", side.name}, {"own", own}, {"step_append_us", a}, {"step_and_merge_us", b}});
    return {};
  }

  const Options& o_;
  KvGeometry g_;
  std::vector<uint32_t> tokens_;
  std::vector<std::byte> k_, v_, own_k_, own_v_;
  std::vector<float> q_;
  DaemonChild daemon_;
  std::vector<Side> sides_;
  nlohmann::json rows_ = nlohmann::json::array();
};

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Measures steps over a prefix and own tokens that the session or the engine keeps.");
  app.add_option("--tokens", options.tokens, "Tokens of the prefix")->capture_default_str();
  app.add_option("--k", options.k, "Tokens retrieved")->capture_default_str();
  app.add_option("--steps", options.steps, "Steps of each side")->capture_default_str();
  app.add_option("--own", options.own, "Own tokens")->delimiter(',')->capture_default_str();
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Bench(options).Run(); });
}
