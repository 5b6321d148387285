// Tests the configuration: one table behind file, flags, printed form and documentation.
#include "daemon/settings/config.h"

#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/test.h"

namespace prefixd::daemon {
namespace {

class ConfigTest : public ::testing::Test {
 protected:
  // Loads `text` over the defaults.
  Status Load(const std::string& text) {
    config_ = Config();
    std::ofstream(file_) << text;
    return LoadConfig(file_, &config_);
  }
  std::string Refusal(const std::string& text) {
    Status s = Load(text);
    return s.ok() ? "" : s.error().message;
  }
  void TearDown() override { std::filesystem::remove(file_); }

  const std::string file_ =
      ::testing::TempDir() + "prefixd-config-" + std::to_string(::getpid()) + ".toml";
  Config config_;
};

TEST_F(ConfigTest, PrintedFormReadsBackToTheSame) {
  Config c;
  c.store.dir = "/data/with \"quotes\" and \\";
  c.tcp = "127.0.0.1:7411";
  c.store.host_tier_bytes = 12345ull << 20;
  c.store.host_tier_shares = {{"b=c", 0.25}, {"team-a", 0.5}};
  c.store.pin_host_tier = true;
  c.store.estimators = *ParseVariants("none, moment/r4, scan");
  c.store.choice_budgets = {0.005, 1, 0.25};
  c.store.tenant_quotas = {{"", 1 << 20}, {"team a", 0}, {"b=\"c\"", 7 << 20}};
  c.log_level = "debug";
  const std::string printed = PrintConfig(c);
  ASSERT_TRUE(Load(printed).ok()) << Refusal(printed);
  EXPECT_EQ(PrintConfig(config_), printed);
  EXPECT_EQ(config_.store.dir, c.store.dir);
  EXPECT_EQ(config_.store.choice_budgets, c.store.choice_budgets);
  EXPECT_EQ(config_.store.tenant_quotas, c.store.tenant_quotas);
  EXPECT_EQ(config_.store.host_tier_shares, c.store.host_tier_shares);
  EXPECT_EQ(config_.store.estimators, c.store.estimators);
}

// A package keeps the printed form: an option that goes, or a default that changes, is no matter
// there unless somebody has set it.
TEST_F(ConfigTest, WhatIsLeftAtItsDefaultIsPrintedAsAComment) {
  const auto active = [](const Config& config) {
    std::istringstream lines(PrintConfig(config));
    std::vector<std::string> found;
    for (std::string line; std::getline(lines, line);) {
      if (!line.empty() && line[0] != '#' && line[0] != '[') found.push_back(line);
    }
    return found;
  };
  EXPECT_EQ(active({}), std::vector<std::string>{});
  EXPECT_NE(PrintConfig({}).find("\n#min_free_mib = \"auto\"\n"), std::string::npos);
  Config packaged;
  packaged.store.dir = "/var/lib/prefixd";
  packaged.socket = "/run/prefixd/prefixd.sock";
  packaged.socket_access = "group";
  EXPECT_EQ(active(packaged), std::vector<std::string>{"socket_access = 'group'"});
}

TEST_F(ConfigTest, TablesOnTheCommandLine) {
  const auto given = [](const char* text) {
    Config config;
    const Status status = ApplyFlags({{"host-tier-shares", text}}, &config);
    return status.ok() ? Result(config.store.host_tier_shares) : status.error();
  };
  const auto shares = given(" team-a = 0.5,b=c=0.25,=0.25");
  ASSERT_TRUE(shares.ok()) << shares.error().message;
  using Share = std::pair<std::string, double>;
  EXPECT_EQ(*shares, (std::vector<Share>{{"", 0.25}, {"b=c", 0.25}, {"team-a", 0.5}}));
  EXPECT_TRUE(given("").ok());
  EXPECT_TRUE(given("a=0.5,").ok());
  for (const char* bad : {"a", "a=", "a=x", "a=0", "a=1.5", "a=-1", "a=nan", "a=0.5 b",
                          "a=0.5,a=0.1", "a=0.7,b=0.7"}) {
    EXPECT_FALSE(given(bad).ok()) << bad;
  }
}

TEST_F(ConfigTest, RefusalsNameFileLineAndKey) {
  EXPECT_EQ(
      Refusal("dir = '/d'\n[store]\nhost_teir_mib = 5\n"),
      file_ + ":3: unknown key 'store.host_teir_mib'; `prefixd --print-config` lists all keys");
  EXPECT_EQ(Refusal("\nsokcet = 'x'\n").find(file_ + ":2: unknown key 'sokcet'"), 0u);
  EXPECT_EQ(Refusal("[listn]\nsocket = 'x'\n").find(file_ + ":1: unknown key 'listn'"), 0u);
  EXPECT_NE(Refusal("dir = 7\n").find(":1: dir must be a string"), std::string::npos);
  EXPECT_NE(Refusal("[limits]\nworkers = 0\n").find("limits.workers must be from 1 to 1024"),
            std::string::npos);
  EXPECT_NE(Refusal("[limits]\nworkers = -3\n").find("limits.workers"), std::string::npos);
  EXPECT_NE(Refusal("[log]\nlevel = 'loud'\n").find("must be one of trace"), std::string::npos);
  EXPECT_NE(Refusal("[ingest]\nchoice_budgets = [0.1, 2.0]\n").find("choice_budgets"),
            std::string::npos);
  EXPECT_NE(Refusal("[store.tenant_quotas_mib]\na = -1\n").find("store.tenant_quotas_mib must be"),
            std::string::npos);
  EXPECT_NE(Refusal("[store]\ntenant_quotas_mib = 5\n").find("must be a table"), std::string::npos);
  EXPECT_EQ(Refusal("dir = \n").find(file_ + ":1: "), 0u);
  EXPECT_EQ(LoadConfig("/nonexistent/x.toml", &config_).error().code, Code::kNotFound);
}

TEST_F(ConfigTest, WholeConfigurations) {
  Config c;
  EXPECT_TRUE(CheckConfig(c).ok());
  c.socket = std::string(108, 'x');
  EXPECT_NE(CheckConfig(c).error().message.find("socket path too long"), std::string::npos);
  c.socket = "";
  EXPECT_FALSE(CheckConfig(c).ok());  // nothing to listen on
  c.tcp = "127.0.0.1:1";
  EXPECT_TRUE(CheckConfig(c).ok());
  c.tcp = "0.0.0.0:1";
  EXPECT_FALSE(CheckConfig(c).ok());  // open to every host, without a token
  c.tcp_insecure = true;
  EXPECT_TRUE(CheckConfig(c).ok());
  c.tcp_insecure = false;
  c.tokens_file = "/etc/prefixd/tokens.toml";
  // Tokens and prompts would be overheard.
  EXPECT_NE(CheckConfig(c).error().message.find("set tls.certificate"), std::string::npos);
  c.tls_certificate = "/etc/prefixd/daemon.pem";
  EXPECT_FALSE(CheckConfig(c).ok());  // without its key
  c.tls_key = "/etc/prefixd/daemon.key";
  EXPECT_TRUE(CheckConfig(c).ok());
  c.tokens_file = "";
  EXPECT_NE(CheckConfig(c).error().message.find("set auth.tokens"), std::string::npos);
  c.tls_client_ca = "/etc/prefixd/clients.pem";
  EXPECT_TRUE(CheckConfig(c).ok());
  c.tcp = "";
  c.socket = "/run/prefixd.sock";
  EXPECT_NE(CheckConfig(c).error().message.find("set listen.tcp"), std::string::npos);
  c.tls_certificate = c.tls_key = "";
  EXPECT_FALSE(CheckConfig(c).ok());  // only tls.client_ca
  c.tls_client_ca = "";
  c.tcp = "127.0.0.1:1";
  c.socket = "/run/prefixd.sock";
  c.socket_group = "engines";  // but only its user may connect
  EXPECT_FALSE(CheckConfig(c).ok());
  c.socket_access = "group";
  EXPECT_TRUE(CheckConfig(c).ok());
}

TEST_F(ConfigTest, MemoryIsWrittenWithItsUnit) {
  const auto flag = [&](const std::string& name, const std::string& text) {
    config_ = Config();
    return ApplyFlags({{name, text}}, &config_);
  };
  for (const auto& [text, bytes] : std::map<std::string, uint64_t>{
           {"8GiB", 8ull << 30}, {"512MiB", 512 << 20}, {"1TiB", 1ull << 40}, {"300", 300 << 20}}) {
    ASSERT_TRUE(flag("memory", text).ok()) << text;
    EXPECT_EQ(config_.store.memory_bytes, bytes) << text;
  }
  for (const char* text :
       {"8GB", "8 GiB x", "-1GiB", "GiB", "1.5GiB", "auto", "17TiB", "99999999999999TiB"}) {
    EXPECT_FALSE(flag("memory", text).ok()) << text;
  }
  ASSERT_TRUE(flag("host-tier-mib", "2GiB").ok());
  EXPECT_EQ(config_.store.host_tier_bytes, 2ull << 30);
  ASSERT_TRUE(flag("host-tier-mib", "auto").ok());
  EXPECT_EQ(config_.store.host_tier_bytes, kByMemory);
  ASSERT_TRUE(flag("min-free-mib", "auto").ok());
  EXPECT_EQ(config_.store.min_free_bytes, kByDisk);
  ASSERT_TRUE(flag("min-free-mib", "1GiB").ok());
  EXPECT_EQ(config_.store.min_free_bytes, 1ull << 30);
  EXPECT_FALSE(flag("quota-mib", "auto").ok());
  ASSERT_TRUE(Load("[store]\nmemory_mib = 4096\nhost_tier_mib = 'auto'\n").ok());
  EXPECT_EQ(config_.store.memory_bytes, 4ull << 30);
  EXPECT_EQ(config_.store.host_tier_bytes, kByMemory);
  EXPECT_NE(Refusal("[store]\nquota_mib = 'auto'\n"), "");
}

// The unit that people write differs from the member's.
TEST_F(ConfigTest, KeysReachTheirMembers) {
  ASSERT_TRUE(
      Load("[store]\nhost_tier_mib = 3\nquota_mib = 7\ntenant_quota_mib = 2\nevict = 'never'\n"
           "read_deadline_ms = 250\n[store.tenant_quotas_mib]\nteam-a = 4\n"
           "[ingest]\nn_tail = 9\nrecall_percent = 97\n")
          .ok());
  const RuntimeOptions& o = config_.store;
  EXPECT_EQ(o.host_tier_bytes, 3u << 20);
  EXPECT_EQ(o.quota_bytes, 7u << 20);
  EXPECT_EQ(o.read_deadline_ms, 250u);
  EXPECT_EQ(o.tenant_quota_bytes, 2u << 20);
  EXPECT_EQ(o.tenant_quotas, (std::map<std::string, uint64_t>{{"team-a", 4u << 20}}));
  EXPECT_EQ(o.evict, "never");
  EXPECT_EQ(o.anchors.n_tail, 9u);
  EXPECT_EQ(o.recall_target, 0.97);
  EXPECT_EQ(o.scrub_bytes_per_second, 32u << 20);
}

}  // namespace
}  // namespace prefixd::daemon
