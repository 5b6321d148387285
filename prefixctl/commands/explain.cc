#include <charconv>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "prefixctl/commands/operate.h"
#include "prefixctl/show/output.h"
#include "protocol/codec.h"

namespace prefixd::ctl {
namespace {

using wire::Json;

Result<std::string> ReadInput(const std::string& file) {
  if (file == "-") return std::string(std::istreambuf_iterator<char>(std::cin), {});
  std::ifstream in(file, std::ios::binary);
  if (!in) return Error{Code::kIo, "cannot read the file " + file};
  return std::string(std::istreambuf_iterator<char>(in), {});
}

Error NoToken(const std::string& file, const std::string& what) {
  return InvalidArgument(file + ": a token id is a whole number from 0 to 4294967295, not " + what);
}

Result<std::vector<uint32_t>> ReadPrompt(const std::string& file) {
  PREFIXD_ASSIGN(const std::string text, ReadInput(file));
  std::vector<uint32_t> tokens;
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text[first] == '[') {
    const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!json.is_array()) return InvalidArgument(file + " is no JSON array");
    for (const Json& token : json) {
      if (!token.is_number_unsigned() || token.get<uint64_t>() > UINT32_MAX) {
        return NoToken(file, token.dump(-1, ' ', false, Json::error_handler_t::replace));
      }
      tokens.push_back(token.get<uint32_t>());
    }
  } else {
    std::istringstream in(text);
    for (std::string word; in >> word;) {
      uint32_t token = 0;
      const char* end = word.data() + word.size();
      const auto [at, wrong] = std::from_chars(word.data(), end, token);
      if (wrong != std::errc{} || at != end) return NoToken(file, "'" + word + "'");
      tokens.push_back(token);
    }
  }
  if (tokens.empty()) return InvalidArgument(file + " holds no token ids");
  return tokens;
}

Result<std::vector<std::pair<std::string, std::string>>> ReadIdentity(const std::string& file) {
  std::vector<std::pair<std::string, std::string>> identity;
  if (file.empty()) return identity;
  PREFIXD_ASSIGN(const std::string text, ReadInput(file));
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_object() && json.contains("identity")) json = Json(json["identity"]);  // a model file
  if (!json.is_object()) return InvalidArgument(file + " is no JSON object");
  for (const auto& [tag, value] : json.items()) {
    if (!value.is_string()) return InvalidArgument(file + ": identity." + tag + " is no string");
    identity.emplace_back(tag, value.get<std::string>());
  }
  return identity;
}

std::string Seconds(const TimeEstimate& time) {
  if (!time.known()) return "unknown";
  char text[64];
  std::snprintf(text, sizeof(text), time.seconds < 1 ? "%.3g ms (" : "%.3g s (",
                time.seconds < 1 ? time.seconds * 1000 : time.seconds);
  return text + std::string(EstimateSourceName(time.source)) + ")";
}

void PrintEstimate(const ReuseEstimate& e, uint32_t answer_tokens) {
  std::printf("restore: %s, %s in memory and %s on disk\n", Seconds(e.restore).c_str(),
              Bytes(e.memory_bytes).c_str(), Bytes(e.disk_bytes).c_str());
  std::printf("retrieve: %s for each generated token\n", Seconds(e.retrieve).c_str());
  std::printf("recompute: %s", Seconds(e.recompute).c_str());
  if (e.recompute.known()) std::printf(" at %.6g tokens/s", e.prefill_tokens_per_second);
  std::printf("\nfastest: %s", std::string(ReuseAdviceName(e.advice)).c_str());
  if (e.retrieve.known() && answer_tokens == 0) {
    std::printf(" (attaching is compared with --answer-tokens)");
  }
  std::printf("\n");
}

}  // namespace

Status Explain(RemoteStore& client, const Options& options) {
  ExplainSpec spec;
  spec.match.model = options.name;
  spec.match.accept_approximate = options.accept_approximate;
  spec.match.lineage = options.lineage;
  spec.match.engine = options.engine;
  PREFIXD_ASSIGN(spec.match.tokens, ReadPrompt(options.file));
  PREFIXD_ASSIGN(spec.identity, ReadIdentity(options.geometry_file));
  PREFIXD_ASSIGN(const Explanation why, client.Explain(spec));
  if (options.json) {
    PrintJson(wire::ToJson(why));
    return {};
  }
  std::printf("%u of %u tokens hit", why.match.n_tokens, why.asked_tokens);
  if (why.match.n_tokens > 0) std::printf(", in prefix %s", Printable(why.match.prefix).c_str());
  std::printf("\n");
  if (why.match.estimate.tokens > 0) {
    PrintEstimate(why.match.estimate, options.engine.answer_tokens);
  }
  for (const Miss& miss : why.misses) {
    std::printf("%s: %s\n", std::string(MissReasonName(miss.reason)).c_str(),
                Printable(miss.text).c_str());
  }
  return {};
}

}  // namespace prefixd::ctl
