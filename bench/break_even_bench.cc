// Measures when completion pays: the trade-off map of [RC] ([RC] App. F and G) on this
// machine. It compares reading gamma times as many tokens (Top-K) with reading k_phi = 1% and
// estimating the rest.
//
// It runs one layer of an 8B model (32 query heads, 8 KV heads, dh 128, bf16) over synthetic keys
// of realistic shape through the whole stack: put, attach, step. Times are for one layer step, from
// the session's own ledger: thread time of selecting, reading and computing, summed over KV heads.
// Both tiers are measured: rows in host memory, and rows on the SSD (host tier disabled).

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "attention/rows/rows.h"
#include "base/every_page.h"
#include "bench/prompts/synthetic_kv.h"
#include "bench/support/bench_main.h"
#include "bench/support/json_file.h"
#include "bench/support/statistics.h"
#include "runtime/store/local_store.h"
#include "tensors/safetensors.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

constexpr uint32_t kQueryHeads = 32, kKvHeads = 8, kDim = 128;
constexpr uint32_t kGammas[] = {1, 2, 3, 5, 7, 10};
constexpr double kXis[] = {1, 2, 5, 10, 20, 50, 100};

struct Options {
  uint32_t tokens = 32768;
  uint32_t steps = 15;
  std::filesystem::path dir = std::filesystem::temp_directory_path();
  std::string json_file;
};

KvGeometry OneLayer() {
  KvGeometry g{1, kQueryHeads, kKvHeads, kDim, kDim, DType::kBf16, {}};
  g.layers = {{.scale = 1.0f / std::sqrt(float(kDim))}};
  return g;
}

// The feature maps have random weights: training does not change their cost.
Status WriteRandomMaps(const std::filesystem::path& path, uint32_t length) {
  std::mt19937_64 rng(7);
  std::normal_distribution<float> normal(0, 0.05f);
  std::vector<std::vector<float>> data;
  std::vector<TensorToWrite> tensors;
  const auto add = [&](const std::string& name, std::vector<uint64_t> shape) {
    size_t n = 1;
    for (uint64_t s : shape) n *= s;
    std::vector<float>& values = data.emplace_back(n);
    for (float& x : values) x = normal(rng);
    tensors.push_back({name, TensorType::kF32, shape, {}});
  };
  for (const auto& [kind, heads] :
       {std::pair<std::string, uint64_t>{"phi_q", kQueryHeads}, {"phi_k", kKvHeads}}) {
    const std::string prefix = "layers.0." + kind + ".";
    for (const char* square : {"W_in", "W1", "W2", "W_out"})
      add(prefix + square, {heads, kDim, kDim});
    for (const char* bias : {"b_in", "b1", "b2", "b_out"}) add(prefix + bias, {heads, kDim});
    add(prefix + "alpha", {heads});
  }
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].bytes = std::as_bytes(std::span(data[i]));
  const std::map<std::string, std::string> metadata = {
      {"format", "prefixd-phi-v1"},
      {"length", std::to_string(length)},
      {"d_emb", "128"},
      {"d_phi", "128"},
      {"n_layers", "1"},
      {"n_q_heads", std::to_string(kQueryHeads)},
      {"n_kv_heads", "8"},
      {"head_dim", "128"},
      {"scale", std::to_string(1.0 / std::sqrt(double(kDim)))}};
  return WriteSafetensors(path, tensors, metadata);
}

Result<std::string> PutSynthetic(Store& client, const Options& options) {
  std::vector<uint32_t> tokens(options.tokens);
  for (uint32_t i = 0; i < options.tokens; ++i) tokens[i] = i;
  PREFIXD_ASSIGN(auto put, client.BeginPut({"bench", "", tokens, "break-even"}));
  SyntheticKv synthetic(kKvHeads, kDim, 1);
  constexpr uint32_t kBlock = 1024;
  std::vector<float> k(kBlock * kKvHeads * kDim), v(k.size());
  std::vector<std::byte> kb(k.size() * 2), vb(kb.size());
  for (uint32_t first = 0; first < options.tokens; first += kBlock) {
    const uint32_t n = std::min(kBlock, options.tokens - first);
    const size_t row = kKvHeads * kDim, used = n * row;
    for (uint32_t i = 0; i < n; ++i) synthetic.Token(&k[i * row], &v[i * row]);
    FromFloat(DType::kBf16, std::span(k).first(used), kb.data());
    FromFloat(DType::kBf16, std::span(v).first(used), vb.data());
    PREFIXD_TRY(
        put->Write(0, first, n, std::span(kb).first(2 * used), std::span(vb).first(2 * used)));
    std::fprintf(stderr, "\r   put %u of %u tokens", first + n, options.tokens);
  }
  PREFIXD_ASSIGN(const PutResult stored, put->Commit());
  std::fprintf(stderr, "\r   put %u tokens; building summaries ...\n", options.tokens);
  PREFIXD_TRY(
      client.WaitReady(stored.prefix, [](uint64_t done, uint64_t total, std::string_view unit) {
        std::fprintf(stderr, "\r   summaries: %llu of %llu %.*s   ", (unsigned long long)done,
                     (unsigned long long)total, int(unit.size()), unit.data());
        return true;
      }));
  std::fprintf(stderr, "\n");
  return stored.prefix;
}

