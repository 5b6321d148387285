#include <algorithm>
#include <cmath>

#include "measure/break_even/run.h"
#include "measure/page/text.h"
#include "measure/timing/other_work.h"

namespace prefixd::bench {
namespace {

std::string WithSpread(const Spread& s) {
  const int digits = s.median < 0.995 ? 3 : s.median < 99.5 ? 2 : 0;
  return Fixed(s.median, digits) + " [" + Fixed(s.low, digits) + ", " + Fixed(s.high, digits) + "]";
}

std::string Gamma(const std::optional<double>& gamma) {
  return gamma ? Fixed(*gamma, 2) : ">" + Fixed(TradeOff::kMaxGamma, 0);
}

TextTable TimesTable(const TierOutcome& tier) {
  TextTable rows = {
      {"method", "K", "select ms", "load ms", "compute ms", "of it estimate", "wall ms"}};
  for (const TopKPoint& p : tier.topk) {
    rows.push_back({"Top-K at " + Percent(p.gamma / 100.0), std::to_string(p.k),
                    WithSpread(p.ms.select), WithSpread(p.ms.load), WithSpread(p.ms.compute), "-",
                    WithSpread(p.ms.wall)});
  }
  for (const CompletionPoint& p : tier.completion) {
    rows.push_back({"1% + " + p.name, std::to_string(tier.topk.front().k), WithSpread(p.ms.select),
                    WithSpread(p.ms.load), WithSpread(p.ms.compute), WithSpread(p.estimate),
                    WithSpread(p.ms.wall)});
  }
  return rows;
}

TextTable EvenTable(const LengthOutcome& length, const TierOutcome& tier) {
  TextTable rows = {{"estimate", "selection"}};
  for (const double xi : kMapXis) rows[0].push_back("xi " + Short(xi));
  const TradeOff map = MapOf(length, tier);
  for (const CompletionPoint& p : tier.completion) {
    for (const bool with : {false, true}) {
      std::vector<std::string> row = {p.name, with ? "with" : "without"};
      for (const double xi : kMapXis) {
        row.push_back(Gamma(map.BreakEvenGamma(CompletedOf(tier, p), xi, 1, with)));
      }
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

std::string AtPercent(const std::optional<double>& gamma) {
  return gamma ? "at " + Percent(*gamma / 100) : "at more than 10%";
}

std::string EvenSentence(const LengthOutcome& length, const TierOutcome& tier) {
  const CompletionPoint* best = BestCompletion(tier);
  const TradeOff map = MapOf(length, tier);
  const CompletedTimes done = CompletedOf(tier, *best);
  const auto without = map.BreakEvenGamma(done, 1, 1, false);
  const auto with = map.BreakEvenGamma(done, 1, 1, true);
  std::string out = "With " + tier.name + ", reading 1% of " + Tokens(length.tokens) +
                    " and estimating the rest (" + best->name + ") costs as much as Top-K " +
                    AtPercent(with) + " (" + AtPercent(without) + " with selection left out)";
  if (!with) return out + ": here the estimate costs more than it saves.";
  if (*with <= 1) return out + ": the estimate costs nothing that can be measured.";
  return out + (*with <= kPaperGamma
                    ? ": it pays where Top-K would have to read 1.8 times as much to be as good, "
                      "as in the paper."
                    : ": it pays only where Top-K would have to read " + Fixed(*with, 1) +
                          " times as much to be as good.");
}

std::string RestoreSentence(const BreakEvenOutcome& outcome, const LengthOutcome& length,
                            const TierOutcome& tier) {
  const double restore = tier.restore_ms.median / 1e3;
  const double prefill = outcome.PrefillSeconds(length.tokens);
  std::string out =
      "Restoring " + Tokens(length.tokens) + " with " + tier.name + " takes " + Seconds(restore);
  if (prefill <= 0 || restore <= 0 || !outcome.ComparesPrefill(tier)) return out + ".";
  out += ", computing them " + Seconds(prefill) +
         (outcome.prefill_tokens_per_second > 0
              ? " at the given rate"
              : " at this processor's rate of matrix products (" + Flops(outcome.gemm_flops) + ")");
  out += restore <= prefill ? ": restoring is " + Times(prefill / restore) + " times faster"
                            : ": restoring is " + Times(restore / prefill) + " times slower";
  return out + ", and an engine that computes " + Thousands(length.tokens / restore) +
         " tokens a second is as fast.";
}

std::string AnswerSentence(const BreakEvenOutcome& outcome, const LengthOutcome& length,
                           const TierOutcome& tier) {
  const std::vector<Way> ways = WaysOf(outcome, length, tier);
  const auto restored =
      std::ranges::find_if(ways, [](const Way& w) { return w.name.rfind("restore", 0) == 0; });
  const Way& completed = ways.front();
  std::string out = "With " + tier.name + ", a token of an answer over " + Tokens(length.tokens) +
                    " waits " + Seconds(completed.token_ms / 1e3) +
                    " for attention by 1% and an estimate";
  if (restored == ways.end()) return out + ".";
  out += ", and " + Seconds(restored->token_ms / 1e3) + " by full attention over restored rows";
  if (completed.token_ms == restored->token_ms) {
    return out + (completed.once_ms <= restored->once_ms
                      ? ": attaching is ahead of restoring from the first token."
                      : ": restoring is better throughout.");
  }
  if (completed.token_ms < restored->token_ms) {
    const auto tokens = BreakEvenTokens(completed, *restored);
    if (tokens && *tokens <= 0)
      return out + ": attaching is ahead of restoring from the first token.";
    const double until = std::ceil(*tokens);
    return out + ": attaching is ahead of restoring once " + Thousands(until) +
           (until == 1 ? " token is generated." : " tokens are generated.");
  }
  const double lead = restored->once_ms - completed.once_ms;
  const double until = lead / (completed.token_ms - restored->token_ms);
  if (until <= 0) return out + ": restoring is better throughout.";
  return out + ": attaching is ahead up to " + Thousands(std::floor(until)) +
         " generated tokens, restoring beyond.";
}

TextTable WaysTable(const BreakEvenOutcome& outcome, const LengthOutcome& length,
                    const std::vector<const TierOutcome*>& tiers) {
  TextTable ways = {{"way", "before the first token", "each token", "1,000 tokens"}};
  for (const TierOutcome* tier : tiers) {
    for (const Way& way : WaysOf(outcome, length, *tier)) {
      const bool shared = way.name.rfind("compute", 0) == 0;
      if (shared && tier != tiers.back()) continue;
      ways.push_back({way.name + (shared ? "" : ", " + tier->name), Seconds(way.once_ms / 1e3),
                      Seconds(way.token_ms / 1e3), Seconds(way.total_ms(1000) / 1e3)});
    }
  }
  return ways;
}

}  // namespace

std::vector<std::pair<std::string, TextTable>> BreakEvenTables(const BreakEvenOutcome& outcome) {
  std::vector<std::pair<std::string, TextTable>> tables;
  for (const LengthOutcome& length : outcome.lengths) {
    for (const TierOutcome& tier : length.tiers) {
      const std::string where = Tokens(length.tokens) + ", " + tier.name;
      tables.emplace_back(where + ": per generated token, all layers, median [quartiles]",
                          TimesTable(tier));
      tables.emplace_back(where +
                              ": 1% with an estimate is as fast as Top-K at so many %, reads xi "
                              "times slower than measured here",
                          EvenTable(length, tier));
    }
    for (const auto& tiers : ByBackend(length)) {
      tables.emplace_back(Tokens(length.tokens) + ": attention of a whole answer, on " +
                              BackendName(*tiers.front()),
                          WaysTable(outcome, length, tiers));
    }
  }
  return tables;
}

std::vector<std::string> BreakEvenVerdict(const BreakEvenOutcome& outcome) {
  std::vector<std::string> verdict;
  if (!outcome.medium.disk) verdict.push_back(outcome.medium.sentence);
  for (const LengthOutcome& length : outcome.lengths) {
    for (const TierOutcome& tier : length.tiers) verdict.push_back(EvenSentence(length, tier));
    for (const TierOutcome& tier : length.tiers) {
      verdict.push_back(RestoreSentence(outcome, length, tier));
    }
    for (const TierOutcome& tier : length.tiers) {
      verdict.push_back(AnswerSentence(outcome, length, tier));
    }
  }
  verdict.push_back(
      "What an estimate spares in errors is a matter of the model and is not measured here "
      "(see Quality in prefixd's documentation).");
  const std::string disturbed = DisturbedBy(outcome.other_work);
  if (!disturbed.empty()) verdict.push_back(disturbed);
  return verdict;
}

}  // namespace prefixd::bench
