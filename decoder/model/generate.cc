#include "decoder/model/generate.h"

#include <algorithm>
#include <cmath>

namespace prefixd::decoder {
namespace {

Status CheckLogits(const Model& model, std::span<const float> logits) {
  if (logits.size() != model.config().vocab_size) {
    return InvalidArgument("generate: the logits of exactly one token are needed to begin with");
  }
  return {};
}

}  // namespace

uint32_t Argmax(std::span<const float> logits) {
  return static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double NegativeLogLikelihood(std::span<const float> logits, uint32_t token) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double{logit} - max);
  return max + std::log(sum) - double{logits[token]};
}

Result<std::vector<uint32_t>> GreedyDecode(const Model& model, AttentionBackend& attention,
                                           std::span<const float> logits, uint32_t position,
                                           const GreedyOptions& options) {
  PREFIXD_TRY(CheckLogits(model, logits));
  std::vector<float> current(logits.begin(), logits.end());
  std::vector<uint32_t> out;
  while (out.size() < options.max_tokens) {
    const uint32_t token = Argmax(current);
    if (std::find(options.stop.begin(), options.stop.end(), token) != options.stop.end()) break;
    out.push_back(token);
    if (options.on_token && !options.on_token(token)) break;
    if (out.size() == options.max_tokens) break;
    PREFIXD_TRY(model.Forward({&token, 1}, position++, attention, 1, current));
  }
  return out;
}

Result<std::vector<double>> ContinuationNll(const Model& model, AttentionBackend& attention,
                                            std::span<const float> logits, uint32_t position,
                                            std::span<const uint32_t> continuation,
                                            uint32_t block) {
  PREFIXD_TRY(CheckLogits(model, logits));
  const uint32_t vocab = model.config().vocab_size;
  for (const uint32_t token : continuation) {
    if (token >= vocab) return InvalidArgument("generate: a token is outside the vocabulary");
  }
  std::vector<double> nll;
  if (continuation.empty()) return nll;
  nll.push_back(NegativeLogLikelihood(logits, continuation[0]));
  const auto inputs = continuation.first(continuation.size() - 1);
  std::vector<float> buffer;
  for (size_t begin = 0; begin < inputs.size();) {
    const size_t n = std::min<size_t>(std::max(block, 1u), inputs.size() - begin);
    buffer.resize(n * vocab);
    PREFIXD_TRY(model.Forward(inputs.subspan(begin, n), position + static_cast<uint32_t>(begin),
                              attention, static_cast<uint32_t>(n), buffer));
    for (size_t i = 0; i < n; ++i) {
      const auto row = std::span<const float>(buffer).subspan(i * vocab, vocab);
      nll.push_back(NegativeLogLikelihood(row, continuation[begin + i + 1]));
    }
    begin += n;
  }
  return nll;
}

}  // namespace prefixd::decoder
