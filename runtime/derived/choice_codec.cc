// The stored form of the choices: JSON, because people look at it too.
#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/derived/choice.h"

namespace prefixd {
namespace {

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

}  // namespace prefixd
