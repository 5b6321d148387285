#include <algorithm>
#include <cmath>

#include "measure/capacity/run.h"
#include "measure/page/text.h"
#include "measure/timing/other_work.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

constexpr double kLengths[] = {1024, 4096, 16384, 65536, 131072, 1048576};

std::string Pays(const std::optional<double>& reuse) {
  if (!reuse) return "never";
  return *reuse < 1 ? Short(*reuse) + " (1 of " + Thousands(std::floor(1 / *reuse)) + ")"
                    : Short(*reuse);
}

TextTable HoldsTable(const CapacityOutcome& o) {
  TextTable rows = {{"tokens", "on the disk", "disk holds", "memory holds"}};
  for (const double n : kLengths) {
    const double disk = n * o.token_bytes_on_disk();
    const double memory = n * double(o.what.model.token_bytes());
    rows.push_back({Thousands(n), GigaBytes(disk), Thousands(std::floor(o.what.disk_bytes / disk)),
                    Thousands(std::floor(o.what.memory_bytes / memory))});
  }
  return rows;
}

TextTable CostTable(const CapacityOutcome& o) {
  const char* restored = o.what.medium.disk ? "restored, SSD" : "restored, page cache";
  TextTable rows = {{"tokens", "computed in", "durable in", "work behind it", restored,
                     "restored, memory", "pays from hits", "with the work behind it"}};
  for (const double n : kLengths) {
    rows.push_back({Thousands(n), Seconds(o.PrefillSeconds(n)), Seconds(o.PutSeconds(n)),
                    Seconds(o.BackgroundSeconds(n)), Seconds(o.SsdSeconds(n)),
                    Seconds(o.HostSeconds(n)), Pays(o.ReuseThatPays(n, false)),
                    Pays(o.ReuseThatPays(n, true))});
  }
  return rows;
}

TextTable ReplayTable(const CapacityOutcome& o) {
  TextTable rows = {
      {"cache", "size", "tokens hit", "requests hit", "written", "hits per token written"}};
  const auto row = [&](const std::string& name, double bytes, const CacheHits& h, bool writes) {
    rows.push_back({name, GigaBytes(bytes), Percent(h.hit_share()),
                    Percent(double(h.requests_hit) / double(h.requests)),
                    writes ? GigaBytes(o.WrittenBytes(h)) : "-",
                    writes ? Fixed(h.reuse(), 2) : "-"});
  };
  row("without bound", double(o.endless.distinct_tokens) * o.token_bytes_on_disk(), o.endless,
      true);
  row("this disk", o.what.disk_bytes, o.disk, true);
  row("host memory alone", o.what.memory_bytes, o.memory, false);
  return rows;
}

// Of all hits of this disk, each at its own length: a long one saves more for each token.
double SavedSeconds(const CapacityOutcome& o) {
  const auto tokens = double(o.disk.hit_tokens);
  return o.PrefillSeconds(tokens, o.disk.hit_squares) - o.SsdSeconds(tokens);
}

// Completes "it pays when ...".
std::string PaysWhen(double reuse) {
  return reuse < 1
             ? "one of " + Thousands(std::floor(1 / reuse)) + " stored prompts is asked for again"
             : "a stored prompt is asked for again " + Short(reuse) + " times";
}

