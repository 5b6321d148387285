// Measures what a tenant's steps cost beside another tenant that asks for all it can, through the
// real daemon: the small tenant's steps alone and beside each kind of flood, in turns, so that
// other work on the machine slows both alike. What the flood gets done meanwhile stands beside it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/steps/daemon_child.h"
#include "bench/steps/synthetic_put.h"
#include "bench/support/bench_main.h"
#include "measure/timing/json_file.h"
#include "prefixd/client.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  uint32_t small_tokens = 4096, small_k = 64, flood_tokens = 65536, flood_threads = 16;
  uint32_t questions = 32, rounds = 5, pause_us = 1000;
  double block_s = 2, flood_budget = 0.1;
  std::string program = PREFIXD_BINARY;
  std::vector<std::string> daemon;  // further arguments
  std::string json_file;
};

enum class Flood : uint8_t { kNone, kFull, kBatches, kQuestions, kAll };

double At(std::vector<double>& us, double share) {
  const auto at = us.begin() + static_cast<ptrdiff_t>(share * double(us.size() - 1));
  std::ranges::nth_element(us, at);
  return *at;
}

class Bench {
 public:
  explicit Bench(const Options& o) : o_(o) {
    g_ = {1, 32, 8, 64, 64, DType::kBf16, {{.scale = 0.125f}}};
    std::mt19937_64 rng(3);
    std::normal_distribution<float> normal;
    q_.resize(size_t{o_.questions} * g_.n_q_heads * g_.key_dim);
    for (float& x : q_) x = normal(rng);
  }

  Status Run() {
    std::vector<std::string> args = {"--host-tier-mib", "64"};
    args.insert(args.end(), o_.daemon.begin(), o_.daemon.end());
    PREFIXD_TRY(daemon_.Start(o_.program, args));
    PREFIXD_TRY(Put("small", o_.small_tokens));
    PREFIXD_TRY(Put("flood", o_.flood_tokens));
    std::printf(
        "small: %u tokens, k = %u, one thread, %u us apart; flood: %u tokens, %u threads; layers "
        "of\n"
        "32 query and 8 KV heads of 64; %u rounds of %.1f s each; the small tenant's steps in us\n",
        o_.small_tokens, o_.small_k, o_.pause_us, o_.flood_tokens, o_.flood_threads, o_.rounds,
        o_.block_s);
    std::printf("%-22s %8s %8s | %8s %8s | %6s %6s %15s | %s\n", "flood", "p50", "p99", "p50",
                "p99", "p50 x", "p99 x", "p25 to p75", "its calls/s: alone, beside");
    PREFIXD_TRY(Case("nothing", Flood::kNone));
    PREFIXD_TRY(Case("full passes", Flood::kFull));
    PREFIXD_TRY(Case("batches of 8", Flood::kBatches));
    PREFIXD_TRY(Case("questions", Flood::kQuestions));
    PREFIXD_TRY(Case("all of these", Flood::kAll));
    if (o_.json_file.empty()) return {};
    return WriteJson(o_.json_file, {{"small_tokens", o_.small_tokens},
                                    {"small_k", o_.small_k},
                                    {"flood_tokens", o_.flood_tokens},
                                    {"flood_threads", o_.flood_threads},
                                    {"flood_budget", o_.flood_budget},
                                    {"questions", o_.questions},
                                    {"rounds", o_.rounds},
                                    {"block_s", o_.block_s},
                                    {"pause_us", o_.pause_us},
                                    {"rows", rows_}});
  }

 private:
  Result<std::unique_ptr<Store>> ConnectAs(const std::string& tenant) {
    ConnectOptions options;
    options.tenant = tenant;
    return Connect(daemon_.address(), options);
  }

  Status Put(const std::string& tenant, uint32_t n) {
    PREFIXD_ASSIGN(const auto store, ConnectAs(tenant));
    return PutSynthetic(*store, {"bench", g_, {{"weights", "synthetic"}}, {}}, n);
  }

