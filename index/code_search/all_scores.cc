#include "index/code_search/all_scores.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "index/codes/code_scan.h"
#include "index/search/search_request.h"

namespace prefixd::index {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr size_t kSummedKeys = 32;  // candidates whose masses are added before they are looked at

// The scores of all keys of `part` that have one, to their tokens' places in out [heads][range].
void PutByCodes(const CodeScores& part, TokenRange range, uint32_t heads, std::span<float> out) {
  std::array<uint32_t, kCodeBlockKeys> place, at;
  std::array<float, kCodeBlockKeys> score;
  for (size_t first = 0; first < part.n; first += kCodeBlockKeys) {
    const size_t block = part.first_block + part.blocks[first / kCodeBlockKeys];
    const uint16_t* tokens = part.codes->tokens + block * kCodeBlockKeys;
    const auto window = static_cast<uint32_t>(block / kWindowBlocks * kWindowKeys);
    uint32_t some = 0;
    for (uint32_t i = 0; i < kCodeBlockKeys; ++i) {
      place[some] = i;
      at[some] = part.first_token + window + tokens[i] - range.begin;
      some += part.values[first + i] != kNoScore;  // of one head: of all
    }
    for (uint32_t g = 0; g < heads; ++g) {
      const int16_t* values = part.values + g * part.ld + first;
      float* of_head = out.data() + size_t{g} * range.size();
      const float mul = part.queries->mul[g], add = part.queries->add[g];
      for (uint32_t i = 0; i < kCodeBlockKeys; ++i) score[i] = mul * float(values[i]) + add;
      for (uint32_t i = 0; part.softcap > 0 && i < kCodeBlockKeys; ++i) {
        score[i] = part.softcap * std::tanh(score[i] / part.softcap);
      }
      for (uint32_t j = 0; j < some; ++j) of_head[at[j]] = score[place[j]];
    }
  }
}

// One head's scores, and how its mass is spread over them.
class Masses {
 public:
  explicit Masses(std::span<const float> scores)
      : scores_(scores), top_(CodeScan().largest_float(scores.data(), scores.size())) {
    if (top_ == -kInf) return;
    for (size_t at = 0; at < scores.size(); at += kSummedKeys) {
      const size_t n = std::min(kSummedKeys, scores.size() - at);
      runs_.push_back(CodeScan().exp_total(scores.data() + at, n, -top_));
      total_ += runs_.back();
    }
  }
  bool none() const { return runs_.empty(); }
  // Of candidate i, of the whole.
  double share(size_t i) const { return none() ? 0 : std::exp(double{scores_[i]} - top_) / total_; }

  // The candidates where the cumulated mass passes the middles of n equal parts of it: no two
  // draws come from one part.
  void Draw(size_t n, std::vector<uint32_t>& out) const {
    double before = 0;  // this run
    size_t drawn = 0;
    for (size_t r = 0; r < runs_.size() && drawn < n; before += runs_[r], ++r) {
      double cumulated = before;
      const size_t begin = r * kSummedKeys, end = std::min(begin + kSummedKeys, scores_.size());
      for (size_t i = begin; i < end && Middle(drawn, n) < before + runs_[r]; ++i) {
        cumulated += std::exp(double{scores_[i]} - top_);
        for (; drawn < n && Middle(drawn, n) < cumulated; ++drawn) {
          out.push_back(static_cast<uint32_t>(i));
        }
      }
    }
  }

 private:
  double Middle(size_t drawn, size_t n) const { return (double(drawn) + 0.5) / double(n) * total_; }

  std::span<const float> scores_;
  float top_;
  std::vector<double> runs_;
  double total_ = 0;
};

// log of the mean of exp(e) over each head's mass, from `drawn` (ascending, repeated as often as
// drawn) as if from the mean of all heads' distributions; `exact` [G][tokens.size()] are the true
// scores of those drawn, `tokens` without repetition.
std::vector<double> Shortfalls(std::span<const Masses> heads, std::span<const float> by_codes,
                               size_t n, std::span<const uint32_t> drawn,
                               std::span<const uint32_t> tokens, std::span<const float> exact) {
  std::vector<double> mean(tokens.size()), times(tokens.size());
  for (size_t j = 0, d = 0; j < tokens.size(); ++j) {
    for (const Masses& head : heads) mean[j] += head.share(tokens[j]) / double(heads.size());
    for (; d < drawn.size() && drawn[d] == tokens[j]; ++d) ++times[j];
  }
  std::vector<double> out;
  for (size_t g = 0; g < heads.size(); ++g) {
    double weights = 0, sum = 0;
    for (size_t j = 0; j < tokens.size(); ++j) {
      if (!(mean[j] > 0)) continue;
      const double weight = times[j] * heads[g].share(tokens[j]) / mean[j];
      const double error = double{exact[g * tokens.size() + j]} - by_codes[g * n + tokens[j]];
      weights += weight;
      sum += weight * std::exp(error);
    }
    out.push_back(sum > 0 && std::isfinite(sum) ? std::log(sum / weights) : 0);
  }
  return out;
}

}  // namespace

Result<size_t> ScoresByCodes(const SearchRequest& request, std::span<const CodeScores> parts,
                             std::span<const uint32_t> exact) {
  const size_t n = request.candidates.size();
  const uint32_t begin = request.candidates.begin;
  std::vector<float>& scores = *request.scores;
  scores.resize(request.group * n);
  for (const CodeScores& part : parts) PutByCodes(part, request.candidates, request.group, scores);
  std::vector<uint32_t> drawn;  // candidates
  std::vector<Masses> heads;
  for (uint32_t g = 0; g < request.group; ++g) {
    float* out = scores.data() + g * n;
    for (const uint32_t token : exact) out[token - begin] = -kInf;
    heads.emplace_back(std::span<const float>(out, n)).Draw(kDrawnKeys, drawn);
  }
  if (drawn.empty()) return 0;
  std::sort(drawn.begin(), drawn.end());
  std::vector<uint32_t> once;
  std::unique_copy(drawn.begin(), drawn.end(), std::back_inserter(once));
  std::vector<uint32_t> tokens(once);
  for (uint32_t& token : tokens) token += begin;
  std::vector<float> truth(request.group * tokens.size());
  PREFIXD_TRY(ScoreTokens(request, tokens, truth, tokens.size()));
  const std::vector<double> missed = Shortfalls(heads, scores, n, drawn, once, truth);
  for (uint32_t g = 0; g < request.group; ++g) {
    const auto by = static_cast<float>(missed[g]);
    for (float& score : std::span(scores).subspan(g * n, n)) score += by;
  }
  return tokens.size();
}

void PutExactScores(const SearchRequest& request, std::span<const uint32_t> tokens,
                    std::span<const float> scores) {
  const size_t n = request.candidates.size();
  for (uint32_t g = 0; g < request.group; ++g) {
    float* out = request.scores->data() + g * n;
    for (size_t j = 0; j < tokens.size(); ++j) {
      out[tokens[j] - request.candidates.begin] = scores[g * tokens.size() + j];
    }
  }
}

}  // namespace prefixd::index