std::vector<std::string> CapacityVerdict(const CapacityOutcome& o) {
  std::vector<std::string> verdict;
  if (!o.what.medium.disk) verdict.push_back(o.what.medium.sentence);
  constexpr double n = 16384;
  const double disk = n * o.token_bytes_on_disk(), memory = n * double(o.what.model.token_bytes());
  verdict.push_back(GigaBytes(o.what.disk_bytes) + " of disk hold " +
                    Thousands(std::floor(o.what.disk_bytes / disk)) +
                    " prompts of 16,384 tokens of " + o.what.model.name + ", " +
                    GigaBytes(o.what.memory_bytes) + " of memory " +
                    Thousands(std::floor(o.what.memory_bytes / memory)) + ".");
  const double prefill = o.PrefillSeconds(n), restore = o.SsdSeconds(n);
  const auto reuse = o.ReuseThatPays(n, false), with_background = o.ReuseThatPays(n, true);
  if (reuse && with_background) {
    verdict.push_back(
        "A hit of such a prompt saves " + Seconds(prefill - restore) + ": computing it takes " +
        Seconds(prefill) + ", restoring it from " +
        (o.what.medium.disk ? std::string("the disk ") : o.what.medium.place + " ") +
        Seconds(restore) + ", from memory " + Seconds(o.HostSeconds(n)) + ". It is durable in " +
        Seconds(o.PutSeconds(n)) + ", which pays when " + PaysWhen(*reuse) +
        ". Summaries, indexes and the order of rows are made behind it in another " +
        Seconds(o.BackgroundSeconds(n)) + " of background work; with that it pays when " +
        PaysWhen(*with_background) + ".");
  } else {
    verdict.push_back("Computing such a prompt takes " + Seconds(prefill) +
                      " and restoring it from this disk " + Seconds(restore) +
                      ": restoring does not pay here; attaching, which reads 1%, may "
                      "(prefixctl bench break-even).");
  }
  const RequestLog& log = o.what.log;
  verdict.push_back("Of the " + Thousands(double(log.input_tokens())) + " tokens of " + log.name +
                    " (" + Thousands(double(log.requests.size())) + " requests in " +
                    Seconds(log.seconds()) + "), a cache without bound hits " +
                    Percent(o.endless.hit_share()) + ", this disk " + Percent(o.disk.hit_share()) +
                    ", memory alone " + Percent(o.memory.hit_share()) + ".");
  const double saved = SavedSeconds(o);
  if (saved > 0) {
    const auto stored = double(o.disk.stored_tokens);
    const double put = o.PutSeconds(stored), all = o.StoreSeconds(stored);
    verdict.push_back(
        "There, storing saves " + Seconds(saved) + " of computing" +
        (put > 0 ? ", " + Short(saved / put) + " times what the puts take, or " +
                       Short(saved / all) + " times with the background's work counted"
                 : "") +
        ", and writes " + GigaBytes(o.WrittenBytes(o.disk)) +
        (log.seconds() > 0 ? " (" + GigaBytes(o.WrittenBytes(o.disk) * 86400 / log.seconds()) +
                                 " a day, with rows that are written again in another order: "
                                 "compare with what the disk is rated for)"
                           : "") +
        ".");
  } else {
    verdict.push_back("For these requests storing saves nothing on this disk.");
  }
  if (o.what.options.prefill_rate <= 0) {
    verdict.push_back("Computing was estimated from this processor's rate of matrix products (" +
                      Flops(o.gemm_flops) +
                      "); --prefill-rate takes what your engine does, and changes all of it.");
  }
  const std::string disturbed = DisturbedBy(o.other_work);
  if (!disturbed.empty()) verdict.push_back(disturbed);
  return verdict;
}

Plot HitsPlot(const CapacityOutcome& o) {
  Plot plot;
  plot.title = "Tokens hit by the size of the cache: " + o.what.log.name;
  plot.x = {"GB on the disk", o.curve.front().bytes / 1e9, o.curve.back().bytes / 1e9, true};
  plot.y = {"% of the prompts' tokens", 0, 100 * o.endless.hit_share(), false};
  static constexpr std::pair<int, const char*> kStyles[] = {
      {1, "6 4"}, {2, "2 4"}, {3, "9 4"}, {5, "5 4"}, {0, ""}};
  for (size_t i = 0; i < std::size(kPolicies); ++i) {
    Series s{PolicyName(kPolicies[i]), {}, kStyles[i].first, kStyles[i].second, true};
    if (kPolicies[i] == Eviction::kScore) s.name += ", as in a store";
    for (const CapacityPoint& p : o.curve) {
      s.points.emplace_back(p.bytes / 1e9, 100 * p.hits[i].hit_share());
      plot.y.high = std::max(plot.y.high, s.points.back().second);
    }
    plot.series.push_back(std::move(s));
  }
  plot.marks = {
      {std::max(o.what.disk_bytes / 1e9, plot.x.low), "this disk: " + GigaBytes(o.what.disk_bytes)},
      {std::max(o.what.memory_bytes / 1e9, plot.x.low),
       "host memory: " + GigaBytes(o.what.memory_bytes)}};
  plot.caption = "Replayed by blocks of " + std::to_string(o.what.log.block_tokens) +
                 " tokens. The right end is a cache without bound.";
  return plot;
}

