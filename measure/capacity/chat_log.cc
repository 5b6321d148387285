#include "measure/capacity/chat_log.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

namespace prefixd::bench {
namespace {

class Chats {
 public:
  Chats(const ChatSpec& spec, uint32_t block_tokens) : s_(spec), rng_(spec.seed) {
    log_.block_tokens = block_tokens;
  }

  RequestLog Run() {
    const double turns = 1 / (1 - s_.another_turn), end = s_.hours * 3600;
    // Chats that began before the log: it does not begin with first turns alone.
    const double before = 4 * s_.median_pause_seconds * std::exp(s_.pause_sigma);
    std::exponential_distribution<double> until_next(s_.requests_per_hour / 3600 / turns);
    for (double t = until_next(rng_) - before; t < end; t += until_next(rng_)) Chat(t, end);
    std::ranges::stable_sort(log_.requests, {}, &Request::seconds);
    return std::move(log_);
  }

 private:
  double Even(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(rng_);
  }
  double LogNormal(double median, double sigma) {
    return median * std::exp(std::normal_distribution<double>(0, sigma)(rng_));
  }

  void Chat(double now, double end) {
    double tokens = Even(0, 1) < s_.short_share
                        ? Even(900, 1200)
                        : std::max(900.0, LogNormal(s_.median_tokens, s_.tokens_sigma));
    std::vector<uint64_t> blocks = {0};  // the beginning that all have
    while (now < end && tokens <= s_.most_tokens) {
      Request r;
      r.seconds = now;
      r.input_tokens = static_cast<uint32_t>(tokens);
      r.output_tokens = static_cast<uint32_t>(s_.output_tokens * Even(0.5, 1.5));
      const size_t n = (r.input_tokens + log_.block_tokens - 1) / log_.block_tokens;
      while (blocks.size() < n) blocks.push_back(next_id_++);
      r.blocks = blocks;
      // A block that the next turn fills is another one.
      blocks.resize(std::max<size_t>(1, r.input_tokens / log_.block_tokens));
      tokens += r.output_tokens;
      if (now >= 0) log_.requests.push_back(std::move(r));
      if (Even(0, 1) >= s_.another_turn) return;
      tokens += Even(0, 1) < s_.document_share
                    ? LogNormal(s_.median_document_tokens, s_.document_sigma)
                    : Even(20, 240);
      now += LogNormal(s_.median_pause_seconds, s_.pause_sigma);
    }
  }

  const ChatSpec& s_;
  std::mt19937_64 rng_;
  RequestLog log_;
  uint64_t next_id_ = 1;
};

}  // namespace

RequestLog ChatRequests(const ChatSpec& spec, uint32_t block_tokens) {
  RequestLog log = Chats(spec, block_tokens).Run();
  log.name = "chats as in Mooncake's log";
  if (log.requests.empty()) return log;
  const double first = log.requests.front().seconds;
  for (Request& r : log.requests) r.seconds -= first;
  return log;
}

}  // namespace prefixd::bench
