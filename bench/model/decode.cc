#include "bench/model/decode.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "bench/model/timed_attention.h"
#include "decoder/model/generate.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

double Mean(std::span<const double> values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return sum / double(values.size());
}

Status Round(const decoder::Model& model, const DecodeOptions& o, bool counts, DecodeSide& side) {
  TimedAttention timed(*side.attention, o.n_tokens - o.position);
  std::vector<float> logits(model.config().vocab_size);
  const Ledger before = side.spent ? side.spent() : Ledger{};
  std::vector<double> token_ms, inside_ms;
  for (uint32_t i = 0; i < o.tokens.size(); ++i) {
    const auto begun = Clock::now();
    PREFIXD_TRY(model.Forward({&o.tokens[i], 1}, o.position + i, timed, 1, logits));
    token_ms.push_back(1e3 * std::chrono::duration<double>(Clock::now() - begun).count());
    inside_ms.push_back(1e3 * timed.Take());
  }
  side.rewind();
  if (!counts) return {};
  side.token_ms.insert(side.token_ms.end(), token_ms.begin(), token_ms.end());
  side.inside_ms.insert(side.inside_ms.end(), inside_ms.begin(), inside_ms.end());
  side.round_ms.push_back(Mean(token_ms));
  side.round_inside_ms.push_back(Mean(inside_ms));
  if (!side.spent) return {};
  const Ledger after = side.spent();
  const double each = 1e-6 / double(o.tokens.size() * o.rounds);
  side.select_ms += each * double(after.select_ns - before.select_ns);
  side.read_ms += each * double(after.read_ns - before.read_ns);
  side.compute_ms += each * double(after.compute_ns - before.compute_ns);
  return {};
}

}  // namespace

Status Decode(const decoder::Model& model, const DecodeOptions& options,
              std::span<DecodeSide> sides) {
  for (uint32_t round = 0; round <= options.rounds; ++round) {
    for (DecodeSide& side : sides) PREFIXD_TRY(Round(model, options, round > 0, side));
  }
  return {};
}

Spread Ratio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) ratios.push_back(a[i] / b[i]);
  return Summarise(std::move(ratios));
}

Result<Greedy> GreedyText(const decoder::Model& model, decoder::AttentionBackend& attention,
                          uint32_t last_token, uint32_t position, uint32_t n_tokens) {
  Greedy out;
  std::vector<float> logits(model.config().vocab_size);
  for (uint32_t token = last_token; out.tokens.size() < n_tokens; ++position) {
    PREFIXD_TRY(model.Forward({&token, 1}, position, attention, 1, logits));
    token = decoder::Argmax(logits);
    out.tokens.push_back(token);
    out.logits.push_back(logits);
  }
  return out;
}

Agreement Compare(const Greedy& own, const Greedy& other) {
  Agreement out;
  out.of = static_cast<uint32_t>(own.tokens.size());
  for (; out.equal < out.of && own.tokens[out.equal] == other.tokens[out.equal]; ++out.equal) {
    for (size_t i = 0; i < own.logits[out.equal].size(); ++i) {
      const double difference =
          std::abs(double{own.logits[out.equal][i]} - double{other.logits[out.equal][i]});
      out.max_logit_difference = std::max(out.max_logit_difference, difference);
    }
  }
  if (out.equal < out.of) {
    const std::vector<float>& logits = own.logits[out.equal];
    out.margin = double{logits[own.tokens[out.equal]]} - double{logits[other.tokens[out.equal]]};
  }
  return out;
}

}  // namespace prefixd::bench
