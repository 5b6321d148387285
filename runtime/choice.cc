#include "runtime/choice.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "attention/diagnostics.h"
#include "attention/selection.h"
#include "attention/step.h"

namespace prefixd {
namespace {

using Json = nlohmann::json;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr EstimatorKind kCandidates[] = {EstimatorKind::kNone, EstimatorKind::kMoment,
                                         EstimatorKind::kPhi};
// Measuring costs samples x tokens: longer prefixes are judged by fewer samples.
constexpr uint64_t kSampleTokens = 32 * 32768;
constexpr size_t kMinSamples = 4;

double& ErrorOf(HeadChoice& choice, EstimatorKind estimator) {
  switch (estimator) {
    case EstimatorKind::kPhi:
      return choice.error_phi;
    case EstimatorKind::kMoment:
      return choice.error_moment;
    default:
      return choice.error_none;
  }
}

// One candidate at one budget, with the error it gathers.
struct Trial {
  size_t budget = 0;
  EstimatorKind estimator = EstimatorKind::kNone;
  uint32_t k = 0;
  double error_sum = 0;
};

struct Inputs {
  const Rooms& rooms;
  const Model& model;
  const storage::StoredPrefix& prefix;
  const QuerySamples& samples;
  const FeatureMapSet* maps = nullptr;
  Partition partition;
  std::vector<double> budgets;
  std::vector<Trial> trials;  // of every head
  std::vector<MomentSummary> moments;
  std::vector<PhiCache> phis;
};

Status MeasureHead(const Inputs& in, uint32_t layer, uint32_t kv_head,
                   std::vector<HeadChoice>& out) {
  const KvGeometry& geometry = in.model.spec.geometry;
  const RowShape row = geometry.row();
  const uint32_t group = geometry.group_size();
  const uint32_t n = in.partition.tail.end, mid_begin = in.partition.mid.begin;
  const uint32_t mid_count = in.partition.mid.size();
  const size_t head = size_t{layer} * geometry.n_kv_heads + kv_head;
  const bool summarised = in.model.Summarised(layer);

  std::vector<std::byte> bytes(n * row.bytes());
  PREFIXD_TRY(in.prefix.ReadRange(layer, kv_head, {0, n}, bytes, nullptr));
  const RowsView rows{bytes.data(), n, row.bytes(), row};
  const RowsView mid = rows.Sub(mid_begin, mid_count);

  const QuerySamples::Layer& samples = in.samples.layers[layer];
  const size_t wanted = std::max<size_t>(kMinSamples, kSampleTokens / n);
  const size_t n_samples = std::min(samples.positions.size(), wanted);
  std::vector<Trial> trials = in.trials;
  std::vector<float> scores(size_t{group} * mid_count);
  std::vector<std::byte> retrieved;
  std::vector<float> exact(size_t{group} * row.value_dim), y(exact.size()), lse(group), rho(group);
  for (size_t s = 0; s < n_samples; ++s) {
    // Spread over the kept positions, which ascend.
    const size_t at = s * samples.positions.size() / n_samples;
    const std::span<const float> q(
        samples.q.data() + (at * geometry.n_q_heads + size_t{kv_head} * group) * geometry.key_dim,
        size_t{group} * geometry.key_dim);
    PREFIXD_TRY(ExactAttention(q, group, geometry.layers[layer], rows, exact, lse));
    Scores(q, group, geometry.layers[layer], mid, scores);
    for (Trial& trial : trials) {
      if (trial.estimator != EstimatorKind::kNone && !summarised) continue;
      Selection selection;
      if (trial.k > 0) {
        selection = SelectByGroupMax(scores, group, mid_count, trial.k, mid_begin, true);
      }
      retrieved.resize(selection.ids.size() * row.bytes());
      for (size_t i = 0; i < selection.ids.size(); ++i) {
        std::memcpy(retrieved.data() + i * row.bytes(), rows.key(selection.ids[i]), row.bytes());
      }
      GroupStepInput step;
      step.queries = q;
      step.group = group;
      step.layer = geometry.layers[layer];
      step.sinks = rows.Sub(0, in.partition.sink.size());
      step.tail = rows.Sub(in.partition.tail.begin, in.partition.tail.size());
      step.retrieved = {retrieved.data(), selection.ids.size(), row.bytes(), row};
      step.cuts = selection.cuts;
      step.mid_count = mid_count;
      step.estimator = trial.estimator;
      if (trial.estimator == EstimatorKind::kMoment) step.moment = &in.moments[head];
      if (trial.estimator == EstimatorKind::kPhi) {
        step.phi = &in.phis[head];
        step.phi_k = &in.maps->phi_k[head];
        step.phi_q =
            std::span(in.maps->phi_q)
                .subspan(size_t{layer} * geometry.n_q_heads + size_t{kv_head} * group, group);
      }
      PREFIXD_TRY(GroupStep(step, {y, lse, rho}));
      for (uint32_t g = 0; g < group; ++g) {
        const auto of_g = [&](std::vector<float>& v) {
          return std::span<const float>(v).subspan(size_t{g} * row.value_dim, row.value_dim);
        };
        trial.error_sum += RelativeL1(of_g(y), of_g(exact));
      }
    }
  }
  out.assign(in.budgets.size(), {});
  for (size_t b = 0; b < in.budgets.size(); ++b) {
    out[b] = {layer, kv_head, EstimatorKind::kNone, in.budgets[b], kNaN, kNaN, kNaN};
  }
  if (n_samples == 0) return {};
  for (const Trial& trial : trials) {
    if (trial.estimator != EstimatorKind::kNone && !summarised) continue;
    HeadChoice& choice = out[trial.budget];
    const double error = trial.error_sum / double(n_samples * group);
    // Candidates come cheapest first: a later one must be better.
    const double best = ErrorOf(choice, choice.chosen);
    ErrorOf(choice, trial.estimator) = error;
    if (std::isnan(best) || error < best) choice.chosen = trial.estimator;
  }
  return {};
}

Json Number(double x) { return std::isnan(x) ? Json(nullptr) : Json(x); }

}  // namespace

double EstimatorTokens(const Model& model, EstimatorKind estimator, bool moment_cross,
                       const FeatureMapSet* maps) {
  const RowShape row = model.spec.geometry.row();
  switch (estimator) {
    case EstimatorKind::kMoment:
      return MomentTokens(row, moment_cross ? row.key_dim : 0, sizeof(float));
    case EstimatorKind::kPhi:
      return maps ? PhiTokens(row, maps->d_phi, sizeof(float)) : 0;
    default:
      return 0;
  }
}

Result<std::vector<HeadChoice>> MeasureChoices(const Rooms& rooms, const Model& model,
                                               const storage::StoredPrefix& prefix,
                                               const QuerySamples& samples,
                                               WorkProgress& progress) {
  const RuntimeOptions& options = *rooms.options;
  const KvGeometry& geometry = model.spec.geometry;
  const uint32_t cut = std::min(prefix.n_tokens(), LastQuarterBegin(samples.prompt_tokens));
  Inputs in{rooms,
            model,
            prefix,
            samples,
            model.MapsFor(prefix.n_tokens()),
            Partition::Of(cut, options.anchors),
            {},
            {},
            {},
            {}};
  for (double budget : options.choice_budgets) {
    const size_t first = in.trials.size();
    for (EstimatorKind estimator : kCandidates) {
      if (estimator == EstimatorKind::kPhi && !in.maps) continue;
      const double cost = EstimatorTokens(model, estimator, options.moment_cross, in.maps);
      if (auto plan = PlanBudget(cut, options.anchors, budget, cost); plan.ok()) {
        in.trials.push_back({in.budgets.size(), estimator, plan->k, 0});
      }
    }
    if (in.trials.size() > first) in.budgets.push_back(budget);
  }
  const size_t heads = size_t{geometry.n_layers} * geometry.n_kv_heads;
  if (samples.empty() || in.partition.mid.size() == 0 || in.trials.empty()) {
    progress.done += heads;
    return std::vector<HeadChoice>{};
  }
  PREFIXD_ASSIGN(const auto parts, ChainParts(*rooms.storage, prefix.info(), cut));
  const auto any = std::numeric_limits<uint64_t>::max();
  PREFIXD_ASSIGN(
      in.moments,
      AssembleSummaries(rooms, MomentKind(model, options.anchors, options.moment_cross), prefix,
                        parts, in.partition.mid, any, WorkPriority::kBackground, nullptr));
  if (in.maps) {
    PREFIXD_ASSIGN(
        in.phis, AssembleSummaries(rooms, PhiKind(model, *in.maps, options.anchors), prefix, parts,
                                   in.partition.mid, any, WorkPriority::kBackground, nullptr));
  }
  std::vector<std::vector<HeadChoice>> by_head(heads);
  const auto measure = [&](size_t head) -> Status {
    PREFIXD_TRY(progress.Check());
    const uint32_t layer = static_cast<uint32_t>(head) / geometry.n_kv_heads;
    const uint32_t kv_head = static_cast<uint32_t>(head) % geometry.n_kv_heads;
    if (geometry.layers[layer].sliding_window == 0) {
      PREFIXD_TRY(MeasureHead(in, layer, kv_head, by_head[head]));
    }
    ++progress.done;
    return {};
  };
  PREFIXD_TRY(rooms.pool->ParallelFor(heads, measure, WorkPriority::kBackground));
  std::vector<HeadChoice> choices;
  for (const auto& of_head : by_head) choices.insert(choices.end(), of_head.begin(), of_head.end());
  return choices;
}

std::vector<std::byte> SerializeChoices(std::span<const HeadChoice> choices) {
  Json json = Json::array();
  for (const HeadChoice& c : choices) {
    json.push_back({{"layer", c.layer},
                    {"kv_head", c.kv_head},
                    {"chosen", EstimatorName(c.chosen)},
                    {"budget", c.budget},
                    {"none", Number(c.error_none)},
                    {"phi", Number(c.error_phi)},
                    {"moment", Number(c.error_moment)}});
  }
  const std::string text = json.dump();
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

Result<std::vector<HeadChoice>> DeserializeChoices(std::span<const std::byte> bytes) {
  const Error malformed{Code::kCorrupt, "the stored estimator choices are malformed"};
  const Json json =
      Json::parse(reinterpret_cast<const char*>(bytes.data()),
                  reinterpret_cast<const char*>(bytes.data()) + bytes.size(), nullptr, false);
  if (!json.is_array()) return malformed;
  std::vector<HeadChoice> choices;
  for (const Json& item : json) {
    const auto number = [&](const char* key, double& out) {
      const auto it = item.find(key);
      if (it == item.end() || !(it->is_number() || it->is_null())) return false;
      out = it->is_null() ? kNaN : it->get<double>();
      return true;
    };
    HeadChoice c;
    double layer = 0, kv_head = 0;
    if (!item.is_object() || !number("layer", layer) || !number("kv_head", kv_head) ||
        !number("budget", c.budget) || !number("none", c.error_none) ||
        !number("phi", c.error_phi) || !number("moment", c.error_moment) ||
        !item.contains("chosen") || !item["chosen"].is_string() || !(layer >= 0 && layer < 1024) ||
        !(kv_head >= 0 && kv_head < 1024)) {
      return malformed;
    }
    c.layer = static_cast<uint32_t>(layer);
    c.kv_head = static_cast<uint32_t>(kv_head);
    PREFIXD_ASSIGN(c.chosen, EstimatorFromName(item["chosen"].get<std::string>()));
    choices.push_back(c);
  }
  return choices;
}

std::string ChoiceProducer(const RuntimeOptions& options, const Model& model) {
  std::string producer = "choice/1 sinks=" + std::to_string(options.anchors.n_sink) +
                         " tail=" + std::to_string(options.anchors.n_tail) +
                         " cross=" + (options.moment_cross ? "1" : "0") + " budgets=";
  for (double budget : options.choice_budgets) producer += std::to_string(budget) + ",";
  for (const FeatureMapSet& maps : model.maps) producer += " " + maps.digest;
  return producer;
}

}  // namespace prefixd