struct Point {
  Spread select_ms, load_ms, compute_ms;
};

// Runs steps with fresh queries at a fixed K. Every query comes `repeats` times and only the last
// counts: with 2 its rows are in the host tier, if there is one.
Result<Point> Measure(Session& session, EstimatorKind estimator, uint32_t k, const Options& options,
                      int repeats) {
  PREFIXD_TRY(session.SetPolicy({.estimator = estimator, .k = k, .selector = "exact"}));
  SyntheticKv synthetic(kKvHeads, kDim, 1);
  std::vector<float> q(kQueryHeads * kDim), y(q.size()), lse(kQueryHeads);
  std::vector<double> select, load, compute;
  for (uint32_t step = 0; step < options.steps + 2; ++step) {
    for (uint32_t h = 0; h < kQueryHeads; ++h)
      synthetic.Query(h / (kQueryHeads / kKvHeads), &q[h * kDim]);
    StepInfo info;
    for (int i = 0; i < repeats; ++i) {
      info = {};
      PREFIXD_TRY(session.Step(0, q, y, lse, &info));
    }
    if (step < 2) continue;  // warm-up
    select.push_back(double(info.ledger.select_ns) / 1e6);
    load.push_back(double(info.ledger.read_ns) / 1e6);
    compute.push_back(double(info.ledger.compute_ns) / 1e6);
  }
  return Point{Summarise(select), Summarise(load), Summarise(compute)};
}

struct Tier {
  std::string name;
  std::vector<std::pair<uint32_t, Point>> topk;             // (gamma, point)
  std::vector<std::pair<EstimatorKind, Point>> completion;  // at k_phi
};

Result<Tier> MeasureTier(const std::string& name, const std::filesystem::path& dir,
                         uint64_t host_tier_bytes, const Options& options) {
  PREFIXD_ASSIGN(auto client, LocalStore::Open({.dir = dir, .host_tier_bytes = host_tier_bytes}));
  PREFIXD_ASSIGN(const auto prefixes, EveryPrefix(*client));
  PREFIXD_ASSIGN(auto session,
                 client->Attach({.model = "bench",
                                 .prefix = prefixes.at(0).id,
                                 .policy = {.estimator = EstimatorKind::kNone, .k = 1}}));
  const uint32_t k_phi = (options.tokens + 99) / 100;
  const int repeats = host_tier_bytes > 0 ? 2 : 1;
  Tier tier{name, {}, {}};
  for (const uint32_t gamma : kGammas) {
    PREFIXD_ASSIGN(const Point point,
                   Measure(*session, EstimatorKind::kNone, gamma * k_phi, options, repeats));
    tier.topk.emplace_back(gamma, point);
  }
  for (const EstimatorKind kind : {EstimatorKind::kMoment, EstimatorKind::kPhi}) {
    PREFIXD_ASSIGN(const Point point, Measure(*session, kind, k_phi, options, repeats));
    tier.completion.emplace_back(kind, point);
  }
  return tier;
}

// Interpolates t at gamma, piecewise linear over the measured points, clamped at 0 ([RC]).
double Interpolate(const Tier& tier, double gamma, Spread Point::*what) {
  size_t i = 1;
  while (i + 1 < tier.topk.size() && tier.topk[i].first < gamma) ++i;
  const auto& [g0, a] = tier.topk[i - 1];
  const auto& [g1, b] = tier.topk[i];
  const double slope = ((b.*what).median - (a.*what).median) / (g1 - g0);
  return std::max(0.0, (a.*what).median + slope * (gamma - g0));
}

double Cost(const Point& p, double xi, bool selection) {
  return p.compute_ms.median + xi * p.load_ms.median + (selection ? p.select_ms.median : 0);
}

// Returns the smallest gamma in [1, 10] from which completion is at least as fast; 0 if there is
// none.
double BreakEvenGamma(const Tier& tier, const Point& completed, double xi, bool selection) {
  for (double gamma = 1; gamma <= 10.001; gamma += 0.05) {
    const double topk = Interpolate(tier, gamma, &Point::compute_ms) +
                        xi * Interpolate(tier, gamma, &Point::load_ms) +
                        (selection ? Interpolate(tier, gamma, &Point::select_ms) : 0);
    if (topk >= Cost(completed, xi, selection)) return gamma;
  }
  return 0;
}

