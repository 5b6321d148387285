#include <algorithm>

#include "measure/io/run.h"
#include "measure/page/text.h"
#include "measure/timing/json_file.h"
#include "measure/timing/other_work.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

struct Part {
  const char *name, *what, *ratio;
  double held_to;  // of the floor; 0: reported only
};

constexpr Part kParts[] = {
    {"put", "durable put", "put_vs_fio", 0.9},
    {"restore", "restore from @", "restore_vs_fio", 0.9},
    {"rows", "single rows from @", "row_iops_vs_fio", 0.9},
    {"reclustered_rows", "single reclustered rows from @", "reclustered_row_iops_vs_fio", 0},
    {"host", "restore from host memory", "host_vs_memcpy", 0.85},
    {"reclustered", "restore of reclustered rows from host memory", "host_reclustered_vs_memcpy",
     0},
    {"host_rows", "single rows from host memory", "host_rows_vs_memcpy", 0},
    {"reclustered_host_rows", "single reclustered rows from host memory",
     "host_reclustered_rows_vs_memcpy", 0},
};

// The part in words; @ is where rows in files lie.
std::string Named(const Part& part, const IoOutcome& outcome) {
  std::string name = part.what;
  const size_t at = name.find('@');
  if (at != std::string::npos) name.replace(at, 1, outcome.what.medium.place);
  return name;
}

const Paired* Line(const IoOutcome& outcome, const char* part) {
  const auto at = outcome.speed.lines.find(part);
  return at == outcome.speed.lines.end() ? nullptr : &at->second;
}

std::string Rate(const Spread& s, const Paired& p) {
  const double d = p.unit_divisor;
  return Fixed(s.median / d, 0) + " [" + Fixed(s.low / d, 0) + ", " + Fixed(s.high / d, 0) + "] " +
         p.unit;
}

TextTable SpeedTable(const IoOutcome& outcome) {
  TextTable rows = {{"", "prefixd", "floor", "its rate", "ratio", "CPU s/GB", "floor's CPU s/GB"}};
  for (const Part& part : kParts) {
    const Paired* p = Line(outcome, part.name);
    if (p == nullptr) continue;
    const bool floor = p->floor.median > 0;
    rows.push_back({Named(part, outcome), Rate(p->ours, *p), floor ? p->floor_name : "none",
                    floor ? Rate(p->floor, *p) : "-",
                    floor ? Fixed(p->ratio.median, 2) + " [" + Fixed(p->ratio.low, 2) + ", " +
                                Fixed(p->ratio.high, 2) + "]"
                          : "-",
                    Fixed(p->ours_cpu, 2), floor ? Fixed(p->floor_cpu, 2) : "-"});
  }
  return rows;
}

std::string MsWithSpread(const Spread& s) {
  return Fixed(s.median, 1) + " ms [" + Fixed(s.low, 1) + ", " + Fixed(s.high, 1) + "]";
}

TextTable AttachTable(const AttachReport& a) {
  return {{"", "store just opened", "served before"},
          {"attach", Fixed(a.cold_attach_ms, 1) + " ms", MsWithSpread(a.warm_attach_ms)},
          {"first completed step", Fixed(a.cold_step_ms, 1) + " ms", MsWithSpread(a.warm_step_ms)},
          {"second step", Fixed(a.cold_next_step_ms, 1) + " ms", MsWithSpread(a.next_step_ms)}};
}

// From the layers of the attached prompt to all.
double LayerScale(const IoPlan& what) { return double(what.model.n_layers) / what.attach_layers; }

double StepAmplification(const AttachReport& a) {
  return a.cold_step_row_bytes > 0 ? a.cold_step_bytes / a.cold_step_row_bytes : 0;
}

TextTable AmplificationTable(const IoOutcome& outcome) {
  TextTable rows = {{"bytes moved over bytes wanted", "times"}};
  const auto row = [&](const char* what, double times) {
    if (times > 0) rows.push_back({what, Fixed(times, 2)});
  };
  row("disk space of a prompt with summaries and indexes, over its rows",
      outcome.stored_per_row_byte);
  row("single rows, as read", outcome.speed.row_amplification);
  if (outcome.attach) {
    row("first completed step of a store just opened", StepAmplification(*outcome.attach));
  }
  return rows;
}

std::vector<std::string> IoVerdict(const IoOutcome& outcome) {
  std::vector<std::string> verdict;
  const IoPlan& what = outcome.what;
  if (!what.medium.disk) verdict.push_back(what.medium.sentence);
  const double all = double(what.model.token_bytes()) * what.tokens;
  const Paired *put = Line(outcome, "put"), *restore = Line(outcome, "restore"),
               *host = Line(outcome, "host");
  if (put != nullptr && restore != nullptr && host != nullptr) {
    verdict.push_back("A prompt of " + Tokens(what.tokens) + " of " + what.model.name + " (" +
                      GigaBytes(all) + ") is stored durably in " + Seconds(all / put->ours.median) +
                      ", and restored in " + Seconds(all / restore->ours.median) + " from " +
                      (what.medium.disk ? "this disk" : what.medium.place) + " and in " +
                      Seconds(all / host->ours.median) + " from host memory.");
  }
  std::vector<std::string> reached, missed, others;
  for (const Part& part : kParts) {
    const Paired* p = Line(outcome, part.name);
    if (p == nullptr || p->floor.median <= 0) continue;
    if (part.held_to <= 0) {
      others.push_back(Named(part, outcome) + " (" + Fixed(p->ratio.median, 3) + " of " +
                       p->floor_name + ")");
      continue;
    }
    (p->ratio.median >= part.held_to ? reached : missed)
        .push_back(Named(part, outcome) + " (" + Fixed(p->ratio.median, 3) + " of " +
                   p->floor_name + ", held to " + Fixed(part.held_to, 2) + ")");
  }
  if (!reached.empty()) {
    verdict.push_back("As fast as the machine allows: " + Join(reached, ", ") + ".");
  }
  if (!missed.empty()) {
    verdict.push_back("Slower than the machine allows: " + Join(missed, ", ") + ".");
  }
  if (!others.empty()) verdict.push_back("Held to nothing: " + Join(others, ", ") + ".");
  if (outcome.attach) {
    const double scale = LayerScale(what) / 1e3;
    verdict.push_back(
        "Attaching to it takes " + Seconds(outcome.attach->warm_attach_ms.median * scale) +
        " where it was served before, and " + Seconds(outcome.attach->cold_attach_ms * scale) +
        " in a store just opened (measured with " + std::to_string(what.attach_layers) + " of " +
        std::to_string(what.model.n_layers) + " layers and scaled to all).");
  }
  const std::string disturbed = DisturbedBy(outcome.other_work);
  if (!disturbed.empty()) verdict.push_back(disturbed);
  return verdict;
}

