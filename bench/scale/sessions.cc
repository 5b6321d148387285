// Many sessions of one daemon: what their steps cost and what each holds.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <utility>

#include "bench/scale/scale_options.h"
#include "bench/steps/daemon_child.h"
#include "bench/steps/synthetic_put.h"
#include "bench/support/percentiles.h"
#include "measure/timing/process.h"
#include "prefixd/client.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

class SessionScale {
 public:
  explicit SessionScale(const ScaleOptions& o)
      : o_(o), model_(ScaleModel()), daemon_({}, o.scratch) {
    std::mt19937_64 rng(5);
    std::normal_distribution<float> normal;
    q_.resize(kQueries * size());
    for (float& x : q_) x = normal(rng);
  }

  Result<json> Run() {
    PREFIXD_TRY(Start());
    PREFIXD_ASSIGN(auto store, Connect(daemon_.address()));
    for (uint32_t p = 0; p < o_.prompts; ++p) {
      PREFIXD_TRY(PutSynthetic(*store, model_, o_.session_tokens, First(p)));
    }
    std::printf(
        "\nsessions on %u prompts of %u tokens, budget %.3f; steps of one layer, times in us\n",
        o_.prompts, o_.session_tokens, o_.budget);
    std::printf("%8s %12s | %8s %26s | %22s | %10s\n", "sessions", "connections", "steps/s",
                "all step: p50, p99", "one steps: p50, p99", "KiB each");
    store.reset();
    json rows = json::array();
    for (const uint32_t n : o_.sessions) {
      PREFIXD_TRY(daemon_.Stop());  // what sessions gave back stays with the process
      PREFIXD_TRY(Start());
      PREFIXD_ASSIGN(rows.emplace_back(), Level(n));
    }
    return rows;
  }

 private:
  static constexpr uint32_t kQueries = 32, kWarmUp = 50;

  struct Caller {
    std::unique_ptr<Store> store;
    std::vector<std::shared_ptr<Session>> sessions;
    std::vector<double> us;
    Status status;
  };

  Status Start() {
    std::vector<std::string> args = {"--host-tier-mib", "256", "--max-sessions", "4096"};
    args.insert(args.end(), o_.daemon.begin(), o_.daemon.end());
    return daemon_.Start(o_.program, args);
  }

  size_t size() const { return size_t{model_.geometry.n_q_heads} * model_.geometry.key_dim; }
  uint32_t First(uint32_t prompt) const { return prompt * 2 * o_.session_tokens; }

  Result<json> Level(uint32_t n) {
    std::vector<Caller> callers(std::min(n, o_.connections));
    for (Caller& caller : callers) {
      PREFIXD_ASSIGN(caller.store, Connect(daemon_.address()));
    }
    // What a prompt takes, whoever attends to it, is held before.
    Caller warm;
    PREFIXD_ASSIGN(warm.store, Connect(daemon_.address()));
    for (uint32_t p = 0; p < o_.prompts; ++p) PREFIXD_TRY(AttachTo(p, warm));
    PREFIXD_TRY(Turns(warm, kWarmUp * o_.prompts, {}));
    PREFIXD_ASSIGN(const Holding before, Look(daemon_.pid()));
    for (uint32_t s = 0; s < n; ++s) {
      PREFIXD_TRY(AttachTo(s % o_.prompts, callers[s % callers.size()]));
    }
    for (Caller& caller : callers) {  // a session's first step makes its plan
      PREFIXD_TRY(Turns(caller, static_cast<uint32_t>(caller.sessions.size()), {}));
      caller.us.clear();
    }
    PREFIXD_ASSIGN(const Holding after, Look(daemon_.pid()));
    const double kib = 1024 * (after.anonymous_mib - before.anonymous_mib) / n;

    PREFIXD_TRY(Turns(callers[0], UINT32_MAX, EndOfBlock()));
    const Percentiles one = PercentilesOf(std::exchange(callers[0].us, {}));
    const auto begun = Clock::now(), end = EndOfBlock();
    std::vector<std::thread> team;
    for (Caller& caller : callers) {
      team.emplace_back([&, end] { caller.status = Turns(caller, UINT32_MAX, end); });
    }
    for (std::thread& thread : team) thread.join();
    const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
    std::vector<double> us;
    for (const Caller& caller : callers) {
      PREFIXD_TRY(caller.status);
      us.insert(us.end(), caller.us.begin(), caller.us.end());
    }
    const double rate = double(us.size()) / seconds;
    const Percentiles all = PercentilesOf(std::move(us));
    std::printf("%8u %12zu | %8.0f %16.0f %9.0f | %12.0f %9.0f | %10.1f\n", n, callers.size(), rate,
                all.p50_us, all.p99_us, one.p50_us, one.p99_us, kib);
    std::fflush(stdout);
    return json{{"sessions", n},
                {"connections", callers.size()},
                {"steps_per_s", rate},
                {"all_step", all},
                {"one_steps", one},
                {"memory_kib_each", kib},
                {"daemon_anonymous_mib", after.anonymous_mib}};
  }

  Status AttachTo(uint32_t prompt, Caller& caller) const {
    AttachSpec spec{model_.name, "", SyntheticTokens(o_.session_tokens, First(prompt))};
    spec.policy.estimator = EstimatorKind::kMoment;
    spec.policy.budget = o_.budget;
    PREFIXD_ASSIGN(caller.sessions.emplace_back(), caller.store->Attach(spec));
    return {};
  }

  Clock::time_point EndOfBlock() const {
    return Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(o_.block_s));
  }

  // Steps the caller's sessions in turn: `steps` steps, or until `end`.
  Status Turns(Caller& caller, uint32_t steps, Clock::time_point end) const {
    std::vector<float> y(size()), lse(model_.geometry.n_q_heads);
    for (uint32_t i = 0; i < steps && (steps < UINT32_MAX || Clock::now() < end); ++i) {
      Session& session = *caller.sessions[i % caller.sessions.size()];
      const auto begun = Clock::now();
      PREFIXD_TRY(
          session.Step(0, std::span(q_).subspan(i % kQueries * size(), size()), y, lse, nullptr));
      caller.us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begun).count());
    }
    return {};
  }

  const ScaleOptions& o_;
  const ModelSpec model_;
  DaemonChild daemon_;
  std::vector<float> q_;
};

}  // namespace

ModelSpec ScaleModel() {
  ModelSpec model;
  model.name = "scale";
  model.geometry = {1, 8, 2, 64, 64, DType::kBf16, {}};
  model.geometry.layers.assign(1, {0.125f, 0, 0});
  model.identity = {{"weights", "synthetic"}};
  return model;
}

Result<json> MeasureSessions(const ScaleOptions& options) { return SessionScale(options).Run(); }

}  // namespace prefixd::bench