  Result<std::shared_ptr<Session>> AttachTo(Store& store, uint32_t n, const StepPolicy& policy) {
    AttachSpec spec{"bench", "", SyntheticTokens(n)};
    spec.policy = policy;
    return store.Attach(spec);
  }

  // Calls of one kind by one thread, until told to stop. Each thread has a connection of its own.
  Status FloodBy(Flood kind, const std::atomic<bool>& stop, std::atomic<uint64_t>& calls) {
    PREFIXD_ASSIGN(const auto store, ConnectAs("flood"));
    StepPolicy policy;
    policy.mode = kind == Flood::kFull ? StepMode::kFull : StepMode::kRetrieve;
    policy.budget = o_.flood_budget;
    policy.estimator = EstimatorKind::kMoment;
    const uint32_t n = kind == Flood::kBatches ? 8 : 1;
    std::vector<std::shared_ptr<Session>> sessions(n);
    for (auto& session : sessions) {
      PREFIXD_ASSIGN(session, AttachTo(*store, o_.flood_tokens, policy));
    }
    const size_t nq = size_t{g_.n_q_heads} * g_.key_dim;
    const size_t answers = kind == Flood::kQuestions ? o_.questions : n;
    std::vector<float> y(answers * nq), lse(answers * g_.n_q_heads);
    while (!stop) {
      if (kind == Flood::kQuestions) {
        PREFIXD_TRY(sessions[0]->AttendExact(0, {}, o_.questions, q_, y, lse));
      } else {
        std::vector<StepRequest> steps;
        for (uint32_t s = 0; s < n; ++s) {
          steps.push_back({sessions[s].get(),
                           0,
                           std::span(q_).subspan((s % o_.questions) * nq, nq),
                           std::span(y).subspan(s * nq, nq),
                           std::span(lse).subspan(s * g_.n_q_heads, g_.n_q_heads),
                           nullptr,
                           {}});
        }
        store->StepBatch(steps);
        for (const StepRequest& step : steps) PREFIXD_TRY(step.status);
      }
      ++calls;
    }
    return {};
  }

