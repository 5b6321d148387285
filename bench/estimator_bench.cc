// Measures how well each estimator completes a step. It stores what a real model made of a document
// (by a trace, or by a decoder that reads it now), and measures the mean relative l1 error of
// attention over the stored prompt, against exact attention, on the queries of what follows: each
// estimator alone, the choice per
// head, and tokens spread over heads by missing mass, all at equal budgets. It also measures how
// well the scores that a search by codes returns give the mass of what the search did not retrieve.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "attention/reference/diagnostics.h"
#include "bench/prompts/trace_options.h"
#include "bench/prompts/traced_store.h"
#include "bench/selection/scan_masses.h"
#include "bench/support/bench_main.h"
#include "decoder/attention/local_attention.h"
#include "decoder/attention/put_attention.h"
#include "decoder/checkpoint/checkpoint.h"
#include "decoder/checkpoint/tokenizer.h"
#include "decoder/model/model.h"
#include "demo/document.h"
#include "measure/timing/json_file.h"
#include "runtime/store/local_store.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

struct Options {
  TraceOptions source = {.prompt_tokens = 8000};
  std::filesystem::path dir;
  uint32_t queries = 48;  // taken from the continuation, or from the trace
  std::vector<double> budgets = {0.01, 0.02, 0.05};
  std::string estimators =
      "none, moment, moment/r2, moment/r4, moment/r8, moment/r16, moment/full, moment/full/cov, "
      "centroid, scan, phi";
  std::vector<std::string> selectors = {"exact"};
  std::vector<uint32_t> heads;  // numbers of keys of synthetic heads, beside the model's own
  uint32_t clusters = 32;
  std::string json_file;
};

// Holds one decode step's queries and the truth: per layer [n_q_heads * dim].
struct Recorded {
  std::vector<std::vector<float>> q, y;
};

struct Row {
  std::string name, selector;
  double budget = 0;
  bool feasible = false;
  std::vector<double> errors;  // per query head
  double mean = 0, tokens = 0;
  double scanned = 0;  // bytes that a search reads
  std::string chosen;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {}

  Status Run() {
    PREFIXD_TRY(Prepare());
    PREFIXD_ASSIGN(const auto variants, Variants());
    for (const std::string& selector : options_.selectors) {
      for (const double budget : options_.budgets) {
        StepPolicy policy;
        policy.selector = selector;
        policy.budget = budget;
        for (const EstimatorVariant& v : variants) {
          policy.estimator = v;
          PREFIXD_TRY(Measure(v.Name(), policy));
        }
        policy.estimator = EstimatorKind::kAuto;
        PREFIXD_TRY(Measure("auto", policy));
        policy.adaptive = true;
        for (const EstimatorVariant& v :
             {EstimatorVariant(EstimatorKind::kNone), EstimatorVariant(EstimatorKind::kMoment),
              EstimatorVariant(EstimatorKind::kAuto)}) {
          policy.estimator = v;
          PREFIXD_TRY(Measure(v.Name() + ", adaptive", policy));
        }
      }
    }
    Print();
    if (!options_.heads.empty()) PREFIXD_TRY(MeasureMasses());
    return options_.json_file.empty() ? Status() : Write();
  }

 private:
  // A trace has no feature maps.
  Result<std::vector<EstimatorVariant>> Variants() const {
    PREFIXD_ASSIGN(auto variants, ParseVariants(options_.estimators));
    if (!options_.source.file.empty()) {
      std::erase_if(variants, [](const auto& v) { return v.kind == EstimatorKind::kPhi; });
    }
    return variants;
  }

  Status Prepare() {
    RuntimeOptions runtime;
    runtime.dir = options_.dir;
    runtime.choice_budgets = options_.budgets;
    runtime.clusters = options_.clusters;
    runtime.recluster = false;
    PREFIXD_ASSIGN(runtime.estimators, Variants());
    PREFIXD_ASSIGN(store_, LocalStore::Open(runtime));
    PREFIXD_TRY(options_.source.file.empty() ? StoreDocument() : StoreTrace());
    return RecordTruth();
  }