json PairJson(const Part& part, const Paired& p, const IoOutcome& outcome) {
  return {{"part", part.name},
          {"what", Named(part, outcome)},
          {"unit_per_second", p.unit == "MB/s" ? "bytes" : "rows"},
          {"ours_per_second", p.ours},
          {"floor", p.floor.median > 0 ? json(p.floor_name) : json()},
          {"floor_per_second", p.floor},
          {"ratio", p.ratio},
          {"cpu_seconds_per_gb", p.ours_cpu},
          {"floor_cpu_seconds_per_gb", p.floor_cpu}};
}

json IoFigures(const IoOutcome& outcome) {
  const IoPlan& what = outcome.what;
  json out = {{"benchmark", "io"},
              {"model", what.model.name},
              {"tokens", what.tokens},
              {"layers_measured", what.layers},
              {"row_bytes", double(what.model.Geometry(what.layers).token_bytes()) * what.tokens},
              {"pairs", what.pairs},
              {"fio", what.fio.empty() ? json() : json(what.fio)},
              {"io_backend", outcome.speed.io_backend},
              {"threads", outcome.speed.threads},
              {"speed", json::array()},
              {"ratios", json::object()},
              {"on_disk", what.medium.disk},
              {"other_work_share", outcome.other_work},
              {"skipped", outcome.skipped}};
  for (const Part& part : kParts) {
    const Paired* p = Line(outcome, part.name);
    if (p == nullptr) continue;
    out["speed"].push_back(PairJson(part, *p, outcome));
    if (p->floor.median > 0) out["ratios"][part.ratio] = p->ratio.median;
  }
  out["amplification"] = {{"single_rows", outcome.speed.row_amplification}};
  if (!outcome.attach) return out;
  const AttachReport& a = *outcome.attach;
  if (what.tokens == 16384) {
    out["ratios"]["attach_ms_16k"] = a.warm_attach_ms.median * LayerScale(what);
    out["ratios"]["attach_ms_16k_layers_measured"] = what.attach_layers;
  }
  out["attach"] = {{"layers", what.attach_layers},
                   {"warm_attach_ms", a.warm_attach_ms},
                   {"warm_first_step_ms", a.warm_step_ms},
                   {"warm_next_step_ms", a.next_step_ms},
                   {"cold_attach_ms", a.cold_attach_ms},
                   {"cold_first_step_ms", a.cold_step_ms},
                   {"cold_next_step_ms", a.cold_next_step_ms},
                   {"ingest_seconds", a.ingest_seconds}};
  out["amplification"]["stored"] = outcome.stored_per_row_byte;
  out["amplification"]["cold_first_step"] = StepAmplification(a);
  return out;
}

}  // namespace

Report IoReport(const IoOutcome& outcome,
                const std::vector<std::pair<std::string, std::string>>& machine) {
  const IoPlan& what = outcome.what;
  Report report;
  report.verdict = IoVerdict(outcome);
  report.skipped = outcome.skipped;
  report.figures = IoFigures(outcome);
  report.tables = {{"speed, median [quartiles]", SpeedTable(outcome)}};
  if (outcome.attach) {
    report.tables.emplace_back("until a decoder has its first token, as measured with " +
                                   std::to_string(what.attach_layers) + " of " +
                                   std::to_string(what.model.n_layers) + " layers",
                               AttachTable(*outcome.attach));
  }
  report.tables.emplace_back("amplification", AmplificationTable(outcome));
  HtmlPage page("Is the store as fast as this machine?",
                Tokens(what.tokens) + " of " + what.model.name + ", " +
                    std::to_string(what.layers) + " of " + std::to_string(what.model.n_layers) +
                    " layers; measured by prefixctl bench io");
  page.Verdict(report.verdict);
  std::vector<Bar> ratios;
  for (const Part& part : kParts) {
    const Paired* p = Line(outcome, part.name);
    if (p == nullptr || p->floor.median <= 0) continue;
    ratios.push_back({Named(part, outcome), Fixed(p->ratio.median, 2) + " of " + p->floor_name,
                      p->ratio.low, p->ratio.median, p->ratio.high});
  }
  if (!ratios.empty()) {
    page.Bars(
        "prefixd beside the floor, as a ratio",
        "The upright line is 1: as fast as the plainest program that moves the same bytes, in "
        "turns with it. The thin line spans the quartiles. The axis ends at " +
            Short(BarsEnd(ratios)) + ".",
        ratios);
  }
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
