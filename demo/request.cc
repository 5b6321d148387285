#include "demo/request.h"

#include <nlohmann/json.hpp>

namespace prefixd::demo {

using nlohmann::json;

static void from_json(const json& j, Question& question) {
  j.at("tokens").get_to(question.tokens);
  question.alone = j.value("alone", question.alone);
}
static void from_json(const json& j, OwnAnswer& own) {
  j.at("tokens").get_to(own.tokens);
  j.at("logits").get_to(own.logits);
}
static void from_json(const json& j, Reading& reading) {
  j.at("method").get_to(reading.method);
  if (const json& budget = j.at("budget"); !budget.is_null()) reading.budget = budget.get<double>();
}
static void from_json(const json& j, Request& request) {
  const auto take = [&](const char* key, auto& member) {
    if (const auto found = j.find(key); found != j.end()) found->get_to(member);
  };
  take("model_dir", request.model_dir);
  take("label", request.label);
  take("model", request.model);
  take("prefix", request.prefix);
  take("prompt", request.prompt);
  take("continuation", request.continuation);
  take("questions", request.questions);
  take("answer_tokens", request.answer_tokens);
  take("readings", request.readings);
  take("asked", request.asked);
  take("recorded_tokens", request.recorded_tokens);
  take("cold_tokens", request.cold_tokens);
  if (j.contains("own")) request.own = j.at("own").get<OwnAnswer>();
}

Result<Request> ParseRequest(const std::string& text) {
  try {
    Request request = json::parse(text).get<Request>();
    if (request.prompt.empty()) return InvalidArgument("the request has no prompt");
    return request;
  } catch (const json::exception& error) {
    return InvalidArgument(std::string("standard input is not a request: ") + error.what());
  }
}

}  // namespace prefixd::demo