  Status StoreTrace() {
    TraceOptions source = options_.source;
    source.steps = options_.queries;
    source.fractions = {};
    PREFIXD_ASSIGN(const RetrievalTrace trace, MakeTrace(source));
    geometry_ = trace.geometry;
    prompt_ = trace.tokens;
    PREFIXD_ASSIGN(const std::string prefix, PutTrace(*store_, "model", trace, /*queries=*/true));
    PREFIXD_TRY(store_->WaitReady(prefix, nullptr));
    const size_t floats = size_t{geometry_.group_size(0)} * geometry_.key_dim;
    recorded_.resize(trace.heads[0].step_queries.size() / floats);
    for (size_t s = 0; s < recorded_.size(); ++s) {
      recorded_[s].q.resize(geometry_.n_layers);
      for (size_t i = 0; i < trace.heads.size(); ++i) {
        const auto of = std::span(trace.heads[i].step_queries).subspan(s * floats, floats);
        auto& q = recorded_[s].q[i / geometry_.n_kv_heads];
        q.insert(q.end(), of.begin(), of.end());
      }
    }
    return {};
  }

  Status StoreDocument() {
    const std::filesystem::path& dir = options_.source.model_dir;
    PREFIXD_ASSIGN(const decoder::Model model, decoder::Model::Load(dir, {}));
    geometry_ = model.Geometry(DType::kBf16);
    PREFIXD_ASSIGN(const auto tokenizer, decoder::ByteTokenizer::For(model.config()));
    demo::DocumentOptions from;
    from.file = options_.source.document;
    from.prompt_tokens = options_.source.prompt_tokens;
    from.continuation_tokens = options_.queries * 4;
    PREFIXD_ASSIGN(const demo::Document document, demo::LoadDocument(from));
    prompt_ = tokenizer.Encode(document.prompt, /*with_bos=*/true);
    const auto n = static_cast<uint32_t>(prompt_.size());
    ModelSpec spec;
    spec.name = "model";
    spec.geometry = geometry_;
    PREFIXD_ASSIGN(spec.identity, decoder::ModelIdentity(dir, model.config()));
    for (const auto& entry : std::filesystem::directory_iterator(dir)) {
      if (entry.path().filename().string().starts_with("phi-")) {
        spec.feature_maps.push_back(entry.path());
      }
    }
    PREFIXD_TRY(store_->RegisterModel(spec));
    PREFIXD_ASSIGN(const auto put, store_->BeginPut({"model", "", prompt_, "bench"}));
    decoder::LocalAttention local(geometry_);
    Status wrote;
    decoder::ObservedAttention observed(
        local, [&](uint32_t layer, uint32_t first, uint32_t count, std::span<const float> q) {
          if (wrote.ok()) wrote = put->WriteQueries(layer, first, count, q);
        });
    PREFIXD_TRY(model.Forward(prompt_, 0, observed, 0, {}));
    PREFIXD_TRY(wrote);
    PREFIXD_TRY(decoder::PutCache(local.cache(), 0, n, *put));
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    PREFIXD_TRY(store_->WaitReady(stored.prefix, nullptr));
    return Record(model, tokenizer.Encode(document.continuation, false), n, local);
  }

  // Records evenly spaced tokens of the continuation, decoded exactly.
  Status Record(const decoder::Model& model, const std::vector<uint32_t>& text, uint32_t n,
                decoder::LocalAttention& local) {
    const size_t spacing = std::max<size_t>(1, text.size() / options_.queries);
    decoder::ObservedAttention observed(
        local, [&](uint32_t layer, uint32_t first, uint32_t, std::span<const float> q) {
          if ((first - n) % spacing != 0) return;
          if (layer == 0) recorded_.emplace_back();
          recorded_.back().q.emplace_back(q.begin(), q.end());
        });
    for (size_t i = 0; i < text.size(); ++i) {
      PREFIXD_TRY(model.Forward({&text[i], 1}, n + static_cast<uint32_t>(i), observed, 0, {}));
    }
    return {};
  }

