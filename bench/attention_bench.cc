// The CPU step of attention/ by itself: what it costs given the retrieved set, what completion adds
// to it, and how much of the machine's memory bandwidth the exact pass reaches. Beside each stands
// its roofline: the bytes it must move over the bandwidth measured in the same run.
//
// One layer of an 8B model (32 query heads, 8 KV heads, dh 128, bf16), all cores. Rows lie in
// memory as a store keeps them; the step gathers the retrieved ones from there, and sets rotate so
// that each is read from memory, not from cache. Variants are measured in turn, round after round;
// what is reported is the median of the rounds and, for ratios, the median of each round's ratio.
//
// Needs the standard library alone, like attention/ itself.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention/kernels.h"
#include "attention/step.h"
#include "bench/support/statistics.h"
#include "bench/support/team.h"

namespace prefixd::bench {
namespace {

constexpr uint32_t kKvHeads = 8, kGroup = 4, kDim = 128, kPhiDim = 128;
constexpr RowShape kRow{kDim, kDim, DType::kBf16};
constexpr uint32_t kAnchors = 20;
constexpr LayerGeometry kLayer{0.08838834764831845f, 0, 0};
constexpr size_t kSets = 64;  // rotated: 64 x 8 x 1000 rows of 512 bytes are 260 MB

struct Options {
  uint32_t max_tokens = 1 << 20;
  int rounds = 9;
  unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  std::string json_file;
};

double Seconds(const std::function<void()>& run) {
  const auto begun = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// All rows of one layer: [KV head][token], random of unit variance.
struct Layer {
  uint32_t n_tokens;
  std::unique_ptr<std::byte[]> bytes;
  size_t head_bytes() const { return n_tokens * kRow.bytes(); }
  RowsView Head(size_t h) const {
    return {bytes.get() + h * head_bytes(), n_tokens, kRow.bytes(), kRow};
  }
};

Layer MakeLayer(Team& team, uint32_t n_tokens) {
  Layer layer{n_tokens,
              std::make_unique_for_overwrite<std::byte[]>(kKvHeads * n_tokens * kRow.bytes())};
  std::mt19937_64 rng(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> table(1 << 16);
  for (uint16_t& x : table) x = FloatToBf16(normal(rng));
  team.ForEach(kKvHeads, [&](size_t h) {
    uint64_t state = h + 1;
    std::byte* out = layer.bytes.get() + h * layer.head_bytes();
    for (size_t i = 0; i < layer.head_bytes(); i += 2) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      std::memcpy(out + i, &table[state >> 48], 2);
    }
  });
  return layer;
}

// Bytes per second that all cores read.
double ReadBandwidth(Team& team, const Layer& layer) {
  const size_t bytes = kKvHeads * layer.head_bytes(), piece = 1 << 20;
  std::atomic<uint64_t> sink{0};
  const double seconds = Seconds([&] {
    team.ForEach(bytes / piece, [&](size_t p) {
      const std::byte* at = layer.bytes.get() + p * piece;
      uint64_t sum[8] = {}, word[8];
      for (size_t i = 0; i < piece; i += sizeof word) {
        std::memcpy(word, at + i, sizeof word);
        for (int l = 0; l < 8; ++l) sum[l] += word[l];
      }
      sink += sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
    });
  });
  return double(bytes / piece * piece) / seconds;
}

FeatureMap RandomMap(std::mt19937_64& rng) {
  std::normal_distribution<float> normal(0, 0.05f);
  const auto fill = [&](std::vector<float>& x, size_t n) {
    x.resize(n);
    for (float& v : x) v = normal(rng);
  };
  FeatureMap map;
  map.in_dim = map.d_emb = kDim;
  map.d_phi = kPhiDim;
  for (auto* w : {&map.w_in, &map.w1, &map.w2, &map.w_out}) fill(*w, kDim * kDim);
  for (auto* b : {&map.b_in, &map.b1, &map.b2, &map.b_out}) fill(*b, kDim);
  map.alpha = 0.5f;
  return map;
}

enum class Variant { kNone, kMean, kRank8, kFullCross, kPhiStored, kPhiRecompute };
constexpr Variant kVariants[] = {Variant::kNone,      Variant::kMean,      Variant::kRank8,
                                 Variant::kFullCross, Variant::kPhiStored, Variant::kPhiRecompute};
constexpr const char* kNames[] = {"selection only",   "moment, mean value", "moment, rank 8",
                                  "moment, all of C", "phi, stored 8 bits", "phi, recomputed"};

// The summaries of one layer's mid regions, and queries.
struct Model {
  std::vector<float> queries;  // [heads][group][dim]
  std::vector<MomentSummary> mean, rank8, full;
  std::vector<PhiCache> phi;
  std::vector<FeatureMap> phi_q, phi_k;
  std::vector<std::byte> codes;  // of features: any, their values do not change the cost
};

// Summaries of the first tokens only, declared to be of all: values do not change the cost.
Model MakeModel(const Layer& layer) {
  Model model;
  std::mt19937_64 rng(2);
  std::normal_distribution<float> normal;
  model.queries.resize(size_t{kKvHeads} * kGroup * kDim);
  for (float& x : model.queries) x = normal(rng);
  for (size_t h = 0; h < kKvHeads; ++h) {
    const RowsView mid = layer.Head(h).Sub(4, layer.n_tokens - kAnchors);
    MomentSummary full(kDim, kDim, true), mean(kDim, kDim, false);
    full.Add(mid.Sub(0, 4096));
    mean.Add(mid.Sub(0, 4096));
    model.mean.push_back(mean);
    model.rank8.push_back(full.Factored(8, {}));
    model.full.push_back(std::move(full));
    model.phi_k.push_back(RandomMap(rng));
    model.phi.emplace_back(kPhiDim, kDim);
    model.phi.back().Add(mid.Sub(0, 4096), model.phi_k.back());
    for (uint32_t g = 0; g < kGroup; ++g) model.phi_q.push_back(RandomMap(rng));
  }
  model.codes.assign(size_t{16384} * kPhiDim, std::byte{3});
  return model;
}

// One layer step: every KV head gathers its retrieved rows and computes. Aborts on an error, since
// nothing measured would mean anything.
class Stepper {
 public:
  Stepper(Team& team, const Layer& layer, const Model& model, uint32_t k)
      : team_(team), layer_(layer), model_(model), k_(k) {
    std::mt19937_64 rng(3);
    ids_.resize(kSets * kKvHeads * k);
    for (size_t at = 0; at < ids_.size(); at += k) {
      // Ascending, as selectors return them: one from each of k equal runs.
      const uint64_t mid = layer.n_tokens - kAnchors;
      for (uint64_t i = 0; i < k; ++i) {
        const uint64_t low = i * mid / k, high = std::max(low + 1, (i + 1) * mid / k);
        ids_[at + i] = static_cast<uint32_t>(4 + low + rng() % (high - low));
      }
    }
    gathered_.resize(kKvHeads);
    for (auto& rows : gathered_) rows.resize(k * kRow.bytes());
    y_.resize(model.queries.size());
    lse_.resize(kKvHeads * kGroup);
    rho_.resize(kKvHeads * kGroup);
  }

  double Run(Variant variant) {
    ++round_;
    return Seconds([&] { team_.ForEach(kKvHeads, [&](size_t h) { Head(h, variant); }); });
  }

 private:
  void Gather(size_t h) {
    constexpr uint32_t kAhead = 8;
    const uint32_t* ids = ids_.data() + (round_ % kSets * kKvHeads + h) * k_;
    const RowsView rows = layer_.Head(h);
    for (uint32_t i = 0; i < k_; ++i) {
      if (i + kAhead < k_) {
        const std::byte* next = rows.key(ids[i + kAhead]);
        for (size_t line = 0; line < kRow.bytes(); line += 64) __builtin_prefetch(next + line);
      }
      std::memcpy(gathered_[h].data() + i * kRow.bytes(), rows.key(ids[i]), kRow.bytes());
    }
  }

  void Head(size_t h, Variant variant) {
    Gather(h);
    const RowsView rows = layer_.Head(h);
    const Cut cuts[kGroup] = {
        {3, CutKind::kExact}, {3, CutKind::kExact}, {3, CutKind::kExact}, {3, CutKind::kExact}};
    GroupStepInput in;
    in.queries = std::span(model_.queries).subspan(h * kGroup * kDim, kGroup * kDim);
    in.group = kGroup;
    in.layer = kLayer;
    in.sinks = rows.Sub(0, 4);
    in.tail = rows.Sub(layer_.n_tokens - 16, 16);
    in.retrieved = {gathered_[h].data(), k_, kRow.bytes(), kRow};
    in.cuts = cuts;
    in.estimator = variant == Variant::kNone        ? EstimatorKind::kNone
                   : variant >= Variant::kPhiStored ? EstimatorKind::kPhi
                                                    : EstimatorKind::kMoment;
    if (variant == Variant::kMean) in.moment = &model_.mean[h];
    if (variant == Variant::kRank8) in.moment = &model_.rank8[h];
    if (variant == Variant::kFullCross) in.moment = &model_.full[h];
    if (in.estimator == EstimatorKind::kPhi) {
      in.phi = &model_.phi[h];
      in.phi_q = std::span(model_.phi_q).subspan(h * kGroup, kGroup);
      in.phi_k = &model_.phi_k[h];
      if (variant == Variant::kPhiStored) {
        in.features = {
            {8, FeatureScale::kLinear}, model_.codes.data(), kPhiDim, model_.phi[h].m(), {}};
      }
    }
    in.mid_count = 4096;  // what the summaries are of
    const Status status = GroupStep(in, {std::span(y_).subspan(h * kGroup * kDim, kGroup * kDim),
                                         std::span(lse_).subspan(h * kGroup, kGroup),
                                         std::span(rho_).subspan(h * kGroup, kGroup)});
    if (!status.ok()) {
      std::fprintf(stderr, "step failed: %s\n", status.error().message.c_str());
      std::abort();
    }
  }

  Team& team_;
  const Layer& layer_;
  const Model& model_;
  const uint32_t k_;
  size_t round_ = 0;
  std::vector<uint32_t> ids_;  // [sets][heads][k]
  std::vector<std::vector<std::byte>> gathered_;
  std::vector<float> y_, lse_, rho_;
};

// Exact attention of every query head over all rows.
double ExactPass(Team& team, const Layer& layer, const Model& model) {
  // A head is cut into pieces, merged afterwards, so that all cores have work to the end.
  constexpr size_t kPieces = 4;
  const size_t piece = (layer.n_tokens + kPieces - 1) / kPieces;
  std::vector<float> y(kPieces * model.queries.size()), lse(kPieces * kKvHeads * kGroup);
  return Seconds([&] {
    team.ForEach(kPieces * kKvHeads, [&](size_t job) {
      const size_t h = job / kPieces, begin = job % kPieces * piece;
      const RowsView rows = layer.Head(h).Sub(begin, std::min(piece, layer.n_tokens - begin));
      const Status status =
          ExactAttention(std::span(model.queries).subspan(h * kGroup * kDim, kGroup * kDim), kGroup,
                         kLayer, rows, std::span(y).subspan(job * kGroup * kDim, kGroup * kDim),
                         std::span(lse).subspan(job * kGroup, kGroup));
      if (!status.ok()) std::abort();
    });
    for (size_t h = 0; h < kKvHeads; ++h) {
      for (size_t p = 1; p < kPieces; ++p) {
        for (size_t g = 0; g < kGroup; ++g) {
          const size_t to = h * kPieces * kGroup + g, from = to + p * kGroup;
          MergeStates(std::span(y).subspan(to * kDim, kDim), &lse[to],
                      std::span(y).subspan(from * kDim, kDim), lse[from]);
        }
      }
    }
  });
}

struct Number {
  std::string name;
  double value;
};

void WriteJson(const std::string& path, const Options& options, const std::vector<Number>& values,
               const std::vector<Number>& ratios) {
  std::ofstream out(path);
  out << "{\n \"bench\": \"attention\",\n \"kernels\": \"" << Kernels().name
      << "\",\n \"threads\": " << options.threads << ",\n \"rounds\": " << options.rounds
      << ",\n \"values\": {";
  const auto list = [&](const std::vector<Number>& numbers) {
    for (size_t i = 0; i < numbers.size(); ++i) {
      out << (i ? "," : "") << "\n  \"" << numbers[i].name << "\": " << numbers[i].value;
    }
  };
  list(values);
  out << "\n },\n \"ratios\": {";
  list(ratios);
  out << "\n }\n}\n";
  if (!out.flush()) std::fprintf(stderr, "cannot write '%s'\n", path.c_str());
}

double Median(const std::vector<double>& samples) { return Summarise(samples).median; }

double MedianRatio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  return Median(ratios);
}

void Run(const Options& options) {
  Team team(options.threads);
  std::vector<Number> values, ratios;
  std::printf("attention on the CPU: %s kernels, %u threads, median of %d rounds\n", Kernels().name,
              options.threads, options.rounds);
  double step_16k = 0;
  for (const uint32_t n : {16384u, 131072u, 1048576u}) {
    if (n > options.max_tokens) continue;
    const Layer layer = MakeLayer(team, n);
    const Model model = MakeModel(layer);
    const uint32_t percent = (n + 99) / 100 - kAnchors;
    Stepper fixed(team, layer, model, 1024), at_percent(team, layer, model, percent);
    std::vector<double> bandwidth, exact, step_fixed, step_percent;
    for (int round = 0; round < options.rounds; ++round) {
      bandwidth.push_back(ReadBandwidth(team, layer));
      exact.push_back(ExactPass(team, layer, model));
      std::vector<double> a, b;  // short: several a round
      for (int i = 0; i < 9; ++i) {
        a.push_back(fixed.Run(Variant::kNone));
        if (percent <= 4096) b.push_back(at_percent.Run(Variant::kNone));
      }
      step_fixed.push_back(Median(a));
      step_percent.push_back(b.empty() ? at_percent.Run(Variant::kNone) : Median(b));
    }
    const double bytes = double(kKvHeads) * double(layer.head_bytes());
    std::vector<double> roofline;
    for (double b : bandwidth) roofline.push_back(bytes / b);
    std::printf("\nN = %u   memory read %.1f GB/s\n", n, Median(bandwidth) / 1e9);
    std::printf(
        "  exact over everything        %9.3f ms   roofline %.3f ms (%.0f%% of bandwidth)\n",
        Median(exact) * 1e3, Median(roofline) * 1e3, 100 * MedianRatio(roofline, exact));
    const auto step_line = [&](const char* name, uint32_t k, const std::vector<double>& step) {
      const double own = bytes * (k + kAnchors) / n / Median(bandwidth);
      std::printf(
          "  step, %-8s K = %-6u     %9.3f ms   roofline %.3f ms   faster than exact: its roofline "
          "%.1fx, our pass %.1fx\n",
          name, k, Median(step) * 1e3, own * 1e3, MedianRatio(roofline, step),
          MedianRatio(exact, step));
    };
    step_line("fixed", 1024, step_fixed);
    step_line("1%", percent, step_percent);
    const std::string at = "_" + std::to_string(n / 1024) + "k";
    values.push_back({"bandwidth_gb_s" + at, Median(bandwidth) / 1e9});
    values.push_back({"exact_ms" + at, Median(exact) * 1e3});
    values.push_back({"step_k1024_ms" + at, Median(step_fixed) * 1e3});
    values.push_back({"step_1pct_ms" + at, Median(step_percent) * 1e3});
    if (n == 16384) step_16k = Median(step_fixed);
    if (n == 1048576 && step_16k > 0) {
      ratios.push_back({"given_set_growth_16k_1m", Median(step_fixed) / step_16k});
    }
    if (n != 131072) continue;
    ratios.push_back({"given_set_speedup_128k", MedianRatio(roofline, step_percent)});
    ratios.push_back({"given_set_speedup_128k_own_pass", MedianRatio(exact, step_percent)});
    ratios.push_back({"exact_bandwidth_fraction", MedianRatio(roofline, exact)});

    for (const uint32_t k : {1024u, 4000u}) {
      Stepper stepper(team, layer, model, k);
      std::vector<double> times[std::size(kVariants)];
      for (int round = 0; round < options.rounds; ++round) {
        for (const Variant variant : kVariants) {
          std::vector<double> some;
          for (int i = 0; i < (variant == Variant::kPhiRecompute ? 1 : 15); ++i) {
            some.push_back(stepper.Run(variant));
          }
          times[static_cast<size_t>(variant)].push_back(Median(some));
        }
      }
      std::printf("\n  completion at K = %u\n", k);
      for (size_t v = 0; v < std::size(kVariants); ++v) {
        const double overhead = MedianRatio(times[v], times[0]) - 1;
        std::printf("    %-20s %9.3f ms   %+.1f%%\n", kNames[v], Median(times[v]) * 1e3,
                    100 * overhead);
        values.push_back({"completion_" + std::to_string(k) + "_" + std::to_string(v) + "_ms",
                          Median(times[v]) * 1e3});
        if (k != 1024) continue;
        if (kVariants[v] == Variant::kRank8) ratios.push_back({"moment_overhead", overhead});
        if (kVariants[v] == Variant::kPhiStored) {
          ratios.push_back({"phi_stored_overhead", overhead});
        }
        if (kVariants[v] == Variant::kPhiRecompute) {
          ratios.push_back({"phi_recompute_overhead", overhead});
        }
      }
    }
  }
  std::printf("\n");
  for (const Number& r : ratios) std::printf("  %-32s %8.3f\n", r.name.c_str(), r.value);
  if (!options.json_file.empty()) WriteJson(options.json_file, options, values, ratios);
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (flag == "--json" && value) {
      options.json_file = value;
    } else if (flag == "--max-tokens" && value) {
      options.max_tokens = static_cast<uint32_t>(std::strtoul(value, nullptr, 10));
    } else if (flag == "--rounds" && value) {
      options.rounds = std::max(1, std::atoi(value));
    } else if (flag == "--threads" && value) {
      options.threads = static_cast<unsigned>(std::max(1, std::atoi(value)));
    } else {
      std::fprintf(stderr,
                   "usage: attention_bench [--json FILE] [--max-tokens N] [--rounds R] "
                   "[--threads T]\n");
      return 2;
    }
    ++i;
  }
  prefixd::bench::Run(options);
  return 0;
}
