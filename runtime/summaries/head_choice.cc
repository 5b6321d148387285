#include "runtime/summaries/head_choice.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "attention/step/budget.h"
#include "runtime/summaries/summaries.h"
#include "runtime/summaries/token_features.h"

namespace prefixd {
namespace {

// Choices are stored as JSON, because people read them too.
using Json = nlohmann::json;

Result<HeadChoice> ChoiceFrom(const Json& item) {
  const Error malformed{Code::kCorrupt, "the stored estimator choices are malformed"};
  const auto number = [&](const char* key, double low, double high) {
    const auto it = item.find(key);
    const double x = it != item.end() && it->is_number() ? it->get<double>() : std::nan("");
    return x >= low && x <= high ? x : std::nan("");
  };
  if (!item.is_object() || !item.contains("chosen") || !item["chosen"].is_string() ||
      !item.contains("errors") || !item["errors"].is_array()) {
    return malformed;
  }
  const double layer = number("layer", 0, 4095), kv_head = number("kv_head", 0, 4095);
  HeadChoice choice;
  choice.budget = number("budget", 0, 1);
  if (std::isnan(layer) || std::isnan(kv_head) || std::isnan(choice.budget)) return malformed;
  choice.layer = static_cast<uint32_t>(layer);
  choice.kv_head = static_cast<uint32_t>(kv_head);
  const auto chosen = EstimatorVariant::Parse(item["chosen"].get_ref<const std::string&>());
  if (!chosen.ok() || chosen->kind == EstimatorKind::kAuto) return malformed;
  choice.chosen = *chosen;
  for (const Json& error : item["errors"]) {
    if (!error.is_array() || error.size() != 2 || !error[0].is_string() || !error[1].is_number()) {
      return malformed;
    }
    const auto estimator = EstimatorVariant::Parse(error[0].get_ref<const std::string&>());
    if (!estimator.ok()) return malformed;
    choice.errors.push_back({*estimator, error[1].get<double>()});
  }
  return choice;
}

}  // namespace

std::vector<std::byte> SerializeChoices(std::span<const HeadChoice> choices) {
  Json json = Json::array();
  for (const HeadChoice& c : choices) {
    Json errors = Json::array();  // an object would forget their order
    for (const EstimatorError& e : c.errors) errors.push_back({e.estimator.Name(), e.error});
    json.push_back({{"layer", c.layer},
                    {"kv_head", c.kv_head},
                    {"chosen", c.chosen.Name()},
                    {"budget", c.budget},
                    {"errors", std::move(errors)}});
  }
  const std::string text = json.dump();
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

Result<std::vector<HeadChoice>> DeserializeChoices(std::span<const std::byte> bytes) {
  const Json json =
      Json::parse(reinterpret_cast<const char*>(bytes.data()),
                  reinterpret_cast<const char*>(bytes.data()) + bytes.size(), nullptr, false);
  if (!json.is_array()) {
    return Error{Code::kCorrupt, "the stored estimator choices are malformed"};
  }
  std::vector<HeadChoice> choices;
  for (const Json& item : json) {
    PREFIXD_ASSIGN(auto choice, ChoiceFrom(item));
    choices.push_back(std::move(choice));
  }
  return choices;
}

void OrderByPreference(std::span<EstimatorError> errors) {
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    const auto rest = errors.subspan(rank);
    const double least = std::ranges::min(rest, {}, &EstimatorError::error).error;
    const auto next = std::ranges::find_if(
        rest, [&](const EstimatorError& e) { return !(e.error > least + kErrorResolution); });
    std::rotate(rest.begin(), next, next + 1);
  }
}

bool IsChosen(const EstimatorVariant& estimator, bool codes) {
  return estimator.kind != EstimatorKind::kScan || !codes;
}

std::vector<EstimatorError>::const_iterator FirstOf(const std::vector<EstimatorError>& errors,
                                                    bool codes) {
  return std::ranges::find_if(
      errors, [&](const EstimatorError& e) { return IsChosen(e.estimator, codes); });
}

double EstimatorTokens(const RuntimeOptions& options, const RowShape& row,
                       const EstimatorVariant& estimator, const FeatureMapSet* maps,
                       double row_bytes) {
  return VariantTokens(estimator, row, maps ? maps->d_phi : 0, options.clusters) *
         (double(row.bytes()) / row_bytes);
}

double ApartTokens(const EstimatorSummary& summary, double row_bytes) {
  const PhiCache* phi = summary.phi();
  return phi ? static_cast<double>(phi->apart_bytes()) / row_bytes : 0;
}

double RetrievedTokenCost(const RuntimeOptions& options, const RowShape& row,
                          const EstimatorVariant& estimator, const FeatureMapSet* maps,
                          double row_bytes) {
  const auto format = FeatureFormatFromName(options.phi_features);
  if (estimator.kind != EstimatorKind::kPhi || !maps || !format.ok() || !*format) return 1;
  return 1 + FeatureTokens(row, maps->d_phi, (*format)->bits) * (double(row.bytes()) / row_bytes);
}

std::string ChoiceProducer(const RuntimeOptions& options, const Model& model) {
  std::string producer =
      "choice/6 sinks=" + std::to_string(options.anchors.n_sink) +
      " tail=" + std::to_string(options.anchors.n_tail) +
      " of=" + VariantNames(options.estimators) + " clusters=" + std::to_string(options.clusters) +
      " features=" + options.phi_features +
      " codes=" + (options.build_codes ? std::to_string(options.codes_min_tokens) : "none") +
      " recall=" + std::to_string(options.recall_target) + " budgets=";
  for (double budget : options.choice_budgets) producer += std::to_string(budget) + ",";
  for (const FeatureMapSet& maps : model.maps) producer += " " + maps.digest;
  return producer;
}

}  // namespace prefixd