  Status RecordTruth() {
    StepPolicy full;
    full.mode = StepMode::kFull;
    PREFIXD_ASSIGN(const auto session, store_->Attach({"model", "", prompt_, "", 0, full}));
    std::vector<float> lse(geometry_.n_q_heads);
    for (Recorded& token : recorded_) {
      for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
        auto& y = token.y.emplace_back(size_t{geometry_.n_q_heads} * geometry_.value_dim);
        PREFIXD_TRY(session->Step(layer, token.q[layer], y, lse, nullptr));
      }
    }
    return {};
  }

  Status Measure(const std::string& name, const StepPolicy& policy) {
    Row row;
    row.name = name;
    row.selector = policy.selector;
    row.budget = policy.budget;
    auto session = store_->Attach({"model", "", prompt_, "", 0, policy});
    if (!session.ok() && session.error().code != Code::kInfeasible) return session.error();
    if (session.ok()) {
      row.feasible = true;
      row.chosen = (*session)->info().estimator;
      row.errors.assign(size_t{geometry_.n_layers} * geometry_.n_q_heads, 0);
      const size_t dim = geometry_.value_dim;
      std::vector<float> y(geometry_.n_q_heads * dim), lse(geometry_.n_q_heads);
      for (const Recorded& token : recorded_) {
        for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
          PREFIXD_TRY((*session)->Step(layer, token.q[layer], y, lse, nullptr));
          for (uint32_t head = 0; head < geometry_.n_q_heads; ++head) {
            row.errors[size_t{layer} * geometry_.n_q_heads + head] +=
                RelativeL1(std::span<const float>(y).subspan(head * dim, dim),
                           std::span<const float>(token.y[layer]).subspan(head * dim, dim)) /
                double(recorded_.size());
          }
        }
      }
      for (double e : row.errors) row.mean += e / double(row.errors.size());
      PREFIXD_ASSIGN(const SessionReport report, (*session)->report());
      const Ledger& total = report.total;
      row.tokens = total.tokens_per_step();
      row.scanned = double(total.scan_bytes) / double(std::max<uint64_t>(1, total.selections));
    }
    rows_.push_back(std::move(row));
    return {};
  }

  void Print() const {
    std::printf("%zu tokens, %zu recorded steps, %u x %u heads; mean relative l1 error\n\n",
                prompt_.size(), recorded_.size(), geometry_.n_layers, geometry_.n_q_heads);
    std::printf("%-24s %-8s %7s %9s %8s %9s\n", "estimator", "selector", "budget", "error",
                "tokens", "scan KiB");
    for (const Row& row : rows_) {
      std::printf("%-24s %-8s %6.1f%% ", row.name.c_str(), row.selector.c_str(), 100 * row.budget);
      if (row.feasible) {
        std::printf("%9.4f %8.1f %9.1f\n", row.mean, row.tokens, row.scanned / 1024);
      } else {
        std::printf("%9s %8s %9s\n", "-", "-", "-");
      }
    }
  }

  Status MeasureMasses() {
    std::printf("\n%-24s %6s %6s %9s %8s %8s %8s %8s %8s %8s %7s\n", "log Z_R by codes", "K",
                "share", "as coded", "bias", "dev.", "of lse", "search", "scores", "sums ms",
                "bytes");
    PREFIXD_ASSIGN(const RetrievalTrace trace, MakeTrace(options_.source));
    PREFIXD_TRY(Masses("real, " + std::to_string(trace.n_tokens), HeadTraces(trace)));
    for (const uint32_t n : options_.heads) {
      PREFIXD_TRY(Masses("synthetic, " + std::to_string(n), {SyntheticHead({.n_tokens = n})}));
    }
    return {};
  }

  Status Masses(const std::string& name, const std::vector<HeadTrace>& heads) {
    PREFIXD_ASSIGN(const auto results, MeasureScanMasses(heads, options_.budgets));
    for (const ScanMass& m : results) {
      std::printf("%-24s %5.1f%% %6.3f %+9.3f %+8.3f %8.3f %8.4f %8.3f %8.3f %8.3f %+6.0f%%\n",
                  name.c_str(), 100 * m.fraction, m.share, m.codes_alone, m.bias, m.deviation,
                  m.of_all, m.search_ms, m.scores_ms, m.sums_ms, 100 * m.extra_bytes);
      masses_.push_back({{"head", name},
                         {"k", m.fraction},
                         {"share", m.share},
                         {"bias_as_coded", m.codes_alone},
                         {"bias", m.bias},
                         {"deviation", m.deviation},
                         {"rms_of_lse", m.of_all},
                         {"search_ms", m.search_ms},
                         {"search_with_scores_ms", m.scores_ms},
                         {"sums_ms", m.sums_ms},
                         {"extra_bytes", m.extra_bytes}});
    }
    return {};
  }

  Status Write() const {
    json rows = json::array();
    for (const Row& row : rows_) {
      const auto number = [&](double x) { return row.feasible ? json(x) : json(nullptr); };
      rows.push_back({{"estimator", row.name},
                      {"selector", row.selector},
                      {"budget", row.budget},
                      {"feasible", row.feasible},
                      {"error", number(row.mean)},
                      {"tokens_per_step", number(row.tokens)},
                      {"scan_bytes", number(row.scanned)},
                      {"errors", row.errors},
                      {"chosen", row.chosen}});
    }
    PREFIXD_TRY(WriteJson(options_.json_file, json{{"tokens", prompt_.size()},
                                                   {"source", Source()},
                                                   {"steps", recorded_.size()},
                                                   {"clusters", options_.clusters},
                                                   {"rows", std::move(rows)},
                                                   {"scan_masses", masses_}}));
    return {};
  }

  std::string Source() const {
    const TraceOptions& from = options_.source;
    return (from.file.empty() ? from.document : from.file).filename().string();
  }

  const Options& options_;
  KvGeometry geometry_;
  std::vector<uint32_t> prompt_;
  std::unique_ptr<LocalStore> store_;
  std::vector<Recorded> recorded_;
  std::vector<Row> rows_;
  json masses_ = json::array();
};

