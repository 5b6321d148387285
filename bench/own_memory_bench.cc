// Measures decode steps of a session that keeps a bounded number of own tokens in memory, while the
// daemon moves the others to its store, beside one that keeps all in memory: one layer, a real
// daemon. At each mark the own tokens of both are as many; then both step, and the bounded one
// moves as it goes. The floor beside it are steps of the same session that move nothing, because
// every few tokens are truncated again. Reported are the times of steps, those beside a move apart;
// what the step's threads spend on the search and on the set that it found; what appending costs,
// moves included, over all tokens since the mark before; and the memory that own tokens take.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>
#include <vector>

#include "attention/rows/rows.h"
#include "bench/steps/daemon_child.h"
#include "bench/steps/synthetic_put.h"
#include "bench/support/bench_main.h"
#include "bench/support/percentiles.h"
#include "measure/prompts/synthetic_kv.h"
#include "measure/timing/json_file.h"
#include "measure/timing/process.h"
#include "prefixd/client.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  uint32_t tokens = 4096, memory = 2000, k = 128, steps = 3000, pace_us = 1000;
  double budget = 0;
  StepPolicy::Retain retain;
  std::vector<uint32_t> own = {1000, 4000, 16000, 64000};
  std::string json_file;
};

// What a step costs the daemon, in microseconds: processor time of all its threads, and of that
// what the step's own took to find the set, and to read and attend over the set and the own tokens.
struct StepCost {
  double cpu_us = 0, search_us = 0, read_us = 0, compute_us = 0;
  uint32_t in_memory = 0;  // own tokens, which it reads all
};
void to_json(nlohmann::json& out, const StepCost& c) {
  out = {{"cpu_us", c.cpu_us},
         {"search_us", c.search_us},
         {"read_us", c.read_us},
         {"compute_us", c.compute_us},
         {"in_memory", c.in_memory}};
}

class Bench {
 public:
  explicit Bench(const Options& o) : o_(o) {
    model_ = {"bench", {1, 32, 8, 64, 64, DType::kBf16, {}}, {{"weights", "synthetic"}}, {}};
    model_.geometry.layers.assign(1, {.scale = 0.125f});
  }

  Status Run() {
    PREFIXD_TRY(daemon_.Start(PREFIXD_BINARY, {"--host-tier-mib", "512"}));
    PREFIXD_ASSIGN(store_, Connect(daemon_.address(), {}));
    PREFIXD_TRY(PutSynthetic(*store_, model_, o_.tokens));
    MakeRows();
    PREFIXD_ASSIGN(bounded_, Attach(o_.memory));
    PREFIXD_ASSIGN(whole_, Attach(0));
    std::printf(
        "prefix of %u tokens, k = %u or budget %.3g; %u own tokens in memory at most, or all; a "
        "layer of 32 "
        "query and 8 KV heads of 64, bf16; %u steps at each mark, one every %u us at most\n"
        "%8s | %8s %8s | %8s %8s %8s %6s | %5s %6s %8s %8s | %10s | %8s %8s | %10s\n",
        o_.tokens, o_.k, o_.budget, o_.memory, o_.steps, o_.pace_us, "own", "rest: p50", "p99",
        "p50 us", "p99", "max", "p99/50", "moves", "beside", "p50", "p99", "MiB", "all: p50", "p99",
        "all: MiB");
    for (const uint32_t own : o_.own) PREFIXD_TRY(Mark(own));
    PrintCosts();
    if (o_.json_file.empty()) return {};
    return WriteJson(o_.json_file, {{"tokens", o_.tokens},
                                    {"own_memory_tokens", o_.memory},
                                    {"k", o_.k},
                                    {"budget", o_.budget},
                                    {"retain", o_.retain.tokens},
                                    {"by", o_.retain.by},
                                    {"steps", o_.steps},
                                    {"pace_us", o_.pace_us},
                                    {"rows", rows_},
                                    {"ratios", Ratios()}});
  }

 private:
  static constexpr uint32_t kRows = 4096;     // of different own tokens; then they come again
  static constexpr uint32_t kQueries = 64;    // different ones; then they come again
  static constexpr uint32_t kTruncated = 50;  // at rest so many steps append before a truncation

