#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <istream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "decoder/checkpoint/checkpoint.h"
#include "decoder/model/model.h"
#include "demo/commands.h"
#include "demo/compare.h"
#include "demo/events.h"
#include "demo/stored_document.h"
#include "prefixd/client.h"

namespace prefixd::demo {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr DType kCacheDtype = DType::kBf16;

struct Setup {
  std::filesystem::path model_dir, store_dir;
  uint32_t threads = 0;
};

struct Job {
  std::string id;
  std::vector<uint32_t> prompt;
  std::vector<Passage> passages;
  std::vector<NamedPolicy> readings;  // of one compression after the other
  uint32_t recorded = 0;
  bool logits = false;
};

Setup ReadSetup(const json& j) {
  return {j.at("model_dir").get<std::string>(), j.at("store_dir").get<std::string>(),
          j.value("threads", 0u)};
}

Result<NamedPolicy> ReadPolicy(const json& j) {
  NamedPolicy named{j.at("name").get<std::string>(), {}};
  PREFIXD_ASSIGN(named.policy.mode, StepModeFromName(j.value("mode", std::string("retrieve"))));
  PREFIXD_ASSIGN(named.policy.estimator,
                 EstimatorVariant::Parse(j.value("estimator", std::string("auto"))));
  named.policy.selector = j.value("selector", named.policy.selector);
  named.policy.budget = j.value("budget", named.policy.budget);
  named.policy.spread = j.value("spread", named.policy.spread);
  for (const json& head : j.value("fixed", json::array())) {
    StepPolicy::Fixed fixed{head.at("layer"), head.at("kv_head"), EstimatorKind::kNone};
    PREFIXD_ASSIGN(fixed.estimator,
                   EstimatorVariant::Parse(head.at("estimator").get<std::string>()));
    named.policy.fixed.push_back(fixed);
  }
  if (j.contains("compress")) {
    named.compress = CompressSpec{.keep = j["compress"].at("keep").get<double>(),
                                  .policy = j["compress"].at("policy").get<std::string>(),
                                  .scorers = j["compress"].value("scorers", std::string())};
  }
  return named;
}

Result<Passage> ReadPassage(const json& j) {
  Passage passage;
  passage.exact = j.value("exact", passage.exact);
  j.at("read").get_to(passage.read);
  passage.targets = j.value("targets", passage.targets);
  passage.generate = j.value("generate", 0u);
  passage.stop = j.value("stop", passage.stop);
  if (passage.generate > 0
          ? passage.read.size() != 1 || !passage.targets.empty()
          : passage.read.empty() || passage.read.size() != passage.targets.size()) {
    return InvalidArgument(
        "a passage has a target for each token that it reads, or one token and a number to "
        "generate");
  }
  return passage;
}

Result<Job> ReadJob(const json& j, uint32_t vocab) {
  Job job;
  j.at("id").get_to(job.id);
  j.at("prompt").get_to(job.prompt);
  job.recorded = j.value("recorded", 0u);
  job.logits = j.value("logits", false);
  for (const json& passage : j.at("passages")) {
    PREFIXD_ASSIGN(Passage read, ReadPassage(passage));
    for (const uint32_t target : read.targets) {
      if (target >= vocab) return InvalidArgument("a target is outside the vocabulary");
    }
    job.passages.push_back(std::move(read));
  }
  for (const json& reading : j.at("readings")) {
    PREFIXD_ASSIGN(NamedPolicy named, ReadPolicy(reading));
    job.readings.push_back(std::move(named));
  }
  // What compressing gave up does not come back.
  if (!std::ranges::is_partitioned(job.readings,
                                   [](const NamedPolicy& r) { return !r.compress; })) {
    return InvalidArgument("readings of compressed documents come last");
  }
  if (job.prompt.empty() || job.passages.empty()) {
    return InvalidArgument("a document has a prompt and at least one passage");
  }
  return job;
}

// Five digits are enough for what is averaged, and keep lines short.
double Short(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.5g", x);
  return std::strtod(text, nullptr);
}

json Shortened(const std::vector<double>& values) {
  json out = json::array();
  for (const double value : values) out.push_back(Short(value));
  return out;
}

json PassageJson(const Passage& passage, const PassageResult& result) {
  json kl = json::array(), nll = json::array(), same = json::array();
  for (const TokenDifference& token : result.tokens) {
    kl.push_back(Short(token.kl));
    nll.push_back(Short(token.nll));
    same.push_back(token.same ? 1 : 0);
  }
  json j = {{"kl", kl}, {"nll", nll}, {"same", same}};
  if (passage.generate > 0) j["text"] = result.text;
  if (!result.logits.empty()) j["logits"] = result.logits;
  return j;
}

void EmitReading(const Job& job, const std::string& name, const ReadingResult& result,
                 double seconds) {
  json event = {{"event", "reading"}, {"id", job.id}, {"method", name}};
  event["feasible"] = !result.infeasible;
  if (result.infeasible) {
    event["reason"] = *result.infeasible;
  } else {
    json passages = json::array();
    for (size_t i = 0; i < job.passages.size(); ++i) {
      passages.push_back(PassageJson(job.passages[i], result.passages[i]));
    }
    event["passages"] = std::move(passages);
    event["seconds"] = Short(seconds);
    event["tokens_per_step"] = Short(result.tokens_per_step);
    if (!result.errors.empty()) {
      event["errors"] = Shortened(result.errors);
      event["shifts"] = Shortened(result.shifts);
    }
  }
  Emit(event);
}

// What compressing did, beside what the readings of it show.
void EmitCompressed(const Job& job, const CompressSpec& spec, const CompressReport& report) {
  Emit({{"event", "compressed"},
        {"id", job.id},
        {"policy", spec.policy},
        {"keep", spec.keep},
        {"bytes_before", report.bytes_before},
        {"bytes_after", report.bytes_after},
        {"error_before", Short(report.error_before)},
        {"error_after", Short(report.error_after)}});
}

Status CompareJob(const decoder::Model& model, Store& store, const ModelSpec& spec,
                  const Job& job) {
  StoredDocument document(model, store, spec, job.prompt);
  PREFIXD_ASSIGN(const StoredDocument::Made made, document.Make());
  Emit({{"event", "stored"},
        {"id", job.id},
        {"prefilled", made.prefilled},
        {"prefill_s", Short(made.prefill_s)},
        {"ready_s", Short(made.ready_s)}});
  PREFIXD_ASSIGN(std::shared_ptr<Session> session, document.Attach());
  Comparison comparison(model, session, job.passages, job.recorded, job.logits);
  auto start = Clock::now();
  PREFIXD_ASSIGN(const ReadingResult full, comparison.Full());
  EmitReading(job, "full", full, SecondsSince(start));
  PREFIXD_ASSIGN(const std::vector<double> entropy, comparison.Entropy());
  PREFIXD_ASSIGN(const PrefixDetail detail, document.Detail());
  json chosen = json::object();
  for (const HeadChoice& choice : detail.choices) {
    chosen[std::to_string(choice.budget)].push_back(choice.chosen.Name());
  }
  Emit({{"event", "heads"},
        {"id", job.id},
        {"layers", spec.geometry.n_layers},
        {"entropy", Shortened(entropy)},
        {"chosen", chosen}});
  std::optional<CompressSpec> read_as;
  for (const NamedPolicy& reading : job.readings) {
    if (reading.compress && reading.compress != read_as) {
      PREFIXD_TRY(session->Detach());
      PREFIXD_ASSIGN(const CompressReport report, document.Compress(*reading.compress));
      EmitCompressed(job, *reading.compress, report);
      PREFIXD_ASSIGN(session, document.Attach());
      comparison.ReadThrough(session);
      read_as = reading.compress;
    }
    start = Clock::now();
    PREFIXD_ASSIGN(const ReadingResult result, comparison.Read(reading.policy));
    EmitReading(job, reading.name, result, SecondsSince(start));
  }
  PREFIXD_TRY(session->Detach());
  PREFIXD_TRY(document.Remove());
  Emit({{"event", "done"}, {"id", job.id}});
  return {};
}

Status Run(std::istream& in) {
  std::string line;
  if (!std::getline(in, line)) return InvalidArgument("standard input has no setup");
  const Setup setup = ReadSetup(json::parse(line));
  PREFIXD_ASSIGN(const decoder::Model model,
                 decoder::Model::Load(setup.model_dir, {.threads = setup.threads}));
  RuntimeOptions options;
  options.dir = setup.store_dir;
  options.threads = setup.threads;
  // A document is stored once and removed after minutes: nothing that serves it later is worth
  // making.
  options.recluster = false;
  options.compact_max_tokens = 0;
  PREFIXD_ASSIGN(const std::unique_ptr<Store> store, Open(options));
  ModelSpec spec;
  spec.name = std::filesystem::weakly_canonical(setup.model_dir).filename().string();
  spec.geometry = model.Geometry(kCacheDtype);
  PREFIXD_ASSIGN(spec.identity, decoder::ModelIdentity(setup.model_dir, model.config()));
  PREFIXD_TRY(store->RegisterModel(spec));
  Emit({{"event", "begun"}, {"model", spec.name}, {"weights", spec.identity}});
  while (std::getline(in, line)) {
    PREFIXD_ASSIGN(const Job job, ReadJob(json::parse(line), model.config().vocab_size));
    PREFIXD_TRY(CompareJob(model, *store, spec, job));
  }
  return {};
}

}  // namespace

Status RunCompare(std::istream& in) {
  try {
    return Run(in);
  } catch (const json::exception& error) {
    return InvalidArgument(std::string("standard input is not a request: ") + error.what());
  }
}

}  // namespace prefixd::demo
