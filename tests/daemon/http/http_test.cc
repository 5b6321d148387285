// Tests what the real daemon answers over HTTP: metrics, health, and to whom.
#include <signal.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "base/tables/statistics.h"
#include "protocol/server_stats.h"
#include "tests/daemon/http/exposition.h"
#include "tests/daemon/http/http_fixture.h"

namespace prefixd::testing {
namespace {

using nlohmann::json;

template <typename S>
size_t Numbers() {
  size_t n = 0;
  ForEachStatistic<S>([&](const auto& statistic) {
    n += statistic.kind == StatisticKind::kCounter || statistic.kind == StatisticKind::kGauge;
  });
  return n;
}

TEST_F(HttpTest, MetricsHaveEveryStatisticAndFollowTheRulesOfTheirFormat) {
  Start();
  Use("team-a");
  const HttpReply reply = Ask("/metrics", kOperator);
  ASSERT_EQ(reply.status, 200) << reply.body;
  EXPECT_TRUE(reply.fields.at("content-type").starts_with("text/plain; version=0.0.4"));
  const Exposition e = ParseExposition(reply.body);
  EXPECT_TRUE(e.wrong.empty()) << e.wrong.size() << ", the first: " << e.wrong.front();
  size_t tables = 0;
  for (const auto& [name, type] : e.types) {
    tables += name.starts_with("prefixd_store_") || name.starts_with("prefixd_server_") ||
              name.starts_with("prefixd_ledger_");
  }
  EXPECT_GE(tables, Numbers<RuntimeStats>() + Numbers<wire::ServerStats>() + Numbers<Ledger>() +
                        Numbers<TenantStats>() + Numbers<MemoryOfKind>());
  EXPECT_EQ(e.Of("prefixd_ready"), 1);
  EXPECT_EQ(e.Of("prefixd_store_prefixes"), 1);
  EXPECT_GT(e.Of("prefixd_server_calls_total"), 0);
  EXPECT_GE(e.Of("prefixd_server_uptime_seconds"), 0);
  EXPECT_LT(e.Of("prefixd_server_uptime_seconds"), 600);
  EXPECT_EQ(e.Of("prefixd_call_seconds_count{call=\"attach\"}"), 1);
  EXPECT_EQ(e.Of("prefixd_call_seconds_count{call=\"step\"}"), 1);
  EXPECT_EQ(e.Of("prefixd_call_seconds_count{call=\"put\"}"), 1);
  EXPECT_GT(e.Of("prefixd_call_seconds_sum{call=\"step\"}"), 0);
  EXPECT_EQ(e.types.at("prefixd_call_seconds"), "histogram");
  // What the step read is there after its session has gone: 2 KV heads of a layer.
  EXPECT_EQ(e.Of("prefixd_ledger_steps_total"), 2);
  EXPECT_EQ(e.Of("prefixd_saved_tokens_total"), 100);
  EXPECT_EQ(e.Of("prefixd_saved_timed_tokens_total"), 100);
  EXPECT_GT(e.Of("prefixd_saved_seconds_total"), 0);
  EXPECT_GT(e.Of("prefixd_store_tenants_bytes{tenant=\"team-a\"}"), 0);
  EXPECT_EQ(e.Of("prefixd_tenant_prefixes{tenant=\"team-a\"}"), 1);
  EXPECT_EQ(e.Of("prefixd_tenant_sessions{tenant=\"team-a\"}"), 0);
  EXPECT_GT(e.Of("process_cpu_seconds_total"), 0);
}

// A dashboard that names what is not there shows nothing, and nobody is told.
TEST_F(HttpTest, TheDashboardNamesMetricsThatThereAre) {
  Start();
  Use("team-a");
  const Exposition e = ParseExposition(Ask("/metrics", kOperator).body);
  const json dashboard =
      json::parse(ReadFile(std::string(PREFIXD_SOURCE_DIR) + "/packaging/grafana/prefixd.json"));
  std::set<std::string> named;
  for (const json& panel : dashboard["panels"]) {
    for (const json& target : panel["targets"]) {
      const std::string expr = target["expr"];
      const std::regex metric("(prefixd|process)_[a-z0-9_]+");
      size_t found = 0;
      for (std::sregex_iterator it(expr.begin(), expr.end(), metric), end; it != end; ++it) {
        named.insert(it->str());
        ++found;
      }
      EXPECT_GT(found, 0u) << expr;
    }
  }
  EXPECT_GT(named.size(), 20u);
  for (std::string name : named) {
    if (name == "prefixd_call_seconds_bucket" || name == "prefixd_call_seconds_count") {
      name = "prefixd_call_seconds";
    }
    EXPECT_TRUE(e.Has(name)) << name;
  }
  EXPECT_FALSE(e.Has("prefixd_no_such_metric"));
}

TEST_F(HttpTest, CountersOnlyGrowWhileSessionsComeAndGo) {
  Start();
  std::map<std::string, double> before;
  for (int round = 0; round < 4; ++round) {
    Use("team-a");
    std::this_thread::sleep_for(std::chrono::milliseconds(600));  // the last answer is kept so long
    const Exposition e = ParseExposition(Ask("/metrics", kOperator).body);
    for (const auto& [series, value] : e.values) {
      const std::string name = series.substr(0, series.find('{'));
      if (!name.ends_with("_total") && !name.ends_with("_count")) continue;
      EXPECT_GE(value, before[series]) << series;
      before[series] = value;
    }
  }
  EXPECT_EQ(before["prefixd_ledger_steps_total"], 8);
}

TEST_F(HttpTest, WhoHasNoTokenSeesTotalsAndNoName) {
  Start();
  const std::string prefix = Use("secret-tenant");
  for (const std::string path : {"/metrics", "/status.json"}) {
    const HttpReply reply = Ask(path);
    EXPECT_EQ(reply.status, 200);
    EXPECT_EQ(reply.body.find("secret-tenant"), std::string::npos) << path;
    EXPECT_EQ(reply.body.find(prefix), std::string::npos) << path;
    EXPECT_NE(Ask(path, kOperator).body.find("secret-tenant"), std::string::npos) << path;
  }
}

TEST_F(HttpTest, ATenantSeesItsOwn) {
  StartWithTokens();
  const std::string of_a = Use("a", 100), of_b = Use("b", 120);
  for (const std::string path : {"/metrics", "/status.json"}) {
    const HttpReply reply = Ask(path, "tenant-token-a");
    EXPECT_EQ(reply.status, 200);
    EXPECT_EQ(reply.body.find("tenant=\"b\""), std::string::npos) << path;
    EXPECT_EQ(reply.body.find(of_b), std::string::npos) << path;
  }
  const json own = json::parse(Ask("/status.json", "tenant-token-a").body);
  EXPECT_EQ(own["sees"], "tenant");
  ASSERT_EQ(own["watch"]["prefixes"].size(), 1u);
  EXPECT_EQ(own["watch"]["prefixes"][0]["id"], of_a);
  EXPECT_EQ(own["watch"]["prefixes"][0]["saved"]["tokens"], 100);
  ASSERT_EQ(own["runtime"]["tenants"].size(), 1u);
  const json all = json::parse(Ask("/status.json", "admin-token").body);
  EXPECT_EQ(all["sees"], "all");
  EXPECT_EQ(all["watch"]["prefixes"].size(), 2u);
}

TEST_F(HttpTest, AWrongTokenIsRefusedEvenOnLoopback) {
  StartWithTokens();
  for (const std::string token : {"wrong", "operator-token-012345678", "tenant-token-c", ""}) {
    for (const std::string path : {"/", "/metrics", "/status.json", "/healthz", "/login"}) {
      const HttpReply reply = Get(port_, path, "Authorization: Bearer " + token + "x\r\n");
      EXPECT_EQ(reply.status, 401) << path << " " << token;
      EXPECT_TRUE(reply.fields.contains("www-authenticate"));
    }
  }
  // Browsers send the token as a password.
  const std::string basic = "Authorization: Basic b3A6b3BlcmF0b3ItdG9rZW4tMDEyMzQ1Njc4OQ==\r\n";
  EXPECT_EQ(json::parse(Get(port_, "/status.json", basic).body)["sees"], "all");
  EXPECT_EQ(Get(port_, "/login").status, 401);
  EXPECT_EQ(Get(port_, "/login", basic).status, 303);
  EXPECT_EQ(Get(port_, "/metrics", "Authorization: Basic !!!\r\n").status, 400);
}

TEST_F(HttpTest, AwayFromLoopbackATokenIsNeeded) {
  Start({}, "0.0.0.0:0");
  for (const std::string path : {"/", "/metrics", "/status.json", "/healthz", "/readyz"}) {
    EXPECT_EQ(Ask(path).status, 401) << path;
    EXPECT_EQ(Ask(path, kOperator).status, 200) << path;
  }
  // Any name may point to it: the token is what admits.
  EXPECT_EQ(
      Exchange(port_, "GET /healthz HTTP/1.1\r\nHost: db.example\r\n" + Bearer(kOperator) + "\r\n")
          .status,
      200);
}

TEST_F(HttpTest, AddressAwayFromLoopbackWithoutATokenIsRefusedAtStart) {
  const Finished run = RunProgram(
      PREFIXD_BINARY, {"--dir", dir_ / "store", "--socket", dir_ / "s", "--http", "0.0.0.0:0"});
  EXPECT_EQ(run.code, 2);
  EXPECT_NE(run.err.find("http.token_file"), std::string::npos) << run.err;
}

TEST_F(HttpTest, ATokenFileThatOthersReadIsRefusedAtStart) {
  WriteFile(token_file_, "0123456789abcdef0123456789\n");
  ::chmod(token_file_.c_str(), 0644);
  const std::vector<std::string> args = {
      "--dir",  dir_ / "store", "--socket",          dir_ / "s",
      "--http", "127.0.0.1:0",  "--http-token-file", token_file_};
  Finished run = RunProgram(PREFIXD_BINARY, args);
  EXPECT_EQ(run.code, 1);
  EXPECT_NE(run.err.find("0600"), std::string::npos) << run.err;
  WriteFile(token_file_, "short\n");
  ::chmod(token_file_.c_str(), 0600);
  run = RunProgram(PREFIXD_BINARY, args);
  EXPECT_EQ(run.code, 1);
  EXPECT_NE(run.err.find("16"), std::string::npos) << run.err;
}

TEST_F(HttpTest, ANewTokenHoldsFromHangupOn) {
  Start();
  EXPECT_EQ(Ask("/metrics", kOperator).status, 200);
  WriteFile(token_file_, "another-token-0123456789\n");
  daemon_->Signal(SIGHUP);
  EXPECT_TRUE(
      Eventually([&] { return Ask("/healthz", "another-token-0123456789").status == 200; }));
  EXPECT_EQ(Ask("/metrics", kOperator).status, 401);
  // One that cannot be read changes nothing.
  WriteFile(token_file_, "short\n");
  daemon_->Signal(SIGHUP);
  EXPECT_TRUE(
      Eventually([&] { return daemon_->Stderr().find("stays in force") != std::string::npos; }));
  EXPECT_EQ(Ask("/healthz", "another-token-0123456789").status, 200);
}

TEST_F(HttpTest, HealthAndReadiness) {
  Start();
  EXPECT_EQ(Ask("/healthz").body, "ok\n");
  EXPECT_EQ(Ask("/readyz").body, "ready\n");
  // Nothing can be written where the directory is not: it lives, and does not serve.
  std::filesystem::rename(dir_ / "store", dir_ / "elsewhere");
  EXPECT_EQ(Ask("/healthz").status, 200);
  const HttpReply reply = Ask("/readyz");
  EXPECT_EQ(reply.status, 503);
  EXPECT_NE(reply.body.find("cannot write in"), std::string::npos) << reply.body;
  EXPECT_EQ(ParseExposition(Ask("/metrics").body).Of("prefixd_ready"), 0);
  std::filesystem::rename(dir_ / "elsewhere", dir_ / "store");
  EXPECT_EQ(Ask("/readyz").status, 200);
}

// What clients name must not become markup, another line of metrics, or broken JSON.
TEST_F(HttpTest, NamesOfClientsAreEscaped) {
  Start();
  const std::string evil = "</script><script>alert(1)</script>\"\\\n# TYPE x\xff&";
  Use(evil);
  const HttpReply status = Ask("/status.json", kOperator);
  EXPECT_EQ(status.fields.at("content-type"), "application/json");
  EXPECT_EQ(status.fields.at("x-content-type-options"), "nosniff");
  const json parsed = json::parse(status.body, nullptr, false);
  ASSERT_FALSE(parsed.is_discarded());
  EXPECT_EQ(parsed["watch"]["prefixes"][0]["tenant"],
            "</script><script>alert(1)</script>\"\\\n# TYPE x\xef\xbf\xbd&");
  const Exposition e = ParseExposition(Ask("/metrics", kOperator).body);
  EXPECT_TRUE(e.wrong.empty()) << e.wrong.front();
  EXPECT_FALSE(e.Has("x\xff&"));
}

TEST_F(HttpTest, WithoutTheOptionThereIsNone) {
  DaemonProcess daemon(dir_.path());
  ASSERT_TRUE(daemon.ready());
  EXPECT_EQ(daemon.ready_line().find("http"), std::string::npos);
}

}  // namespace
}  // namespace prefixd::testing
