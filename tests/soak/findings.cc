#include "tests/soak/findings.h"

#include <algorithm>
#include <cstdio>

namespace prefixd::soak {

bool Report::good() const {
  return errors.empty() && std::ranges::all_of(findings, &Finding::good) && !findings.empty();
}

void Report::Find(const std::string& name, double value, const std::string& unit,
                  const std::string& bound, bool good) {
  findings.push_back({name, value, unit, bound, good});
}

void Report::FindAtMost(const std::string& name, double value, const std::string& unit,
                        double most) {
  char bound[64];
  std::snprintf(bound, sizeof(bound), "at most %.4g", most);
  Find(name, value, unit, bound, value <= most);
}

namespace {

// The first part of a run fills caches; in some minutes they are full.
constexpr double kLongRun = 600;
constexpr double kSpareMib = 16, kSpareMibOfShortRuns = 40;

void AddMemory(const std::vector<Sample>& samples, double seconds, uint32_t memory_mib,
               Report& report) {
  const double warm = std::min(0.4 * seconds, 120.0);
  std::vector<double> at, rss;
  double mean = 0, peak = 0;
  for (const Sample& s : samples) {
    peak = std::max(peak, s.held.rss_mib);
    if (s.at < warm) continue;
    at.push_back(s.at / 60);
    rss.push_back(s.held.rss_mib);
    mean += s.held.rss_mib;
  }
  if (rss.empty()) return;
  mean /= double(rss.size());
  const double slope = Slope(at, rss), minutes = at.back() - at.front();
  report.FindAtMost("resident memory, peak (the budget)", peak, "MiB", memory_mib);
  report.Find("resident memory, mean after warm-up", mean, "MiB");
  report.Find("  slope after warm-up", slope, "MiB/min");
  report.FindAtMost("  growth by that slope", slope * minutes, "MiB",
                    (seconds < kLongRun ? kSpareMibOfShortRuns : kSpareMib) + 0.05 * mean);
  report.Find("processor time of the daemon", samples.back().held.cpu_seconds, "s");
}

}  // namespace

void AddFindings(const Tally& t, const wire::ServerStats& server,
                 const std::vector<Sample>& samples, double seconds, uint64_t kills,
                 uint32_t memory_mib, Report& report) {
  report.Find("time", seconds, "s");
  report.Find("calls", double(t.total()), "");
  for (size_t i = 0; i < kOpNames.size(); ++i) {
    report.Find(std::string("  ") + kOpNames[i], double(t.done[i]), "");
  }
  report.Find("connections", double(server.connections_total), "");
  report.Find("connections that broke the protocol", double(server.protocol_errors), "");
  report.Find("clients killed", double(kills), "");
  report.Find("calls shed", double(t.shed), "");
  report.FindAtMost("calls that failed", double(t.failed), "", 0);
  report.Find("answers compared", double(t.compared), "", "at least 1", t.compared > 0);
  report.Find("  equal bit by bit", double(t.equal) / double(std::max<uint64_t>(t.compared, 1)),
              "of 1");
  report.FindAtMost("  largest difference", double(t.largest_difference_e9) * 1e-9, "", 1e-4);
  report.FindAtMost("wrong answers", double(t.wrong), "", 0);
  for (int i = 0; i < std::min<int>(t.errors, static_cast<int>(t.first_errors.size())); ++i) {
    report.errors.emplace_back(t.first_errors[static_cast<size_t>(i)].data());
  }
  AddMemory(samples, seconds, memory_mib, report);
}

}  // namespace prefixd::soak
