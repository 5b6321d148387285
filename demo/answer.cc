#include "demo/answer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "decoder/model/generate.h"
#include "demo/events.h"

namespace prefixd::demo {
namespace {

constexpr size_t kKeptLogits = 512;

TopLogits LargestOf(std::span<const float> logits) {
  std::vector<uint32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0u);
  const auto end = ids.begin() + static_cast<ptrdiff_t>(std::min(kKeptLogits, ids.size()));
  std::partial_sort(ids.begin(), end, ids.end(),
                    [&](uint32_t a, uint32_t b) { return logits[a] > logits[b]; });
  TopLogits top;
  for (auto id = ids.begin(); id != end; ++id) top.emplace_back(*id, logits[*id]);
  return top;
}

}  // namespace

Result<Answer> AnswerQuestion(const decoder::Model& model, decoder::AttentionBackend& attention,
                              std::span<const float> logits, uint32_t position,
                              const AnswerOptions& options) {
  const std::vector<uint32_t>& stop = model.config().eos;
  const auto budget = options.reading.budget ? nlohmann::json(*options.reading.budget) : nullptr;
  const auto start = std::chrono::steady_clock::now();
  std::vector<float> current(logits.begin(), logits.end());
  Answer answer;
  while (true) {
    const uint32_t token = decoder::Argmax(current);
    if (options.keep_logits) answer.logits.push_back(LargestOf(current));
    if (std::find(stop.begin(), stop.end(), token) != stop.end()) break;
    answer.tokens.push_back(token);
    Emit({{"event", "token"},
          {"question", options.question},
          {"method", options.reading.method},
          {"budget", budget},
          {"token", token}});
    if (answer.tokens.size() >= options.tokens) break;
    PREFIXD_TRY(model.Forward({&token, 1}, position++, attention, 1, current));
  }
  answer.seconds = SecondsSince(start);
  return answer;
}

double MaxLogitDifference(const TopLogits& a, const TopLogits& b) {
  const std::map<uint32_t, float> of_b(b.begin(), b.end());
  double largest = 0;
  for (const auto& [token, logit] : a) {
    const auto other = of_b.find(token);
    if (other == of_b.end()) continue;
    largest = std::max<double>(largest, std::abs(logit - other->second));
  }
  return largest;
}

}  // namespace prefixd::demo