Plot TimesPlot(const CapacityOutcome& o) {
  Plot plot;
  plot.title = "What a prompt takes by its length";
  plot.x = {"tokens", kLengths[0], kLengths[std::size(kLengths) - 1], true};
  plot.y = {"seconds", 1e300, 0, true};
  using Of = double (CapacityOutcome::*)(double) const;
  const std::string restoring = "restoring it from " + o.what.medium.place;
  const std::tuple<std::string, Of, int, const char*> lines[] = {
      {"computing it", &CapacityOutcome::PrefillSeconds, 4, ""},
      {"storing it, until it is durable", &CapacityOutcome::PutSeconds, 1, "9 4"},
      {"storing it, with what is made behind it", &CapacityOutcome::StoreSeconds, 3, "2 4"},
      {restoring, &CapacityOutcome::SsdSeconds, 0, ""},
      {"restoring it from host memory", &CapacityOutcome::HostSeconds, 2, "5 4"}};
  for (const auto& [name, seconds, colour, dash] : lines) {
    Series s{name, {}, colour, dash, true};
    for (const double n : kLengths) {
      const double y = (o.*seconds)(n);
      if (y <= 0) continue;
      s.points.emplace_back(n, y);
      plot.y.low = std::min(plot.y.low, y);
      plot.y.high = std::max(plot.y.high, y);
    }
    plot.series.push_back(std::move(s));
  }
  plot.caption = "All layers of " + o.what.model.name + ".";
  return plot;
}

Plot ReusePlot(const CapacityOutcome& o) {
  Plot plot;
  plot.title = "From which rate of reuse on storing pays";
  plot.x = {"tokens of the prompt", kLengths[0], kLengths[std::size(kLengths) - 1], true};
  plot.y = {"hits per stored prompt", 1e300, 0, true};
  plot.series = {{"a put takes as long as its hits save", {}, 0, "", true},
                 {"the same, with the work behind it", {}, 3, "2 4", true}};
  for (const double n : kLengths) {
    for (const bool with_background : {false, true}) {
      const auto reuse = o.ReuseThatPays(n, with_background);
      if (reuse) plot.series[with_background].points.emplace_back(n, *reuse);
    }
  }
  Series now{"hits per token written, " + o.what.log.name + " on this disk", {}, 1, "6 4", false};
  if (o.disk.reuse() > 0) {
    for (const double n : {kLengths[0], kLengths[std::size(kLengths) - 1]}) {
      now.points.emplace_back(n, o.disk.reuse());
    }
  }
  plot.series.push_back(std::move(now));
  for (const Series& series : plot.series) {
    for (const auto& [x, y] : series.points) {
      plot.y.low = std::min(plot.y.low, y);
      plot.y.high = std::max(plot.y.high, y);
    }
  }
  if (plot.y.high <= 0) plot.y.low = 0.01, plot.y.high = 1;
  plot.caption = "Above a line storing pays, restored from this disk.";
  return plot;
}

json HitsJson(const CacheHits& h) {
  return {{"requests", h.requests},           {"requests_hit", h.requests_hit},
          {"input_tokens", h.input_tokens},   {"hit_tokens", h.hit_tokens},
          {"stored_tokens", h.stored_tokens}, {"distinct_tokens", h.distinct_tokens},
          {"hit_share", h.hit_share()},       {"reuse", h.reuse()},
          {"hit_squares", h.hit_squares}};
}

