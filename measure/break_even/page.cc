#include <algorithm>
#include <cmath>

#include "measure/break_even/run.h"
#include "measure/page/text.h"

namespace prefixd::bench {
namespace {

constexpr const char* kDashes[] = {"", "9 4", "5 4", "2 4"};

// The contour of one share c: only its part inside the map.
Series Contour(const TradeOff& map, const CompletedTimes& done, double c, bool with) {
  Series series;
  for (const double xi : LogSteps(TradeOff::kMaxXi, 61)) {
    const auto gamma = map.BreakEvenGamma(done, xi, c, with);
    if (gamma) series.points.emplace_back(xi, *gamma);
  }
  return series;
}

std::vector<Cell> Ground(const TradeOff& map, const CompletedTimes& done, bool with) {
  std::vector<Cell> cells;
  constexpr int kAcross = 30, kUp = 24;
  const std::vector<double> xis = LogSteps(TradeOff::kMaxXi, kAcross + 1);
  for (int i = 0; i < kAcross; ++i) {
    for (int j = 0; j < kUp; ++j) {
      const double step = (TradeOff::kMaxGamma - 1) / kUp;
      const double g = 1 + step * j;
      const double speedup =
          map.Speedup(done, std::sqrt(xis[i] * xis[i + 1]), g + step / 2, 1, with);
      cells.push_back({xis[i], xis[i + 1], g, g + step, std::log2(std::max(speedup, 1e-3)) / 2});
    }
  }
  return cells;
}

const CompletionPoint* Named(const TierOutcome& tier, const std::string& name) {
  for (const CompletionPoint& p : tier.completion) {
    if (p.name == name) return &p;
  }
  return nullptr;
}

// Of one backend, whose tiers begin with rows in host memory.
Plot MapPlot(const LengthOutcome& length, const std::vector<const TierOutcome*>& tiers, bool with) {
  const TierOutcome& base = *tiers.front();
  const TradeOff map = MapOf(length, base);
  Plot plot;
  plot.title = "Trade-off map, " + Tokens(length.tokens) + ", steps on " + BackendName(base) +
               (with ? ", with selection" : ", selection left out as in the paper");
  plot.x = {"xi: how many times slower reads are than from " + std::string("host memory"), 1,
            TradeOff::kMaxXi, true};
  plot.y = {"gamma: how many times 1% Top-K reads", 1, TradeOff::kMaxGamma, false};
  for (const auto& [name, colour] : {std::pair{"moment", 0}, {"phi stored", 2}}) {
    const CompletionPoint* p = Named(base, name);
    if (p == nullptr) continue;
    Series s = Contour(map, CompletedOf(base, *p), 1, with);
    s.name = std::string(name) + ", as measured";
    s.colour = colour;
    plot.series.push_back(std::move(s));
  }
  const CompletionPoint* phi = Named(base, "phi recomputed");
  for (size_t i = 0; phi != nullptr && i < std::size(kContourShares); ++i) {
    const double c = kContourShares[i];
    Series s = Contour(map, CompletedOf(base, *phi), c, with);
    s.name = "phi, c = " + Short(c) + (c == 1 ? " (recomputed, as measured)" : "");
    s.colour = 3;
    s.dash = kDashes[i];
    plot.series.push_back(std::move(s));
  }
  const CompletionPoint* best = BestCompletion(base);
  plot.cells = Ground(map, CompletedOf(base, *best), with);
  plot.first_ground = "1% with an estimate (" + best->name + ") is faster";
  plot.second_ground = "Top-K is faster";
  for (const TierOutcome* tier : tiers) {
    plot.marks.push_back(
        {std::max(1.0, XiOf(length, *tier)), tier->name + ": xi = " + Short(XiOf(length, *tier))});
  }
  plot.caption =
      "Above a line, reading 1% and estimating the rest is faster than Top-K that reads gamma "
      "times "
      "1%; below it, slower. c is the share of the measured time that the estimate takes. The "
      "marks "
      "are this machine's tiers.";
  return plot;
}

Plot AnswerPlot(const BreakEvenOutcome& outcome, const LengthOutcome& length,
                const TierOutcome& tier) {
  Plot plot;
  plot.title = "A whole answer over " + Tokens(length.tokens) + ", " + tier.name;
  plot.x = {"generated tokens", 1, 10000, true};
  plot.y.label = "seconds of waiting, in total";
  plot.y.logarithmic = true;
  const std::vector<Way> ways = WaysOf(outcome, length, tier);
  double low = 1e30, high = 0;
  static constexpr int kColours[] = {0, 1, 2, 4};
  for (size_t i = 0; i < ways.size(); ++i) {
    Series s;
    s.name = ways[i].name;
    s.colour = kColours[i % std::size(kColours)];
    s.dash = kDashes[i % std::size(kDashes)];
    for (const double n : LogSteps(10000, 33)) {
      const double y = std::max(1e-6, ways[i].total_ms(n) / 1e3);
      s.points.emplace_back(n, y);
      low = std::min(low, y);
      high = std::max(high, y);
    }
    plot.series.push_back(std::move(s));
  }
  plot.y.low = low;
  plot.y.high = high;
  plot.caption =
      "What comes before the first token (attaching with its summaries, restoring, or computing "
      "the "
      "prompt) and attention over the prompt for each token; the rest of the model is the same for "
      "all. Restored rows are attended to in the engine's own arrays" +
      std::string(tier.compute == "cpu" ? "." : ", here by prefixd's own steps on the device.");
  return plot;
}

Plot SweepPlot(const LengthOutcome& length, const TierOutcome& tier) {
  Plot plot;
  plot.title = "What a token costs by what is read, " + Tokens(length.tokens) + ", " + tier.name;
  plot.x = {"tokens read (K)", double(tier.topk.front().k), double(tier.topk.back().k), true};
  plot.y = {"ms of thread time per token", 0, 0, false};
  static constexpr std::pair<const char*, Spread TokenMs::*> kParts[] = {
      {"select", &TokenMs::select}, {"load", &TokenMs::load}, {"compute", &TokenMs::compute}};
  int colour = 0;
  for (const auto& [name, part] : kParts) {
    Series s;
    s.name = name;
    s.colour = colour++;
    s.dots = true;
    for (const TopKPoint& p : tier.topk) {
      s.points.emplace_back(p.k, (p.ms.*part).median);
      plot.y.high = std::max(plot.y.high, (p.ms.*part).median);
    }
    plot.series.push_back(std::move(s));
  }
  plot.caption = "Top-K, medians. Estimates add to compute: the table has them.";
  return plot;
}

}  // namespace

HtmlPage BreakEvenPage(const BreakEvenOutcome& outcome,
                       const std::vector<std::pair<std::string, std::string>>& machine) {
  const ModelShape& m = outcome.model;
  HtmlPage page("Does completion pay here?",
                m.name + ": " + std::to_string(m.n_layers) + " layers, " +
                    std::to_string(m.n_q_heads) + " query heads, " + std::to_string(m.n_kv_heads) +
                    " KV heads of " + std::to_string(m.head_dim) + ", " +
                    std::string(DTypeName(m.dtype)) + "; measured by prefixctl bench break-even");
  page.Verdict(BreakEvenVerdict(outcome));
  for (const LengthOutcome& length : outcome.lengths) {
    page.Section(Tokens(length.tokens));
    page.Paragraph(std::to_string(length.layers) + " of " + std::to_string(m.n_layers) +
                   " layers were measured" +
                   (length.layers < m.n_layers ? ", and their times scaled to all" : "") + "; " +
                   std::to_string(outcome.steps) + " tokens for each point. 1% are " +
                   std::to_string(length.k_phi) + " tokens for each layer and KV head.");
    for (const auto& tiers : ByBackend(length)) {
      for (const bool with : {false, true}) page.Figure(MapPlot(length, tiers, with));
    }
    for (const TierOutcome& tier : length.tiers) page.Figure(AnswerPlot(outcome, length, tier));
    for (const TierOutcome& tier : length.tiers) page.Figure(SweepPlot(length, tier));
  }
  page.Section("Figures");
  for (const auto& [title, table] : BreakEvenTables(outcome)) page.Table(title, table);
  if (!outcome.skipped.empty()) {
    page.Section("Left out");
    page.List(outcome.skipped);
  }
  page.Section("Machine");
  page.Facts(machine);
  return page;
}

}  // namespace prefixd::bench
