#include "measure/break_even/run.h"

#include <algorithm>
#include <cmath>

#include "measure/disk/medium.h"
#include "measure/disk/memory_left.h"
#include "measure/disk/scratch.h"
#include "measure/page/text.h"
#include "measure/timing/gemm_rate.h"
#include "measure/timing/other_work.h"
#include "runtime/store/local_store.h"

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

constexpr const char* kHost = "rows in host memory";

// Says why steps cannot be computed on a CUDA device here; empty: they can.
std::string WhyNoCuda(const fs::path& dir) {
  RuntimeOptions o;
  o.dir = dir;
  o.host_tier_bytes = 0;
  o.min_free_bytes = 0;
  o.compute = "cuda";
  const auto store = LocalStore::Open(o);
  const std::string why = store.ok() ? "" : store.error().message;
  std::error_code ec;
  fs::remove_all(dir, ec);
  return why;
}

struct Costs {
  LengthSeconds tried;            // for a token and layer
  double bytes_per_row_byte = 1;  // of what is stored
  double Seconds(double tokens, double layers, uint32_t steps) const {
    return tokens * layers * tried.Total(steps);
  }
};

class Planner {
 public:
  Planner(const BreakEvenOptions& options, fs::path dir, const Progress& progress)
      : o_(options), dir_(std::move(dir)), progress_(progress) {}

  Result<BreakEvenPlan> Run() {
    PREFIXD_ASSIGN(plan_.model, ModelShapeOf(o_.model));
    plan_.prefill_rate = o_.prefill_rate;
    plan_.quick = o_.quick;
    plan_.medium = MediumOf(dir_);
    for (const std::string& note : plan_.model.notes) plan_.skipped.push_back(note);
    if (o_.layers > plan_.model.n_layers) {
      return Error{Code::kInvalidArgument, plan_.model.name + " has " +
                                               std::to_string(plan_.model.n_layers) +
                                               " layers; --layers asks for more"};
    }
    std::vector<uint32_t> lengths = o_.lengths;
    if (lengths.empty()) {
      lengths =
          o_.quick ? std::vector<uint32_t>{4096} : std::vector<uint32_t>{16384, 131072, 1048576};
    }
    std::sort(lengths.begin(), lengths.end());
    lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
    steps_ = o_.steps > 0 ? o_.steps : o_.quick ? 3 : 15;
    minutes_ = o_.minutes > 0 ? o_.minutes : o_.quick ? 0.5 : 5;
    FindTiers();
    PREFIXD_TRY(Calibrate(lengths.front()));
    for (const uint32_t tokens : lengths) Consider(tokens);
    if (plan_.lengths.empty()) {
      return Error{Code::kResourceExhausted,
                   "nothing that was asked for fits: " + Join(plan_.skipped, "; ")};
    }
    Deepen();
    Sum();
    return std::move(plan_);
  }

 private:
  void FindTiers() {
    const std::string files = plan_.medium.rows();
    tiers_ = {{kHost, true, "cpu"}, {files, false, "cpu"}};
    const std::string why = WhyNoCuda(dir_ / "cuda");
    if (why.empty()) {
      tiers_.push_back({std::string(kHost) + ", steps on CUDA", true, "cuda"});
      tiers_.push_back({files + ", steps on CUDA", false, "cuda"});
    } else {
      plan_.skipped.push_back("steps on a CUDA device: " + why);
    }
  }

  LengthSpec Spec(uint32_t tokens, uint32_t layers, uint32_t steps, const char* name) const {
    LengthSpec spec;
    spec.model = plan_.model;
    spec.tokens = tokens;
    spec.layers = layers;
    spec.steps = steps;
    spec.selector = o_.selector;
    spec.restores = o_.quick ? 1 : 3;
    spec.stored_features = !o_.quick;
    spec.tiers = tiers_;
    spec.dir = dir_ / name;
    return spec;
  }

  Status Calibrate(uint32_t shortest) {
    const uint32_t tokens = std::min(o_.quick ? 1024u : 4096u, shortest);
    if (progress_) progress_("trying " + Tokens(tokens) + ", to know how long the rest takes");
    LengthSpec spec = Spec(tokens, 1, 1, "calibration");
    LengthSeconds seconds;
    PREFIXD_ASSIGN(const LengthOutcome tried, MeasureLength(spec, &seconds));
    const double rows = double(plan_.model.Geometry(1).token_bytes()) * tokens;
    costs_ = {{seconds.storing / tokens, seconds.once / tokens, seconds.step / tokens},
              tried.stored_bytes / rows + (o_.quick ? 0 : 0.3)};
    return {};
  }

  double LayerBytes(uint32_t tokens) const {
    return double(plan_.model.Geometry(1).token_bytes()) * tokens * costs_.bytes_per_row_byte;
  }

