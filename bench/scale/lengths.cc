// Prompts of ever more tokens: what finding, attaching and a step cost, and what the daemon holds.
#include <algorithm>
#include <chrono>
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
#include "measure/disk/page_cache.h"
#include "measure/timing/json_file.h"
#include "measure/timing/process.h"
#include "prefixd/client.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

double Ms(Clock::time_point begun) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
}

class Length {
 public:
  Length(const ScaleOptions& o, uint32_t n)
      : o_(o),
        n_(n),
        model_(ScaleModel()),
        tokens_(SyntheticTokens(n)),
        dir_(o.scratch / "length"),
        daemon_(dir_, o.scratch) {}

  Result<json> Run() {
    std::fprintf(stderr, "\rput %u tokens ", n_);
    PREFIXD_TRY(Start());
    auto begun = Clock::now();
    double making_s = 0;
    PREFIXD_TRY(PutSynthetic(*store_, model_, n_, 0, &making_s));
    const double put_ms = Ms(begun) - making_s * 1e3;
    PREFIXD_TRY(Settle());

    std::vector<double> match_started, attach_started, first_step;
    double empty_mib = 0;
    for (uint32_t i = 0; i < o_.repeats; ++i) {
      store_.reset();
      PREFIXD_TRY(daemon_.Stop());
      DropPageCache(dir_);
      PREFIXD_TRY(Start());
      PREFIXD_ASSIGN(const Holding started, Look(daemon_.pid()));
      empty_mib = started.anonymous_mib;
      begun = Clock::now();
      PREFIXD_TRY(Match());
      match_started.push_back(Ms(begun));
      begun = Clock::now();
      PREFIXD_ASSIGN(const auto session, Attach());
      attach_started.push_back(Ms(begun));
      begun = Clock::now();
      PREFIXD_TRY(Step(*session, 0));
      first_step.push_back(Ms(begun));
    }
    PREFIXD_ASSIGN(const auto session, Attach());
    for (uint32_t i = 0; i < kWarmUp; ++i) PREFIXD_TRY(Step(*session, i));
    PREFIXD_TRY(Settle());
    const uint32_t calls = std::min(o_.calls, std::max(100u, 100000000u / n_));
    PREFIXD_ASSIGN(const Percentiles match, TimeCalls(calls, [&](uint32_t) { return Match(); }));
    PREFIXD_ASSIGN(const Percentiles attach, TimeCalls(calls, [&](uint32_t) -> Status {
                     PREFIXD_ASSIGN(const auto another, Attach());
                     return {};
                   }));
    PREFIXD_ASSIGN(const Percentiles step,
                   TimeCalls(o_.calls, [&](uint32_t i) { return Step(*session, kWarmUp + i); }));
    PREFIXD_ASSIGN(const Holding held, Look(daemon_.pid()));
    PREFIXD_ASSIGN(const RuntimeStats stats, store_->Stats());
    const double mib = held.anonymous_mib - empty_mib;
    const Spread m = Summarise(match_started), a = Summarise(attach_started),
                 f = Summarise(first_step);
    std::printf(
        "%9u %9.1f | %9.0f %9.0f %9.1f | %9.0f %9.0f %9.1f | %9.0f %9.0f %9.1f | %9.1f %9.1f\n", n_,
        put_ms / 1e3, match.p50_us, match.p99_us, m.median, attach.p50_us, attach.p99_us, a.median,
        step.p50_us, step.p99_us, f.median, mib, double(stats.bytes_on_disk) / 1048576);
    std::fflush(stdout);
    return json{{"tokens", n_},      {"put_and_ready_s", put_ms / 1e3},
                {"match", match},    {"match_just_started_ms", m},
                {"attach", attach},  {"attach_just_started_ms", a},
                {"step", step},      {"first_step_ms", f},
                {"memory_mib", mib}, {"disk_mib", double(stats.bytes_on_disk) / 1048576}};
  }

 private:
  static constexpr uint32_t kWarmUp = 200;

  Status Start() {
    std::vector<std::string> args = {"--host-tier-mib", "1024", "--scrub-mib-per-second", "0"};
    args.insert(args.end(), o_.daemon.begin(), o_.daemon.end());
    PREFIXD_TRY(daemon_.Start(o_.program, args));
    PREFIXD_ASSIGN(store_, Connect(daemon_.address()));
    return {};
  }

  Status Settle() {
    for (;;) {
      PREFIXD_ASSIGN(const RuntimeStats stats, store_->Stats());
      if (stats.ingest_queue + stats.rewrite_queue + stats.preload_queue == 0) return {};
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  Status Match() {
    PREFIXD_ASSIGN(const PrefixMatch match,
                   store_->Match({.model = model_.name, .tokens = tokens_}));
    id_ = match.prefix;
    if (match.n_tokens == n_) return {};
    return Error{Code::kInternal, "the prompt does not match"};
  }

  Result<std::shared_ptr<Session>> Attach() {
    AttachSpec spec;
    spec.model = model_.name;
    spec.prefix = id_;
    spec.policy.estimator = EstimatorKind::kMoment;
    spec.policy.budget = std::max(o_.budget, 64.0 / n_);  // short prompts: anchors and a few
    return store_->Attach(spec);
  }

  Status Step(Session& session, uint32_t seed) {
    const KvGeometry& g = model_.geometry;
    std::vector<float> q(size_t{g.n_q_heads} * g.key_dim), y(q.size()), lse(g.n_q_heads);
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    for (float& x : q) x = normal(rng);
    return session.Step(0, q, y, lse, nullptr);
  }

  const ScaleOptions& o_;
  const uint32_t n_;
  const ModelSpec model_;
  const std::vector<uint32_t> tokens_;
  const std::filesystem::path dir_;
  DaemonChild daemon_;
  std::unique_ptr<Store> store_;
  std::string id_;
};

}  // namespace

Result<json> MeasureLengths(const ScaleOptions& options) {
  std::printf("\nlengths, budget %.3f; us, and ms where the daemon has just started\n",
              options.budget);
  std::printf("%9s %9s | %9s %9s %9s | %9s %9s %9s | %9s %9s %9s | %9s %9s\n", "tokens", "put s",
              "match", "p99", "first ms", "attach", "p99", "first ms", "step", "p99", "first ms",
              "MiB held", "MiB disk");
  json rows = json::array();
  for (const uint32_t n : options.lengths) {
    PREFIXD_ASSIGN(rows.emplace_back(), Length(options, n).Run());
    std::error_code ignored;
    std::filesystem::remove_all(options.scratch / "length", ignored);
  }
  return rows;
}

}  // namespace prefixd::bench
