// Reads logs of requests, one JSON object a line, as Mooncake publishes them: `timestamp` in
// milliseconds, `input_length` and `output_length` in tokens, `hash_ids` of the blocks of the
// prompt, where equal ids mean an equal beginning up to there. And makes such requests up.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <istream>
#include <string>
#include <vector>

#include "prefixd/result.h"

namespace prefixd::bench {

struct Request {
  double seconds = 0;  // since the first one
  uint32_t input_tokens = 0, output_tokens = 0;
  std::vector<uint64_t> blocks;  // ids; the last block may be shorter than the others
};

struct RequestLog {
  std::string name;
  uint32_t block_tokens = 512;
  std::vector<Request> requests;  // ascending in time
  uint64_t input_tokens() const;
  double seconds() const { return requests.empty() ? 0 : requests.back().seconds; }
};

// kInvalidArgument names the line and what is wrong in it: no JSON, a field that is missing, of
// another type or out of bounds, ids that do not cover the length in blocks of `block_tokens` or
// follow another id than before, requests that go back in time; or that there is no request at all.
Result<RequestLog> ReadRequestLog(std::istream& in, const std::string& name, uint32_t block_tokens);
Result<RequestLog> ReadRequestLog(const std::filesystem::path& file, uint32_t block_tokens);

// Requests for documents by Zipf's law: document i of `documents` is asked for in proportion to
// 1 / i^exponent. A prompt is the document, with lengths around `tokens` (a factor of 4 to either
// side, evenly in the logarithm), and a question of its own.
struct ZipfSpec {
  uint32_t documents = 1000, requests = 20000;
  double exponent = 1;
  uint32_t tokens = 16384, question_tokens = 512, output_tokens = 256;
  double requests_per_second = 1;
  uint64_t seed = 1;
};
RequestLog ZipfRequests(const ZipfSpec& spec, uint32_t block_tokens);

}  // namespace prefixd::bench
