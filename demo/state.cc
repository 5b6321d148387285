#include "demo/state.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

namespace prefixd::demo {

using nlohmann::json;

static void to_json(json& j, const Fact& f) {
  j = {{"word", f.word}, {"answer", f.answer}, {"position", f.position}};
}
static void from_json(const json& j, Fact& f) {
  j.at("word").get_to(f.word);
  j.at("answer").get_to(f.answer);
  j.at("position").get_to(f.position);
}
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DemoState, document, model_dir, model, prefix, prompt,
                                   continuation, facts, cold_prefill_s, put_s, ingest_s, put_bytes,
                                   own_answers, own_logits)

Status SaveState(const DemoState& state, const std::filesystem::path& path) {
  std::ofstream out(path);
  out << json(state).dump(-1, ' ', false, json::error_handler_t::replace) << '\n';
  out.close();
  if (!out) {
    return Error{Code::kIo, "cannot write '" + path.string() + "': " + std::strerror(errno)};
  }
  return {};
}

Result<DemoState> LoadState(const std::filesystem::path& path) {
  std::ifstream in(path);
  if (!in) {
    return Error{Code::kNotFound,
                 "cannot read '" + path.string() + "'; run `prefixd-demo prefill` first"};
  }
  try {
    return json::parse(in).get<DemoState>();
  } catch (const json::exception& error) {
    return Error{Code::kCorrupt, "'" + path.string() + "' is not a demo state: " + error.what()};
  }
}

}  // namespace prefixd::demo
