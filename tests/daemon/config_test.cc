// The configuration: one table behind file, flags, printed form and documentation.
#include "daemon/config.h"

#include <unistd.h>

#include <fstream>
#include <sstream>

#include "tests/support/test.h"

namespace prefixd::daemon {
namespace {

class ConfigTest : public ::testing::Test {
 protected:
  // Result of loading `text` over the defaults.
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
  c.dir = "/data/with \"quotes\" and \\";
  c.tcp = "127.0.0.1:7411";
  c.host_tier_mib = 12345;
  c.host_tier_shares = "team-a=0.5, b=c=0.25";
  c.pin_host_tier = true;
  c.estimators = "none, moment/r4, scan";
  c.clusters = 16;
  c.choice_budgets = {0.005, 1, 0.25};
  c.tenant_quotas_mib = {{"", 1}, {"team a", 0}, {"b=\"c\"", 7}};
  c.log_level = "debug";
  const std::string printed = PrintConfig(c);
  ASSERT_TRUE(Load(printed).ok()) << Refusal(printed);
  EXPECT_EQ(PrintConfig(config_), printed);
  EXPECT_EQ(config_.dir, c.dir);
  EXPECT_EQ(config_.choice_budgets, c.choice_budgets);
  EXPECT_EQ(config_.tenant_quotas_mib, c.tenant_quotas_mib);
}

TEST_F(ConfigTest, SharesOfTheHostTier) {
  const auto shares = ParseShares(" team-a = 0.5,b=c=0.25,=0.25");
  ASSERT_TRUE(shares.ok()) << shares.error().message;
  using Share = std::pair<std::string, double>;
  EXPECT_EQ(*shares, (std::vector<Share>{{"team-a", 0.5}, {"b=c", 0.25}, {"", 0.25}}));
  EXPECT_TRUE(ParseShares("").ok());
  for (const char* bad : {"a", "a=", "a=x", "a=0", "a=1.5", "a=-1", "a=nan", "a=0.5,", "a=0.5 b",
                          "a=0.5,a=0.1", "a=0.7,b=0.7"}) {
    EXPECT_EQ(ParseShares(bad).ok(), std::string(bad) == "a=0.5,") << bad;
  }
  Config config;
  config.host_tier_shares = "a=2";
  EXPECT_FALSE(CheckConfig(config).ok());
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

TEST_F(ConfigTest, FlagsSetEveryKey) {
  for (const ConfigItem& item : ConfigItems()) {
    Config c;
    const char* text = !item.choices.empty()      ? item.choices.back().data()
                       : item.member.index() == 1 ? "17"
                       : item.member.index() == 2 ? "true"
                       : item.member.index() == 3 ? "0.5,0.25"
                       : item.member.index() == 4 ? "a=1,b c=20"
                                                  : "text";
    Status s = SetItem(item, text, &c);
    EXPECT_TRUE(s.ok()) << item.path() << (s.ok() ? "" : s.error().message);
    if (item.member.index() == 1) {
      EXPECT_FALSE(SetItem(item, "seventeen", &c).ok()) << item.path();
      EXPECT_FALSE(SetItem(item, "18446744073709551615", &c).ok()) << item.path();
    }
  }
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
  EXPECT_FALSE(CheckConfig(c).ok());  // the world, without a token
  c.tcp_token_file = "/etc/prefixd/token";
  EXPECT_TRUE(CheckConfig(c).ok());
}

TEST_F(ConfigTest, EveryKeyReachesItsPlaceAndIsDocumented) {
  ASSERT_TRUE(
      Load("[store]\nhost_tier_mib = 3\nquota_mib = 7\ntenant_quota_mib = 2\nevict = 'never'\n"
           "read_deadline_ms = 250\n[store.tenant_quotas_mib]\nteam-a = 4\n[ingest]\nn_tail = 9\n")
          .ok());
  const RuntimeOptions o = config_.Runtime();
  EXPECT_EQ(o.host_tier_bytes, 3u << 20);
  EXPECT_EQ(o.quota_bytes, 7u << 20);
  EXPECT_EQ(o.read_deadline_ms, 250u);
  EXPECT_EQ(o.tenant_quota_bytes, 2u << 20);
  EXPECT_EQ(o.tenant_quotas, (std::map<std::string, uint64_t>{{"team-a", 4u << 20}}));
  EXPECT_EQ(o.evict, "never");
  EXPECT_EQ(o.scrub_bytes_per_second, 32u << 20);
  EXPECT_EQ(o.scrub_interval_hours, 168u);
  EXPECT_EQ(o.anchors.n_tail, 9u);

  std::stringstream docs;
  docs << std::ifstream(std::string(PREFIXD_SOURCE_DIR) + "/docs/operations.md").rdbuf();
  for (const ConfigItem& item : ConfigItems()) {
    EXPECT_NE(docs.str().find("`" + item.path() + "`"), std::string::npos)
        << "docs/operations.md does not describe " << item.path();
  }
}

}  // namespace
}  // namespace prefixd::daemon