  void MakeRows() {
    const KvGeometry& g = model_.geometry;
    token_ = size_t{g.n_kv_heads} * g.key_dim;
    SyntheticKv synthetic(g.n_kv_heads, g.key_dim, 1);
    std::vector<float> k(kRows * token_), v(k.size());
    for (uint32_t t = 0; t < kRows; ++t) synthetic.Token(&k[t * token_], &v[t * token_]);
    k_.resize(k.size() * 2), v_.resize(k_.size());
    FromFloat(g.dtype, k, k_.data());
    FromFloat(g.dtype, v, v_.data());
    std::mt19937_64 rng(3);
    std::normal_distribution<float> normal;
    q_.resize(kQueries * size_t{g.n_q_heads} * g.key_dim);
    for (float& x : q_) x = normal(rng);
  }

  Result<std::shared_ptr<Session>> Attach(uint32_t memory) {
    AttachSpec spec{model_.name, "", SyntheticTokens(o_.tokens)};
    spec.policy.k = o_.k;
    if (o_.budget > 0) spec.policy = {.budget = o_.budget};
    spec.policy.estimator = EstimatorKind::kMoment;
    spec.policy.retain = o_.retain;
    spec.own_memory_tokens = memory;
    return store_->Attach(spec);
  }

  Status Append(Session& session, uint32_t at, uint32_t n) {
    const std::span<const std::byte> k(k_), v(v_);
    if (at % kRows + n > kRows) at = 0;  // rows come again
    return session.Append(0, n, k.subspan(at % kRows * token_ * 2, n * token_ * 2),
                          v.subspan(at % kRows * token_ * 2, n * token_ * 2));
  }