json CapacityFigures(const CapacityOutcome& o) {
  const CapacityPlan& what = o.what;
  json out = {{"benchmark", "capacity"},
              {"model", what.model.name},
              {"row_bytes_per_token", what.model.token_bytes()},
              {"stored_per_row_byte", o.stored_per_row_byte},
              {"written_per_row_byte", o.written_per_row_byte},
              {"disk_bytes", what.disk_bytes},
              {"on_disk", what.medium.disk},
              {"other_work_share", o.other_work},
              {"skipped", what.skipped},
              {"memory_bytes", what.memory_bytes},
              {"layers_measured", what.layers},
              {"put_bytes_per_second", o.put_rate},
              {"ingest_seconds_per_row_byte", o.ingest_seconds_per_byte},
              {"recluster_seconds_per_row_byte", o.recluster_seconds_per_byte},
              {"restore_bytes_per_second", {{"ssd", o.ssd_rate}, {"host", o.host_rate}}},
              {"prefill",
               {{"tokens_per_second_given",
                 what.options.prefill_rate > 0 ? json(what.options.prefill_rate) : json()},
                {"gemm_flops_per_second", o.gemm_flops > 0 ? json(o.gemm_flops) : json()}}},
              {"ratios", json::object()},
              {"lengths", json::array()},
              {"replay",
               {{"log", what.log.name},
                {"seconds", what.log.seconds()},
                {"block_tokens", what.log.block_tokens},
                {"endless", HitsJson(o.endless)},
                {"disk", HitsJson(o.disk)},
                {"memory", HitsJson(o.memory)},
                {"saved_seconds", SavedSeconds(o)},
                {"written_bytes", o.WrittenBytes(o.disk)},
                {"curve", json::array()}}}};
  if (o.endless.hit_tokens > 0) {
    out["ratios"]["hit_rate_vs_ideal"] = double(o.disk.hit_tokens) / double(o.endless.hit_tokens);
  }
  for (const double n : kLengths) {
    const auto reuse = o.ReuseThatPays(n, false), with_background = o.ReuseThatPays(n, true);
    out["lengths"].push_back(
        {{"tokens", n},
         {"disk_holds", std::floor(what.disk_bytes / (n * o.token_bytes_on_disk()))},
         {"memory_holds", std::floor(what.memory_bytes / (n * double(what.model.token_bytes())))},
         {"prefill_seconds", o.PrefillSeconds(n)},
         {"put_seconds", o.PutSeconds(n)},
         {"background_seconds", o.BackgroundSeconds(n)},
         {"restore_ssd_seconds", o.SsdSeconds(n)},
         {"restore_host_seconds", o.HostSeconds(n)},
         {"reuse_that_pays", reuse ? json(*reuse) : json()},
         {"reuse_that_pays_with_background", with_background ? json(*with_background) : json()}});
  }
  for (const CapacityPoint& p : o.curve) {
    json point = {{"bytes", p.bytes}, {"score", p.of(Eviction::kScore).hit_share()}};
    for (size_t i = 0; i < std::size(kPolicies); ++i) {
      point["policies"][PolicyName(kPolicies[i])] = p.hits[i].hit_share();
    }
    out["replay"]["curve"].push_back(std::move(point));
  }
  return out;
}

}  // namespace

Report CapacityReport(const CapacityOutcome& outcome,
                      const std::vector<std::pair<std::string, std::string>>& machine) {
  Report report;
  report.verdict = CapacityVerdict(outcome);
  report.skipped = outcome.what.skipped;
  report.figures = CapacityFigures(outcome);
  const std::string prompts = "prompts of " + outcome.what.model.name + ", by length";
  report.tables = {{prompts + ": what holds them", HoldsTable(outcome)},
                   {prompts + ": what they take and save", CostTable(outcome)},
                   {outcome.what.log.name + ", replayed", ReplayTable(outcome)}};
  HtmlPage page("What do this disk and memory hold, and what does it save?",
                outcome.what.model.name + ", " + outcome.what.log.name +
                    "; measured by prefixctl bench capacity");
  page.Verdict(report.verdict);
  page.Figure(HitsPlot(outcome));
  page.Figure(TimesPlot(outcome));
  page.Figure(ReusePlot(outcome));
  page.Section("Figures");
  for (const auto& [title, table] : report.tables) page.Table(title, table);
  if (!report.skipped.empty()) {
    page.Section("Left out");
    page.List(report.skipped);
  }
  page.Section("Machine");
  page.Facts(machine);
  report.page = std::move(page);
  return report;
}

}  // namespace prefixd::bench
