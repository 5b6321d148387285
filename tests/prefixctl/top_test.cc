// Tests what `prefixctl top` makes of a daemon's answer, whatever that holds.
#include "prefixctl/commands/top.h"

#include <algorithm>
#include <sstream>

#include "tests/support/test.h"

namespace prefixd::ctl {
namespace {

using nlohmann::json;

json Answer() {
  return json::parse(R"({
    "server": {"version": "9.9", "dir": "/srv/x", "uptime_ms": 61000, "calls": 500, "connections": 3},
    "runtime": {"steps": 4000, "host_hits": 90, "host_misses": 10, "bytes_on_disk": 1048576,
                "prefixes": 2, "bytes_free": 1073741824, "memory_bytes": 1024,
                "memory_capacity": 2048, "host_tier_bytes": 0, "host_tier_capacity": 0},
    "watch": {
      "ledger": {"steps": 10, "anchor_tokens": 100, "retrieved_tokens": 500,
                 "charged_summary_tokens": 20, "feature_tokens": 0, "rho_z_sum": 1, "rho_z_count": 10,
                 "physical_bytes": {"gpu": 0, "host": 750, "ssd": 250}},
      "saved": {"tokens": 12000, "attaches": 3, "seconds": 42.5},
      "failed": {"not_found": 2, "internal": 1},
      "latency": {"recent_step": {"calls": 50, "p50_seconds": 0.0015, "p99_seconds": 0.0123}},
      "points": [[1000, 5, 0.001, 0.002], [6000, 0, 0, 0], [11000, 5, 0.001, 0.004]],
      "prefixes": [{"id": "0123456789abcdef", "tenant": "legal", "model": "m", "n_tokens": 4000,
                    "saved": {"attaches": 3, "tokens": 12000, "seconds": 42.5}}],
      "sessions": [{"prefix": "0123456789abcdef", "tenant": "legal", "n_tokens": 4000,
                    "mode": "retrieve", "budget": 0.02, "steps": 10, "tokens_per_step": 62,
                    "completion_share": 0.1, "attached_ms": 5000}],
      "failures": [{"unix_ms": 1000, "tenant": "legal", "call": "attach", "request": "c1-2",
                    "code": "not_found", "message": "no model named 'x'"}]}})");
}

size_t LinesOf(const std::string& text) { return size_t(std::ranges::count(text, '\n')); }

TEST(Top, ShowsWhatTheDaemonDoesAndSaves) {
  json before = Answer();
  before["server"]["calls"] = 400;
  before["runtime"]["steps"] = 2000;
  const std::string text = TopText(Answer(), before, 2.0, {});
  for (const std::string part :
       {"prefixd 9.9  /srv/x  up 0 d 00:01:01", "50 a second", "3 failed", "1000 layers a second",
        "p50 1.50 ms, p99 12.3 ms", "12000 tokens by 3 attaches, 42.5 s of prefill",
        "62 token-equivalents", "anchors 10, retrieved 50, summaries 2", "estimated 10.0%",
        "host 75.0%, SSD 25.0% of 1000 B", "found in host memory 90.0%", "1.0 MiB in 2 prefixes",
        "0123456789ab", "budget 2.0%", "62 (1.6%)", "c1-2", "not_found: no model named 'x'"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
  EXPECT_EQ(text.find("▁"), std::string::npos);
  EXPECT_NE(TopText(Answer(), {}, 0, {.columns = 100, .plot = true}).find("▅ █"),
            std::string::npos);
}

TEST(Top, KeepsToTheTerminal) {
  json many = Answer();
  for (const char* list : {"prefixes", "sessions", "failures"}) {
    for (int i = 0; i < 6; ++i) {
      json more = many["watch"][list];
      for (json& entry : more) many["watch"][list].push_back(entry);
    }
  }
  for (const TopLook look : {TopLook{80, 24, true}, TopLook{40, 10, false}, TopLook{200, 60, true},
                             TopLook{1, 1, true}}) {
    const std::string text = TopText(many, json::object(), 0, look);
    EXPECT_LE(LinesOf(text), std::max<size_t>(look.lines, 1)) << text;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      const auto columns = std::ranges::count_if(
          line, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
      EXPECT_LE(size_t(columns), look.columns) << line;
    }
  }
}

TEST(Top, NamesOfClientsKeepTheColumnsInPlace) {
  json odd = Answer();
  json& prefixes = odd["watch"]["prefixes"];
  for (const std::string& name :
       {std::string(250, 'w'), std::string("m\u00fcller"), std::string("\u202eteam")}) {
    prefixes.push_back(prefixes[0]);
    prefixes.back()["tenant"] = name;
  }
  const std::string text = TopText(odd, json::object(), 0, {.columns = 120});
  EXPECT_NE(text.find(" " + std::string(24, 'w') + "..  m "), std::string::npos) << text;
  EXPECT_NE(text.find("\\xe2\\x80\\xaeteam"), std::string::npos) << text;
  // 24 + 2 columns of the longest name, 2 between columns.
  EXPECT_NE(text.find(" m\u00fcller" + std::string(26 - 6 + 2, ' ') + "m "), std::string::npos)
      << text;
}

TEST(Top, WhatATerminalWouldObeyIsEscaped) {
  json evil = Answer();
  const std::string bad = "\x1b[2J\n\x07";
  for (const char* member : {"tenant", "model", "id"}) evil["watch"]["prefixes"][0][member] = bad;
  evil["watch"]["failures"][0]["message"] = bad;
  evil["server"]["dir"] = bad;
  const std::string text = TopText(evil, {}, 0, {});
  EXPECT_EQ(LinesOf(text), LinesOf(TopText(Answer(), {}, 0, {})));
  EXPECT_TRUE(std::ranges::none_of(
      text, [](unsigned char c) { return c != '\n' && (c < 0x20 || c == 0x7f); }));
}

// A daemon of another version may say less, or something else.
TEST(Top, MissingOrOtherMembersAreNoTrouble) {
  for (const char* const text :
       {"{}", R"({"watch": {"prefixes": [1, {}, null], "sessions": [[]], "points": [[1], 2, []],
                 "failed": {"x": "y"}, "ledger": 3}, "server": [], "runtime": null})"}) {
    EXPECT_FALSE(TopText(json::parse(text), json::parse(text), 1, {80, 24, true}).empty());
  }
}

}  // namespace
}  // namespace prefixd::ctl