  // Runs the flood for a block, and the small tenant's steps beside it if `us` is given. Returns
  // the flood's calls per second.
  Result<double> Block(Flood kind, std::vector<double>* us) {
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> calls{0};
    const uint32_t threads = kind == Flood::kNone ? 0 : o_.flood_threads;
    std::vector<Status> statuses(threads);
    std::vector<std::thread> team;
    for (uint32_t t = 0; t < threads; ++t) {
      constexpr Flood kKinds[] = {Flood::kFull, Flood::kBatches, Flood::kQuestions};
      const Flood mine = kind == Flood::kAll ? kKinds[t % 3] : kind;
      team.emplace_back([&, t, mine] { statuses[t] = FloodBy(mine, stop, calls); });
    }
    Status own;
    if (threads > 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));  // attaches
    const uint64_t before = calls;
    const auto begun = Clock::now(), end = begun + std::chrono::duration_cast<Clock::duration>(
                                                       std::chrono::duration<double>(o_.block_s));
    if (us != nullptr) {
      own = StepUntil(end, us);
    } else {
      std::this_thread::sleep_until(end);
    }
    const double rate =
        double(calls - before) / std::chrono::duration<double>(Clock::now() - begun).count();
    stop = true;
    for (std::thread& thread : team) thread.join();
    for (const Status& status : statuses) PREFIXD_TRY(status);
    PREFIXD_TRY(own);
    return rate;
  }

  Status StepUntil(Clock::time_point end, std::vector<double>* us) {
    if (!small_) {
      PREFIXD_ASSIGN(small_store_, ConnectAs("small"));
      StepPolicy policy;
      policy.k = o_.small_k;
      policy.estimator = EstimatorKind::kMoment;
      PREFIXD_ASSIGN(small_, AttachTo(*small_store_, o_.small_tokens, policy));
    }
    const size_t nq = size_t{g_.n_q_heads} * g_.key_dim;
    std::vector<float> y(nq), lse(g_.n_q_heads);
    for (size_t i = 0; Clock::now() < end; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(o_.pause_us));
      const auto q = std::span(q_).subspan((i % o_.questions) * nq, nq);
      const auto begun = Clock::now();
      PREFIXD_TRY(small_->Step(0, {}, q, y, lse, nullptr));
      const std::chrono::duration<double, std::micro> took = Clock::now() - begun;
      if (i >= 10) us->push_back(took.count());  // the first ones bring rows into memory
    }
    if (us->empty()) us->push_back(1e6 * o_.block_s);  // at most ten steps in the block
    return {};
  }

  Status Case(const std::string& name, Flood kind) {
    std::vector<double> alone, beside, ratios50, ratios99, flood_alone, flood_beside;
    for (uint32_t round = 0; round < o_.rounds; ++round) {
      std::vector<double> a, b;
      PREFIXD_TRY(Block(Flood::kNone, &a));
      PREFIXD_ASSIGN(const double with, Block(kind, &b));
      PREFIXD_ASSIGN(const double without, Block(kind, nullptr));
      flood_beside.push_back(with), flood_alone.push_back(without);
      ratios50.push_back(At(b, 0.5) / At(a, 0.5)), ratios99.push_back(At(b, 0.99) / At(a, 0.99));
      alone.insert(alone.end(), a.begin(), a.end());
      beside.insert(beside.end(), b.begin(), b.end());
    }
    const Spread p50 = Summarise(ratios50), p99 = Summarise(ratios99);
    const Spread fa = Summarise(flood_alone), fb = Summarise(flood_beside);
    const double a50 = At(alone, 0.5), a99 = At(alone, 0.99);
    const double b50 = At(beside, 0.5), b99 = At(beside, 0.99);
    std::printf("%-22s %8.0f %8.0f | %8.0f %8.0f | %6.2f %6.2f %6.2f to %5.2f | %.1f, %.1f\n",
                name.c_str(), a50, a99, b50, b99, p50.median, p99.median, p99.low, p99.high,
                fa.median, fb.median);
    std::fflush(stdout);
    rows_.push_back({{"flood", name},
                     {"alone_p50_us", a50},
                     {"alone_p99_us", a99},
                     {"beside_p50_us", b50},
                     {"beside_p99_us", b99},
                     {"p50_ratio", p50},
                     {"p99_ratio", p99},
                     {"steps_beside", beside.size()},
                     {"flood_calls_per_s_alone", fa},
                     {"flood_calls_per_s_beside", fb}});
    return {};
  }

  const Options& o_;
  KvGeometry g_;
  std::vector<float> q_;
  DaemonChild daemon_;
  std::unique_ptr<Store> small_store_;
  std::shared_ptr<Session> small_;
  nlohmann::json rows_ = nlohmann::json::array();
};

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Measures a tenant's steps beside a tenant that floods the daemon.");
  app.add_option("--small-tokens", options.small_tokens, "Its prompt")->capture_default_str();
  app.add_option("--small-k", options.small_k, "What it retrieves")->capture_default_str();
  app.add_option("--flood-tokens", options.flood_tokens, "The flood's prompt")
      ->capture_default_str();
  app.add_option("--flood-threads", options.flood_threads, "Its connections, a call on each")
      ->capture_default_str();
  app.add_option("--flood-budget", options.flood_budget, "Of its batches' steps")
      ->capture_default_str();
  app.add_option("--questions", options.questions, "Tokens of its exact passes")
      ->check(CLI::Range(1, 4096));
  app.add_option("--rounds", options.rounds, "Blocks of each side")->capture_default_str();
  app.add_option("--block-s", options.block_s, "Seconds of a block")->capture_default_str();
  app.add_option("--pause-us", options.pause_us, "Before each of the small tenant's steps")
      ->capture_default_str();
  app.add_option("--program", options.program, "The daemon, to compare versions")
      ->check(CLI::ExistingFile);
  app.add_option("--daemon", options.daemon, "Further arguments of the daemon")->delimiter(' ');
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Bench(options).Run(); });
}
