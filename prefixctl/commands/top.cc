#include "prefixctl/commands/top.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "prefixctl/show/output.h"

namespace prefixd::ctl {

using nlohmann::json;

namespace {

using Rows = std::vector<std::vector<std::string>>;

// A daemon of another version may lack a member: it then counts as 0, or as nothing.
double Number(const json& object, const char* name) {
  if (!object.is_object()) return 0;
  const auto it = object.find(name);
  return it != object.end() && it->is_number() ? it->get<double>() : 0;
}
std::string Text(const json& object, const char* name) {
  if (!object.is_object()) return "";
  const auto it = object.find(name);
  return it != object.end() && it->is_string() ? it->get<std::string>() : "";
}
const json& Part(const json& object, const char* name) {
  static const json kNone = json::object();
  if (!object.is_object()) return kNone;
  const auto it = object.find(name);
  return it != object.end() ? *it : kNone;
}

std::string Format(const char* format, double value) {
  char text[48];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}
std::string Count(double n) {
  if (n >= 1e9) return Format("%.2f G", n / 1e9);
  if (n >= 1e6) return Format("%.2f M", n / 1e6);
  if (n >= 1e5) return Format("%.0f k", n / 1e3);
  return Format(n < 10 && n != double(int(n)) ? "%.2f" : "%.0f", n);
}
std::string Seconds(double s) {
  if (s < 1e-3) return Format("%.0f us", s * 1e6);
  if (s < 1) return Format(s < 0.01 ? "%.2f ms" : "%.1f ms", s * 1e3);
  if (s < 120) return Format("%.1f s", s);
  return s < 7200 ? Format("%.0f min", s / 60) : Format("%.1f h", s / 3600);
}
std::string Share(double part, double whole) {
  return whole > 0 ? Format("%.1f%%", 100 * part / whole) : "-";
}
std::string Size(const json& object, const char* name) {
  return Bytes(static_cast<uint64_t>(std::max(0.0, Number(object, name))));
}
// A name that a client chose, cut so that the columns behind it stay in sight.
std::string Named(const std::string& text) {
  constexpr size_t kMostCharacters = 24;
  if (text.empty()) return "-";
  size_t characters = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool begins = (static_cast<unsigned char>(text[i]) & 0xc0) != 0x80;  // in UTF-8
    if (begins && ++characters > kMostCharacters) return text.substr(0, i) + "..";
  }
  return text;
}

// How often a second something was counted since `before`.
std::string Rate(const json& now, const json& before, const char* name, double seconds) {
  if (before.empty() || seconds <= 0) return "-";
  return Count(std::max(0.0, Number(now, name) - Number(before, name)) / seconds);
}

std::string Summary(const json& now, const json& before, double seconds) {
  const json &server = Part(now, "server"), &runtime = Part(now, "runtime");
  const json& watch = Part(now, "watch");
  const json &ledger = Part(watch, "ledger"), &saved = Part(watch, "saved");
  const json& recent = Part(Part(watch, "latency"), "recent_step");
  const json &server_before = Part(before, "server"), &runtime_before = Part(before, "runtime");
  double failed = 0;
  for (const json& calls : Part(watch, "failed")) {
    if (calls.is_number()) failed += calls.get<double>();
  }
  const double steps = Number(ledger, "steps");
  const double parts[] = {Number(ledger, "anchor_tokens"), Number(ledger, "retrieved_tokens"),
                          Number(ledger, "charged_summary_tokens"),
                          Number(ledger, "feature_tokens")};
  const auto a_step = [&](double tokens) { return Count(steps > 0 ? tokens / steps : 0); };
  const json& tiers = Part(ledger, "physical_bytes");
  const double moved = Number(tiers, "gpu") + Number(tiers, "host") + Number(tiers, "ssd");
  const double hits = Number(runtime, "host_hits"), misses = Number(runtime, "host_misses");

  Rows rows;
  rows.push_back({"calls", Rate(server, server_before, "calls", seconds) + " a second, " +
                               Count(Number(server, "calls")) + " so far, " + Count(failed) +
                               " failed; " + Count(Number(server, "connections")) +
                               " connections"});
  rows.push_back(
      {"steps", Rate(runtime, runtime_before, "steps", seconds) +
                    " layers a second; the last minute's calls: " + Count(Number(recent, "calls")) +
                    ", p50 " + Seconds(Number(recent, "p50_seconds")) + ", p99 " +
                    Seconds(Number(recent, "p99_seconds"))});
  rows.push_back(
      {"saved", Count(Number(saved, "tokens")) + " tokens by " + Count(Number(saved, "attaches")) +
                    " attaches" +
                    (saved.contains("seconds") ? ", " + Seconds(Number(saved, "seconds")) +
                                                     " of prefill at the pace of the puts"
                                               : "")});
  rows.push_back({"read", a_step(parts[0] + parts[1] + parts[2] + parts[3]) +
                              " token-equivalents a step and KV head: anchors " + a_step(parts[0]) +
                              ", retrieved " + a_step(parts[1]) + ", summaries " +
                              a_step(parts[2]) + ", features " + a_step(parts[3]) + "; estimated " +
                              Share(Number(ledger, "rho_z_sum"), Number(ledger, "rho_z_count"))});
  rows.push_back({"tiers", "GPU " + Share(Number(tiers, "gpu"), moved) + ", host " +
                               Share(Number(tiers, "host"), moved) + ", SSD " +
                               Share(Number(tiers, "ssd"), moved) + " of " +
                               Bytes(static_cast<uint64_t>(moved)) +
                               "; pages found in host memory " + Share(hits, hits + misses)});
  rows.push_back({"memory", Size(runtime, "memory_bytes") + " of " +
                                Size(runtime, "memory_capacity") + ", host tier " +
                                Size(runtime, "host_tier_bytes") + " of " +
                                Size(runtime, "host_tier_capacity")});
  rows.push_back({"disk", Size(runtime, "bytes_on_disk") + " in " +
                              Count(Number(runtime, "prefixes")) + " prefixes, " +
                              Size(runtime, "bytes_free") + " free"});
  rows.push_back({"work", "to build " + Count(Number(runtime, "ingest_queue")) + ", to rewrite " +
                              Count(Number(runtime, "rewrite_queue")) + ", to preload " +
                              Count(Number(runtime, "preload_queue")) + ", to prefetch " +
                              Count(Number(runtime, "prefetch_queue")) + "; scrub verified " +
                              Size(runtime, "scrub_bytes") + ", damaged " +
                              Count(Number(runtime, "scrub_damaged"))});
  return TableText(rows);
}

// The p99 of each point as a column, eighths of the highest.
std::string Plot(const json& points, size_t columns) {
  static constexpr std::string_view kEighths[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  if (!points.is_array() || points.empty()) return "";
  const size_t n = std::min(points.size(), std::max<size_t>(columns, 20) - 20);
  double most = 0;
  const auto at = [&](size_t i, size_t column) {
    const json& point = points[points.size() - n + i];
    return point.is_array() && point.size() > column && point[column].is_number()
               ? point[column].get<double>()
               : 0.0;
  };
  for (size_t i = 0; i < n; ++i) most = std::max(most, at(i, 3));
  if (most <= 0) return "";
  std::string text = "p99  ";
  for (size_t i = 0; i < n; ++i) {
    const double share = at(i, 3) / most;
    text += at(i, 1) > 0 ? kEighths[std::min<size_t>(7, size_t(share * 8))] : " ";
  }
  return text + "  " + Seconds(most) + "\n";
}

Rows PrefixRows(const json& list) {
  Rows rows = {{"PREFIX", "TENANT", "MODEL", "TOKENS", "ATTACHES", "SAVED TOKENS", "PREFILL"}};
  for (const json& p : list) {
    const json& saved = Part(p, "saved");
    rows.push_back({Text(p, "id").substr(0, 12), Named(Text(p, "tenant")), Named(Text(p, "model")),
                    Count(Number(p, "n_tokens")), Count(Number(saved, "attaches")),
                    Count(Number(saved, "tokens")),
                    saved.contains("seconds") ? Seconds(Number(saved, "seconds")) : "-"});
  }
  return rows;
}

Rows SessionRows(const json& list) {
  Rows rows = {
      {"SESSION ON", "TENANT", "TOKENS", "POLICY", "STEPS", "A STEP READS", "ESTIMATED", "SINCE"}};
  for (const json& s : list) {
    std::string policy = Text(s, "mode");
    if (policy == "retrieve") {
      policy = s.contains("k") ? "k " + Count(Number(s, "k"))
                               : "budget " + Share(Number(s, "budget"), 1);
    }
    const double steps = Number(s, "steps"), read = Number(s, "tokens_per_step");
    rows.push_back({Text(s, "prefix").substr(0, 12), Named(Text(s, "tenant")),
                    Count(Number(s, "n_tokens")), policy, Count(steps),
                    steps > 0 ? Count(read) + " (" + Share(read, Number(s, "n_tokens")) + ")" : "-",
                    steps > 0 ? Share(Number(s, "completion_share"), 1) : "-",
                    Duration(static_cast<uint64_t>(Number(s, "attached_ms")))});
  }
  return rows;
}

Rows FailureRows(const json& list) {
  Rows rows = {{"FAILED AT", "TENANT", "CALL", "REQUEST", "ERROR"}};
  for (const json& f : list) {
    rows.push_back({Time(static_cast<int64_t>(Number(f, "unix_ms"))), Named(Text(f, "tenant")),
                    Text(f, "call"), Text(f, "request"),
                    Text(f, "code") + ": " + Text(f, "message")});
  }
  return rows;
}

// Cuts lines to the columns, in characters, and leaves out lines that find no room.
std::string Fit(const std::string& text, const TopLook& look) {
  std::string fitted;
  size_t line = 0, column = 0;
  for (const char c : text) {
    if (c == '\n') {
      if (look.lines > 0 && ++line + 1 >= look.lines) break;
      column = 0;
      fitted += c;
      continue;
    }
    const bool begins = (static_cast<unsigned char>(c) & 0xc0) != 0x80;  // of a UTF-8 character
    column += begins;
    if (look.columns == 0 || column <= look.columns) fitted += c;
  }
  if (!fitted.ends_with('\n')) fitted += '\n';
  return fitted;
}

TopLook LookOf(bool terminal) {
  TopLook look;
  winsize size{};
  if (!terminal || ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return look;
  look.columns = size.ws_col;
  look.lines = size.ws_row;
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* const value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    const std::string_view locale(value);
    look.plot = locale.find("UTF-8") != locale.npos || locale.find("utf8") != locale.npos;
    break;
  }
  return look;
}

}  // namespace

std::string TopText(const json& now, const json& before, double seconds, const TopLook& look) {
  const json &server = Part(now, "server"), &watch = Part(now, "watch");
  const auto uptime = static_cast<uint64_t>(Number(server, "uptime_ms"));
  std::string text = Printable("prefixd " + Text(server, "version") + "  " + Text(server, "dir")) +
                     "  up " + Duration(uptime) + "\n\n" + Summary(now, before, seconds);
  if (look.plot) text += Plot(Part(watch, "points"), look.columns);
  // A table takes a third of what is left at most; the last one may have the rest.
  const size_t used = static_cast<size_t>(std::ranges::count(text, '\n'));
  const size_t room = look.lines > used ? look.lines - used : 12;
  const auto add = [&](Rows rows, size_t most) {
    if (rows.size() < 2) return;
    if (look.lines > 0) rows.resize(std::min(rows.size(), std::max<size_t>(most, 3)));
    text += "\n" + TableText(rows);
  };
  add(PrefixRows(Part(watch, "prefixes")), room / 3);
  add(SessionRows(Part(watch, "sessions")), room / 3);
  add(FailureRows(Part(watch, "failures")), room);
  return Fit(text, look);
}

Status Top(RemoteStore& client, const Options& options) {
  using Clock = std::chrono::steady_clock;
  const bool terminal = ::isatty(STDOUT_FILENO) == 1 && !options.json;
  json before = json::object();
  auto asked = Clock::now();
  for (bool first = true;; first = false) {
    if (!first) std::this_thread::sleep_for(std::chrono::seconds(options.interval));
    PREFIXD_ASSIGN(json now, client.Watch());
    if (!now.contains("watch")) {
      return Error{Code::kFailedPrecondition, "the daemon is of an older version without `top`"};
    }
    const auto at = Clock::now();
    const double seconds = std::chrono::duration<double>(at - std::exchange(asked, at)).count();
    if (options.json) {
      if (options.once) {
        PrintJson(now);
      } else {  // one line each, for programs that read a stream
        std::puts(now.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
      }
    } else {
      const std::string text = TopText(now, before, seconds, LookOf(terminal));
      const bool redraw = terminal && !options.once;
      std::printf("%s%s%s", redraw ? "\033[H\033[2J" : "", text.c_str(),
                  redraw || options.once ? "" : "\n");
    }
    if (std::fflush(stdout) != 0 || options.once) return {};  // whoever read has gone
    before = std::move(now);
  }
}

}  // namespace prefixd::ctl
