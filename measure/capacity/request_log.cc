#include "measure/capacity/request_log.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <unordered_map>

namespace prefixd::bench {
namespace {

constexpr uint64_t kMaxTokens = 1u << 26;
constexpr double kMaxMs = 1e14;  // since 1970: three thousand years

// Reads one line; an error says what is wrong in it.
Result<Request> ParseRequest(const std::string& line, uint32_t block_tokens) {
  const auto wrong = [](const std::string& what) { return Error{Code::kInvalidArgument, what}; };
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return wrong("is not a JSON object");
  Request request;
  const auto number = [&](const char* key, uint64_t least, uint32_t* out) -> Status {
    const auto it = object.find(key);
    if (it == object.end()) return wrong("has no " + std::string(key));
    if (!it->is_number_unsigned() || it->get<uint64_t>() < least ||
        it->get<uint64_t>() > kMaxTokens) {
      return wrong(std::string(key) + " must be a whole number from " + std::to_string(least) +
                   " to " + std::to_string(kMaxTokens));
    }
    *out = static_cast<uint32_t>(it->get<uint64_t>());
    return {};
  };
  PREFIXD_TRY(number("input_length", 1, &request.input_tokens));
  PREFIXD_TRY(number("output_length", 0, &request.output_tokens));
  const auto time = object.find("timestamp");
  if (time == object.end()) return wrong("has no timestamp");
  const double ms = time->is_number() ? time->get<double>() : -1;
  if (!(ms >= 0 && ms <= kMaxMs)) return wrong("timestamp must be milliseconds from 0 to 1e14");
  request.seconds = ms / 1e3;
  const auto ids = object.find("hash_ids");
  if (ids == object.end()) return wrong("has no hash_ids");
  if (!ids->is_array()) return wrong("hash_ids must be a list of whole numbers");
  for (const auto& id : *ids) {
    if (!id.is_number_unsigned()) return wrong("hash_ids must be a list of whole numbers");
    request.blocks.push_back(id.get<uint64_t>());
  }
  const uint64_t expected = (uint64_t{request.input_tokens} + block_tokens - 1) / block_tokens;
  if (request.blocks.size() != expected) {
    return wrong("has " + std::to_string(request.blocks.size()) + " hash_ids for " +
                 std::to_string(request.input_tokens) + " tokens; blocks of " +
                 std::to_string(block_tokens) + " tokens would be " + std::to_string(expected) +
                 " (--block-tokens says how long blocks are)");
  }
  return request;
}

// Holds what each id was seen behind: an id stands for the whole beginning of a prompt up to its
// block's end, so it follows the same one wherever it comes. Ids of blocks alone would be hit where
// a store finds nothing.
class Chains {
 public:
  Status Add(const Request& request, uint64_t line) {
    for (size_t i = 0; i < request.blocks.size(); ++i) {
      const Seen now{i > 0, i > 0 ? request.blocks[i - 1] : 0, line};
      const auto [at, fresh] = seen_.try_emplace(request.blocks[i], now);
      const Seen& before = at->second;
      if (fresh || (before.follows == now.follows && before.id == now.id)) continue;
      return Error{Code::kInvalidArgument,
                   "hash_id " + std::to_string(request.blocks[i]) + " " + Text(now) +
                       " here, and " + Text(before) + " in line " + std::to_string(before.line) +
                       "; an id must stand for all tokens up to the end of its block"};
    }
    return {};
  }

 private:
  struct Seen {
    bool follows = false;
    uint64_t id = 0, line = 0;
  };
  static std::string Text(const Seen& s) {
    return s.follows ? "follows " + std::to_string(s.id) : std::string("begins a prompt");
  }
  std::unordered_map<uint64_t, Seen> seen_;
};

}  // namespace

uint64_t RequestLog::input_tokens() const {
  uint64_t sum = 0;
  for (const Request& r : requests) sum += r.input_tokens;
  return sum;
}

Result<RequestLog> ReadRequestLog(std::istream& in, const std::string& name,
                                  uint32_t block_tokens) {
  RequestLog log;
  log.name = name;
  log.block_tokens = block_tokens;
  std::string line;
  double first = 0;
  Chains chains;
  for (uint64_t n = 1; std::getline(in, line); ++n) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = name + ":" + std::to_string(n) + ": ";
    auto request = ParseRequest(line, block_tokens);
    if (!request.ok()) return Error{Code::kInvalidArgument, where + request.error().message};
    const Status chained = chains.Add(*request, n);
    if (!chained.ok()) return Error{Code::kInvalidArgument, where + chained.error().message};
    if (log.requests.empty()) first = request->seconds;
    request->seconds -= first;
    if (!log.requests.empty() && request->seconds < log.requests.back().seconds) {
      return Error{Code::kInvalidArgument,
                   where + "is earlier than the line before it; sort the log by timestamp"};
    }
    log.requests.push_back(*std::move(request));
  }
  if (log.requests.empty()) {
    return Error{Code::kInvalidArgument, name + " has no request in it"};
  }
  return log;
}

Result<RequestLog> ReadRequestLog(const std::filesystem::path& file, uint32_t block_tokens) {
  std::ifstream in(file, std::ios::binary);
  if (!in || std::filesystem::is_directory(file)) {
    return Error{Code::kNotFound, "cannot read the log '" + file.string() + "'"};
  }
  return ReadRequestLog(in, file.filename().string(), block_tokens);
}

RequestLog ZipfRequests(const ZipfSpec& spec, uint32_t block_tokens) {
  RequestLog log;
  log.name = "Zipf model";
  log.block_tokens = block_tokens;
  std::mt19937_64 rng(spec.seed);
  std::uniform_real_distribution<double> factor(-std::log(4.0), std::log(4.0));
  std::vector<double> weights(spec.documents);
  std::vector<uint32_t> blocks(spec.documents);
  for (uint32_t d = 0; d < spec.documents; ++d) {
    weights[d] = std::pow(d + 1.0, -spec.exponent);
    blocks[d] = static_cast<uint32_t>(
        std::max(1.0, std::round(spec.tokens * std::exp(factor(rng)) / block_tokens)));
  }
  std::discrete_distribution<uint32_t> choose(weights.begin(), weights.end());
  std::exponential_distribution<double> pause(spec.requests_per_second);
  double now = 0;
  uint64_t fresh = uint64_t{1} << 62;  // ids of questions
  for (uint32_t i = 0; i < spec.requests; ++i) {
    const uint32_t document = choose(rng);
    Request r;
    r.seconds = now;
    now += pause(rng);
    r.output_tokens = spec.output_tokens;
    r.input_tokens = blocks[document] * block_tokens + spec.question_tokens;
    for (uint32_t b = 0; b < blocks[document]; ++b) {
      r.blocks.push_back((uint64_t{document} << 24) + b);
    }
    for (uint32_t t = 0; t < spec.question_tokens; t += block_tokens) r.blocks.push_back(fresh++);
    log.requests.push_back(std::move(r));
  }
  return log;
}

}  // namespace prefixd::bench