  // Brings both to `own` tokens, and lets what is to move do so. Returns the processor time that a
  // token of the bounded one took, in microseconds; 0 if none was appended.
  Result<double> Grow(uint32_t own) {
    const uint32_t first = own_;
    PREFIXD_ASSIGN(const Holding before, Look(daemon_.pid()));
    while (own_ < own) {
      const uint32_t n = std::min({own - own_, 512u, kRows - own_ % kRows});
      PREFIXD_TRY(Append(*bounded_, own_, n));
      own_ += n;
      if (own_ % o_.memory < n) PREFIXD_TRY(Settle());
    }
    PREFIXD_TRY(Settle());
    PREFIXD_ASSIGN(const Holding after, Look(daemon_.pid()));
    PREFIXD_TRY(Follow(first));
    if (own_ == first) return 0.0;
    return (after.cpu_seconds - before.cpu_seconds) * 1e6 / double(own_ - first);
  }
  // Brings the one that keeps all to as many tokens as the bounded one has.
  Status Follow(uint32_t first) {
    while (first < own_) {
      const uint32_t n = std::min({own_ - first, 512u, kRows - first % kRows});
      PREFIXD_TRY(Append(*whole_, first, n));
      first += n;
    }
    return {};
  }
  Status Settle() {
    const auto until = Clock::now() + std::chrono::seconds(60);
    while (Clock::now() < until) {
      PREFIXD_ASSIGN(const SessionReport report, bounded_->report());
      if (report.own_tokens <= report.own_moved + o_.memory) return {};
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return Error{Code::kUnavailable, "own tokens did not move within a minute"};
  }

  double OwnMiB() const {
    const auto stats = store_->Stats();
    if (!stats.ok()) return 0;
    for (const MemoryOfKind& m : stats->memory_kinds) {
      if (m.kind == "own_tokens") return double(m.bytes) / (1 << 20);
    }
    return 0;
  }
  uint64_t Moves() const {
    const auto stats = store_->Stats();
    return stats.ok() ? stats->own_moves : 0;
  }

  Status Step(Session& session, uint32_t at, std::vector<double>& us) {
    const KvGeometry& g = model_.geometry;
    const size_t nq = size_t{g.n_q_heads} * g.key_dim;
    std::vector<float> y(nq), lse(g.n_q_heads);
    const std::span<const std::byte> k(k_), v(v_);
    const auto begun = Clock::now();
    PREFIXD_TRY(session.StepAppend(0, std::span(q_).subspan(at % kQueries * nq, nq),
                                   k.subspan(at % kRows * token_ * 2, token_ * 2),
                                   v.subspan(at % kRows * token_ * 2, token_ * 2), y, lse,
                                   nullptr));
    us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begun).count());
    return {};
  }

  // Steps of a session, paced as the others, behind as many tokens as it has: what they append is
  // truncated again.
  Status AtRest(Session& session, uint32_t steps, std::vector<double>& us) {
    auto next = Clock::now();
    for (uint32_t i = 0; i < steps; ++i) {
      PREFIXD_TRY(Step(session, own_ + i % kTruncated, us));
      if (i % kTruncated == kTruncated - 1) PREFIXD_TRY(session.Truncate(own_));
      next = std::max(next + std::chrono::microseconds(o_.pace_us), Clock::now());
      std::this_thread::sleep_until(next);
    }
    return session.Truncate(own_);
  }
  Result<Percentiles> BoundedAtRest(StepCost& cost) {
    // As many in memory at each mark, as soon after a move as may be: a step reads them all.
    while (true) {
      PREFIXD_ASSIGN(const SessionReport report, bounded_->report());
      if (report.own_tokens <= report.own_moved + o_.memory / 2 + kTruncated) break;
      PREFIXD_TRY(Append(*bounded_, own_, kTruncated));
      PREFIXD_TRY(Append(*whole_, own_, kTruncated));
      own_ += kTruncated;
      PREFIXD_TRY(Settle());
    }
    const uint32_t steps = std::max(o_.steps / 3, 1u);
    // The rows that these queries find come into memory first: what disks do is no matter here.
    std::vector<double> warm;
    PREFIXD_TRY(AtRest(*bounded_, kQueries, warm));
    PREFIXD_ASSIGN(const SessionReport before, bounded_->report());
    PREFIXD_ASSIGN(const Holding held, Look(daemon_.pid()));
    std::vector<double> us;
    PREFIXD_TRY(AtRest(*bounded_, steps, us));
    PREFIXD_ASSIGN(const Holding holds, Look(daemon_.pid()));
    PREFIXD_ASSIGN(const SessionReport after, bounded_->report());
    const auto each = [&](uint64_t Ledger::*ns) {
      return double(after.total.*ns - before.total.*ns) * 1e-3 / steps;
    };
    cost = {(holds.cpu_seconds - held.cpu_seconds) * 1e6 / steps, each(&Ledger::select_ns),
            each(&Ledger::read_ns), each(&Ledger::compute_ns),
            before.own_tokens - before.own_moved};
    return PercentilesOf(us);
  }

  Status Mark(uint32_t own) {
    PREFIXD_ASSIGN(const double append_us, Grow(std::max(own, own_)));
    StepCost cost;
    PREFIXD_ASSIGN(const Percentiles rest, BoundedAtRest(cost));
    const uint64_t moves = Moves();
    std::vector<double> bounded_us, beside_us, whole_us;
    const uint32_t first = own_;
    auto next = Clock::now();
    for (uint32_t i = 0; i < o_.steps; ++i, ++own_) {
      PREFIXD_TRY(Step(*bounded_, own_, bounded_us));
      PREFIXD_ASSIGN(const SessionReport report, bounded_->report());
      // The mover is at work as long as there are more than there may be.
      if (report.own_tokens > report.own_moved + o_.memory) beside_us.push_back(bounded_us.back());
      next = std::max(next + std::chrono::microseconds(o_.pace_us), Clock::now());
      std::this_thread::sleep_until(next);
    }
    const uint64_t moved = Moves() - moves;
    PREFIXD_TRY(Settle());
    PREFIXD_TRY(Follow(first));
    // Few of the other suffice, and it takes longer.
    PREFIXD_TRY(AtRest(*whole_, std::max(o_.steps / 16, 1u), whole_us));
    // What the other has is known; the rest is the bounded one's.
    const KvGeometry& g = model_.geometry;
    const double all = double(own_) * double(g.n_kv_heads * g.row(0).bytes()) / (1 << 20);
    const double memory = std::max(0.0, OwnMiB() - all);
    const Percentiles bounded = PercentilesOf(bounded_us), beside = PercentilesOf(beside_us),
                      whole = PercentilesOf(whole_us);
    std::printf(
        "%8u | %8.1f %8.1f | %8.1f %8.1f %8.1f %6.2f | %5llu %6llu %8.1f %8.1f | %10.2f | %8.1f "
        "%8.1f | %10.2f\n",
        own, rest.p50_us, rest.p99_us, bounded.p50_us, bounded.p99_us, bounded.max_us,
        bounded.p99_us / bounded.p50_us, static_cast<unsigned long long>(moved),
        static_cast<unsigned long long>(beside.calls), beside.p50_us, beside.p99_us, memory,
        whole.p50_us, whole.p99_us, all);
    std::fflush(stdout);
    rows_.push_back({{"own", own},
                     {"at_rest", rest},
                     {"cost", cost},
                     {"append_us", append_us},
                     {"append_of_step", cost.cpu_us > 0 ? append_us / cost.cpu_us : 0.0},
                     {"bounded", bounded},
                     {"beside_moves", beside},
                     {"moves", moved},
                     {"bounded_mib", memory},
                     {"whole", whole},
                     {"whole_mib", all}});
    return {};
  }

  void PrintCosts() const {
    std::printf(
        "\nprocessor time, us: of the step's threads, at rest; of the whole daemon; and what an "
        "appended token takes of it, moves included\n%8s %9s | %10s %10s %10s | %10s | %10s %8s\n",
        "own", "in memory", "search", "read", "compute", "step", "append", "of step");
    for (const auto& row : rows_) {
      const auto& cost = row["cost"];
      std::printf("%8u %9u | %10.1f %10.1f %10.1f | %10.1f | %10.1f %8.3f\n",
                  row["own"].get<uint32_t>(), cost["in_memory"].get<uint32_t>(),
                  cost["search_us"].get<double>(), cost["read_us"].get<double>(),
                  cost["compute_us"].get<double>(), cost["cpu_us"].get<double>(),
                  row["append_us"].get<double>(), row["append_of_step"].get<double>());
    }
  }
  nlohmann::json Ratios() const {
    const auto given = [](const nlohmann::json& row) {
      return row["cost"]["read_us"].get<double>() + row["cost"]["compute_us"].get<double>();
    };
    double most = 0;
    for (const auto& row : rows_) most = std::max(most, row["append_of_step"].get<double>());
    return {{"given_set_growth", given(rows_.back()) / given(rows_.front())},
            {"append_of_step", most}};
  }

  const Options& o_;
  ModelSpec model_;
  size_t token_ = 0;  // elements of a token's keys
  std::vector<std::byte> k_, v_;
  std::vector<float> q_;
  DaemonChild daemon_;
  std::unique_ptr<Store> store_;
  std::shared_ptr<Session> bounded_, whole_;
  uint32_t own_ = 0;
  nlohmann::json rows_ = nlohmann::json::array();
};

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Measures steps of a session that moves own tokens to the store as it goes.");
  app.add_option("--tokens", options.tokens, "Tokens of the prefix")->capture_default_str();
  app.add_option("--memory", options.memory, "Own tokens kept in memory (own_memory_tokens)")
      ->capture_default_str();
  app.add_option("--k", options.k, "Tokens that a step retrieves")->capture_default_str();
  app.add_option("--budget", options.budget, "Budget of a step, in place of --k")
      ->capture_default_str();
  app.add_option("--retain", options.retain.tokens,
                 "Moved tokens that each KV head keeps in memory")
      ->capture_default_str();
  app.add_option("--by", options.retain.by, "The retention policy that chooses them")
      ->capture_default_str();
  app.add_option("--steps", options.steps, "Steps at each mark")->capture_default_str();
  app.add_option("--pace-us", options.pace_us, "Least time from step to step")
      ->capture_default_str();
  app.add_option("--own", options.own, "Own tokens: the marks")
      ->delimiter(',')
      ->capture_default_str();
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Bench(options).Run(); });
}