json PointJson(const Point& p) {
  return {{"select_ms", p.select_ms}, {"load_ms", p.load_ms}, {"compute_ms", p.compute_ms}};
}

json Report(const std::vector<Tier>& tiers, const Options& options) {
  json all = {{"benchmark", "break_even"},
              {"tokens", options.tokens},
              {"steps", options.steps},
              {"k_phi", (options.tokens + 99) / 100},
              {"tiers", json::array()}};
  for (const Tier& tier : tiers) {
    std::printf("\n%s: ms of thread time per layer step, median [p25, p75]\n", tier.name.c_str());
    std::printf("  %-14s %7s %26s %26s %26s\n", "method", "K", "select", "load", "compute");
    const auto line = [&](const std::string& name, uint32_t k, const Point& p) {
      std::printf("  %-14s %7u", name.c_str(), k);
      for (const Spread& s : {p.select_ms, p.load_ms, p.compute_ms}) {
        std::printf("  %8.3f [%6.3f, %6.3f]", s.median, s.low, s.high);
      }
      std::printf("\n");
    };
    const uint32_t k_phi = (options.tokens + 99) / 100;
    json t = {{"name", tier.name}, {"topk", json::array()}, {"completion", json::object()}};
    for (const auto& [gamma, point] : tier.topk) {
      line("Top-K", gamma * k_phi, point);
      t["topk"].push_back({{"gamma", gamma}, {"k", gamma * k_phi}, {"times", PointJson(point)}});
    }
    for (const auto& [kind, point] : tier.completion) {
      const std::string name(EstimatorName(kind));
      line("Top-K + " + name, k_phi, point);
      json even = json::array();
      for (const double xi : kXis) {
        const double without = BreakEvenGamma(tier, point, xi, false);
        const double with = BreakEvenGamma(tier, point, xi, true);
        even.push_back({{"xi", xi},
                        {"gamma", without > 0 ? json(without) : json()},
                        {"gamma_with_selection", with > 0 ? json(with) : json()}});
      }
      t["completion"][name] = {{"times", PointJson(point)}, {"break_even", even}};
    }
    std::printf(
        "  break-even: completion at 1%% is as fast as Top-K at gamma x 1%%, reads xi times "
        "slower\n");
    std::printf("  %-14s", "xi");
    for (const double xi : kXis) std::printf(" %6g", xi);
    std::printf("\n");
    for (const auto& [kind, point] : tier.completion) {
      std::printf("  %-14s", std::string(EstimatorName(kind)).c_str());
      for (const double xi : kXis) {
        const double gamma = BreakEvenGamma(tier, point, xi, false);
        if (gamma > 0) {
          std::printf(" %6.2f", gamma);
        } else {
          std::printf("  >10.0");
        }
      }
      std::printf("   (gamma)\n");
    }
    all["tiers"].push_back(t);
  }
  return all;
}

Status Run(const Options& options) {
  const auto dir = options.dir / ("prefixd-break-even-" + std::to_string(std::random_device{}()));
  struct Cleanup {
    std::filesystem::path dir;
    ~Cleanup() {
      std::error_code ec;
      std::filesystem::remove_all(dir, ec);
    }
  } cleanup{dir};
  std::filesystem::create_directory(dir);
  const auto maps = dir / "phi.safetensors";
  PREFIXD_TRY(WriteRandomMaps(maps, options.tokens));
  {
    PREFIXD_ASSIGN(auto client, LocalStore::Open({.dir = dir / "store", .build_codes = false}));
    PREFIXD_TRY(client->RegisterModel({"bench", OneLayer(), {{"weights", "synthetic"}}, {maps}}));
    PREFIXD_ASSIGN(const std::string prefix, PutSynthetic(*client, options));
  }
  std::vector<Tier> tiers;
  for (const auto& [name, host_bytes] :
       {std::pair<std::string, uint64_t>{"rows in host memory", 4ull << 30},
        {"rows on the SSD", 0}}) {
    PREFIXD_ASSIGN(Tier tier, MeasureTier(name, dir / "store", host_bytes, options));
    tiers.push_back(std::move(tier));
  }
  const json report = Report(tiers, options);
  if (!options.json_file.empty()) {
    PREFIXD_TRY(WriteJson(options.json_file, report));
  }
  return {};
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app(
      "Break-even map of completion against reading more tokens, on this machine's tiers.");
  app.add_option("--tokens", options.tokens, "Tokens of the stored prefix")
      ->check(CLI::Range(2048, 1 << 20))
      ->capture_default_str();
  app.add_option("--steps", options.steps, "Measured steps per point")
      ->check(CLI::Range(3, 1000))
      ->capture_default_str();
  app.add_option("--dir", options.dir, "Where the temporary store lies: on the disk to be measured")
      ->capture_default_str();
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Run(options); });
}