  // Takes a length with one layer (or the layers that were asked for), or says why not.
  void Consider(uint32_t tokens) {
    const uint32_t layers = std::max(1u, o_.layers);
    const double bytes = LayerBytes(tokens) * layers;
    const double seconds = costs_.Seconds(tokens, layers, steps_);
    const std::string what = Tokens(tokens) + ": ";
    const double room = double(FreeBytes(dir_)) * 0.9 - double(256 << 20);
    const double memory = double(AvailableMemory()) / 2;
    const double kv = double(plan_.model.Geometry(layers).token_bytes()) * tokens;
    if (bytes > room) {
      plan_.skipped.push_back(what + "needs " + GigaBytes(bytes) + " on the disk of " +
                              dir_.parent_path().string() + ", where " +
                              GigaBytes(std::max(0.0, room)) + " may be taken");
    } else if (2.5 * kv > memory) {
      plan_.skipped.push_back(what + "needs " + GigaBytes(2.5 * kv) + " of memory, and " +
                              GigaBytes(memory) + " may be taken");
    } else if (spent_ + seconds > minutes_ * 60 && !(o_.quick && plan_.lengths.empty()) &&
               o_.lengths.empty()) {
      plan_.skipped.push_back(what + "one layer takes about " + Seconds(seconds) + "; --minutes " +
                              Fixed(std::ceil((spent_ + seconds) / 60), 0) + " would include it");
    } else {
      plan_.lengths.push_back(Spec(tokens, layers, steps_, std::to_string(tokens).c_str()));
      spent_ += seconds;
    }
  }

  // Spends the time that is left on more layers, equally for all lengths.
  void Deepen() {
    if (o_.layers > 0 || o_.quick) return;
    const double each = std::max(0.0, minutes_ * 60 - spent_) / double(plan_.lengths.size());
    const double room = double(FreeBytes(dir_)) * 0.5 / double(plan_.lengths.size());
    const double memory = double(AvailableMemory()) / 2;
    for (LengthSpec& spec : plan_.lengths) {
      const double one = costs_.Seconds(spec.tokens, 1, steps_);
      const double kv = double(plan_.model.Geometry(1).token_bytes()) * spec.tokens;
      const double fit = std::min({1 + each / one, room / LayerBytes(spec.tokens),
                                   memory / (2.5 * kv), double(plan_.model.n_layers), 4.0});
      spec.layers = static_cast<uint32_t>(std::max(1.0, std::floor(fit)));
    }
  }

  void Sum() {
    Plan& p = plan_.plan;
    p.sentences.push_back(
        "Measures one generated token over a stored prompt of " + plan_.model.name + " (" +
        std::to_string(plan_.model.n_layers) + " layers, " + std::to_string(plan_.model.n_q_heads) +
        " query heads, " + std::to_string(plan_.model.n_kv_heads) + " KV heads of " +
        std::to_string(plan_.model.head_dim) + ", " + std::string(DTypeName(plan_.model.dtype)) +
        "): selecting, loading, computing, estimating.");
    for (const LengthSpec& spec : plan_.lengths) {
      const double seconds = costs_.Seconds(spec.tokens, spec.layers, spec.steps);
      const double bytes = LayerBytes(spec.tokens) * spec.layers;
      p.seconds += seconds;
      p.bytes += bytes;
      p.sentences.push_back(
          Tokens(spec.tokens) + ": " + std::to_string(spec.layers) + " of " +
          std::to_string(plan_.model.n_layers) + " layers" +
          (spec.layers < plan_.model.n_layers
               ? ", scaled by " + Short(double(plan_.model.n_layers) / spec.layers)
               : "") +
          "; " + GigaBytes(bytes) + ", about " + Seconds(seconds));
    }
  }

  const BreakEvenOptions& o_;
  const fs::path dir_;
  const Progress& progress_;
  BreakEvenPlan plan_;
  std::vector<TierSpec> tiers_;
  Costs costs_;
  uint32_t steps_ = 0;
  double minutes_ = 0, spent_ = 0;
};

}  // namespace

Result<BreakEvenPlan> PlanBreakEven(const BreakEvenOptions& options, const fs::path& dir,
                                    const Progress& progress) {
  return Planner(options, dir, progress).Run();
}

Result<BreakEvenOutcome> MeasureBreakEven(const BreakEvenPlan& plan, const Progress& progress) {
  const OtherWork others;
  BreakEvenOutcome outcome;
  outcome.model = plan.model;
  outcome.medium = plan.medium;
  outcome.skipped = plan.skipped;
  outcome.prefill_tokens_per_second = plan.prefill_rate;
  outcome.steps = plan.lengths.front().steps;
  outcome.selector = plan.lengths.front().selector;
  if (plan.prefill_rate <= 0) outcome.gemm_flops = GemmFlops(plan.quick ? 0.2 : 2);
  for (LengthSpec spec : plan.lengths) {
    spec.progress = [&](const std::string& what) {
      if (progress) progress(Tokens(spec.tokens) + ": " + what);
    };
    auto length = MeasureLength(spec, nullptr);
    if (!length.ok()) {
      outcome.skipped.push_back(Tokens(spec.tokens) + ": " + length.error().message);
      std::error_code ec;
      fs::remove_all(spec.dir, ec);
      continue;
    }
    for (const std::string& what : length->skipped) {
      outcome.skipped.push_back(Tokens(spec.tokens) + ", " + what);
    }
    outcome.lengths.push_back(*std::move(length));
  }
  if (outcome.lengths.empty()) {
    return Error{Code::kUnavailable, "nothing could be measured: " + Join(outcome.skipped, "; ")};
  }
  outcome.other_work = others.Share();
  return outcome;
}

Report BreakEvenReport(const BreakEvenOutcome& outcome,
                       const std::vector<std::pair<std::string, std::string>>& machine) {
  Report report;
  report.tables = BreakEvenTables(outcome);
  report.verdict = BreakEvenVerdict(outcome);
  report.skipped = outcome.skipped;
  report.figures = OutcomeJson(outcome);
  report.page = BreakEvenPage(outcome, machine);
  return report;
}

}  // namespace prefixd::bench