Status Run(Options options) {
  std::string scratch =
      (std::filesystem::temp_directory_path() / "prefixd-estimator-XXXXXX").string();
  const bool own = options.dir.empty();
  if (own && mkdtemp(scratch.data()) == nullptr) {
    return Error{Code::kIo, "cannot make a directory like " + scratch};
  }
  if (own) options.dir = scratch;
  options.dir /= "store";
  Status status = Bench(options).Run();
  std::error_code ignored;
  if (own) std::filesystem::remove_all(scratch, ignored);
  return status;
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Output error of each estimator of what a step does not read.");
  prefixd::bench::AddTraceSource(app, options.source);
  prefixd::bench::AddTraceTokens(app, options.source);
  app.add_option("--dir", options.dir, "Where to make the store; default: a temporary directory");
  app.add_option("--queries", options.queries, "Recorded steps")->capture_default_str();
  app.add_option("--budgets", options.budgets, "Fractions of the prompt")->capture_default_str();
  app.add_option("--estimators", options.estimators, "Names")->capture_default_str();
  app.add_option("--selectors", options.selectors, "exact, codes, ...")->capture_default_str();
  app.add_option("--heads", options.heads,
                 "The mass by codes, on the model's heads and synthetic ones of so many keys");
  app.add_option("--clusters", options.clusters, "Per head")->capture_default_str();
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Run(options); });
}
