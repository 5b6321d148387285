// Tests prefixctl against the real daemon: every command, as text and as JSON, and its exit codes.
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/tables/statistics.h"
#include "tests/prefixctl/prefixctl_fixture.h"

namespace prefixd {
namespace {

using nlohmann::json;
using testing::Finished;

class PrefixctlTest : public testing::PrefixctlFixture {
 protected:
  PrefixctlTest() : PrefixctlFixture(testing::MakePrompt(120, 5), "a label") {}
  void SetUp() override {
    PrefixctlFixture::SetUp();
    if (HasFatalFailure()) return;
    ASSERT_TRUE(client_->WaitReady(prefix_, {}).ok());
  }

  json RunJson(std::vector<std::string> args) {
    args.push_back("--json");
    const Finished f = Run(args);
    EXPECT_EQ(f.code, 0) << f.err;
    json parsed = json::parse(f.out, nullptr, false);
    EXPECT_FALSE(parsed.is_discarded()) << f.out;
    return parsed;
  }
};

TEST_F(PrefixctlTest, JsonOfEveryCommand) {
  EXPECT_EQ(RunJson({"status"})["server"]["pid"], daemon_->pid());
  EXPECT_EQ(RunJson({"stats"})["runtime"]["prefixes"], 1);
  const json tier = RunJson({"stats", "--tenant", "team-a"})["runtime"]["host_tenants"];
  ASSERT_EQ(tier.size(), 1u);
  EXPECT_EQ(tier[0]["tenant"], "team-a");
  EXPECT_GT(tier[0]["bytes"], 0);
  EXPECT_EQ(RunJson({"stats"})["runtime"]["host_tenants"].size(), 0u);
  EXPECT_EQ(RunJson({"models", "list"})[0]["name"], "test-model");
  EXPECT_EQ(RunJson({"models", "show", "test-model"})["geometry"]["n_kv_heads"], 2);
  EXPECT_EQ(RunJson({"prefixes", "list"}).size(), 0u);  // tenant ""
  const json all = RunJson({"prefixes", "list", "--all-tenants"});
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0]["id"], prefix_);
  EXPECT_EQ(all[0]["tenant"], "team-a");
  EXPECT_EQ(RunJson({"prefixes", "list", "--tenant", "team-a"}), all);
  EXPECT_EQ(RunJson({"prefixes", "show", prefix_, "--all-tenants"})["summary"]["label"], "a label");
  EXPECT_EQ(RunJson({"prefixes", "verify", "--all-tenants"})["segments"], 1);
  EXPECT_EQ(RunJson({"prefixes", "remove", prefix_, "--tenant", "team-a"})["removed"], prefix_);
  EXPECT_EQ(RunJson({"prefixes", "list", "--all-tenants"}).size(), 0u);
}

TEST_F(PrefixctlTest, TextSaysTheSame) {
  EXPECT_NE(Run({"status"}).out.find("prefixes"), std::string::npos);
  const std::string stats = Run({"stats"}).out;
  ForEachStatistic<RuntimeStats>([&](const auto& statistic) {
    if (statistic.kind == StatisticKind::kList) return;
    EXPECT_NE(stats.find("runtime." + std::string(statistic.name) + " "), std::string::npos);
  });
  EXPECT_NE(stats.find("server.connections_total "), std::string::npos);
  EXPECT_NE(Run({"stats", "--all-tenants"}).out.find("'team-a'"), std::string::npos);
  EXPECT_NE(Run({"models", "list"}).out.find("2 layers, 4/2 heads"), std::string::npos);
  EXPECT_NE(Run({"prefixes", "list", "--all-tenants"}).out.find(prefix_), std::string::npos);
  EXPECT_NE(Run({"prefixes", "show", prefix_, "--tenant", "team-a"}).out.find("a label"),
            std::string::npos);
  const Finished verify = Run({"prefixes", "verify", prefix_, "--tenant", "team-a"});
  EXPECT_NE(verify.out.find("all good"), std::string::npos);
  EXPECT_NE(verify.err.find("verify: "), std::string::npos);  // progress
  EXPECT_EQ(Run({"prefixes", "verify", "--all-tenants", "--quiet"}).err, "");
}

TEST_F(PrefixctlTest, PinsUnpinsAndLimitsTheTimeToLive) {
  const auto kept = [&](const char* field) {
    const json shown = RunJson({"prefixes", "show", prefix_, "--tenant", "team-a"});
    const json listed = RunJson({"prefixes", "list", "--tenant", "team-a"});
    EXPECT_EQ(shown["summary"][field], listed.at(0)[field]);
    return shown["summary"][field];
  };
  const auto run = [&](std::vector<std::string> args) {
    args.insert(args.begin(), "prefixes");
    args.insert(args.end(), {"--tenant", "team-a"});
    return Run(args);
  };
  EXPECT_EQ(kept("pinned"), false);
  EXPECT_NE(run({"pin", prefix_}).out.find("pinned"), std::string::npos);
  EXPECT_EQ(kept("pinned"), true);
  EXPECT_NE(run({"list"}).out.find("pinned"), std::string::npos);
  EXPECT_EQ(run({"ttl", prefix_, "100000"}).code, 0);
  EXPECT_GT(kept("expires_unix_ms"), 0);
  EXPECT_NE(run({"show", prefix_}).out.find("until 2"), std::string::npos);
  EXPECT_EQ(kept("pinned"), true);
  EXPECT_EQ(run({"ttl", prefix_, "never"}).code, 0);
  EXPECT_EQ(kept("expires_unix_ms"), 0);
  EXPECT_EQ(RunJson({"prefixes", "unpin", prefix_, "--all-tenants"})["summary"]["pinned"], false);

  for (const char* wrong : {"0", "soon", "1d"}) {
    EXPECT_EQ(Run({"prefixes", "ttl", "--tenant", "team-a", prefix_, wrong}).code, 1) << wrong;
  }
  EXPECT_EQ(Run({"prefixes", "pin", prefix_}).code, 3);  // another tenant's
  const json tenants = RunJson({"stats", "--all-tenants"})["runtime"]["tenants"];
  ASSERT_EQ(tenants.size(), 1u);
  EXPECT_EQ(tenants[0]["tenant"], "team-a");
  EXPECT_GT(tenants[0]["bytes"], 0);
  EXPECT_EQ(RunJson({"stats"})["runtime"]["tenants"].size(), 0u);  // tenant ""
  EXPECT_NE(Run({"stats", "--all-tenants"}).out.find("team-a"), std::string::npos);
}

TEST_F(PrefixctlTest, RegistersAModelFromAFile) {
  std::ofstream(dir_.path() / "m.json")
      << R"({"geometry": {"n_layers": 3, "n_q_heads": 8, "n_kv_heads": 4, "key_dim": 64,
             "value_dim": 64, "dtype": "f16"}, "identity": {"weights": "abc", "rope": "1e4"}})";
  const Finished f =
      Run({"models", "register", "--geometry", dir_.path() / "m.json", "--name", "m"});
  EXPECT_EQ(f.code, 0) << f.err;
  const json m = RunJson({"models", "show", "m"});
  EXPECT_EQ(m["geometry"]["layers"].size(), 3u);
  EXPECT_EQ(m["geometry"]["layers"][0]["scale"], 0.125);
  EXPECT_EQ(Run({"models", "remove", "m"}).code, 0);
  EXPECT_EQ(Run({"models", "remove", "m"}).code, 3);
  const Finished used = Run({"models", "remove", "test-model"});
  EXPECT_EQ(used.code, 1);
  EXPECT_NE(used.err.find("used by 1 stored segments"), std::string::npos) << used.err;
  std::ofstream(dir_.path() / "bad.json") << R"({"name": "b", "geometry": {"n_layers": 0}})";
  EXPECT_EQ(Run({"models", "register", "--geometry", dir_.path() / "bad.json"}).code, 1);
  std::ofstream(dir_.path() / "broken.json") << "{";
  EXPECT_EQ(Run({"models", "register", "--geometry", dir_.path() / "broken.json"}).code, 1);
}

TEST_F(PrefixctlTest, ExitCodes) {
  EXPECT_EQ(Run({"models", "show", "nobody"}).code, 3);
  EXPECT_EQ(Run({"prefixes", "show", std::string(32, '0')}).code, 3);
  EXPECT_EQ(Run({"prefixes", "remove", prefix_}).code, 3);  // another tenant's
  // A file of this machine that is missing is nothing that the daemon lacks.
  EXPECT_EQ(Run({"models", "register", "--geometry", "/nonexistent"}).code, 1);
  EXPECT_EQ(Run({"prefixes", "put", "/nonexistent"}).code, 1);
  for (const char* command : {"check", "add"}) {
    EXPECT_EQ(testing::RunProgram(PREFIXCTL_BINARY, {"key", command, "/nonexistent"}).code, 1);
  }
  EXPECT_EQ(Run({"prefixes", "show"}).code, 2);
  EXPECT_EQ(Run({"no-such-command"}).code, 2);
  EXPECT_EQ(testing::RunProgram(PREFIXCTL_BINARY, {"status", "--socket", "/nonexistent"}).code, 3);
  EXPECT_EQ(testing::RunProgram(PREFIXCTL_BINARY, {}).code, 2);
}

TEST_F(PrefixctlTest, RecoversALostCatalog) {
  const auto store = dir_.path() / "store";
  ASSERT_TRUE(std::filesystem::exists(store / "catalog"));
  const auto recover = [&](std::vector<std::string> more) {
    std::vector<std::string> args{"recover", "--dir", store};
    args.insert(args.end(), more.begin(), more.end());
    return testing::RunProgram(PREFIXCTL_BINARY, args);
  };
  const Finished in_use = recover({});
  EXPECT_EQ(in_use.code, 1);
  EXPECT_NE(in_use.err.find("in use by process"), std::string::npos) << in_use.err;
  daemon_.reset();
  std::filesystem::remove_all(store / "catalog");
  EXPECT_EQ(recover({"--nonsense"}).code, 2);
  const Finished done = recover({"--json", "--verify-data", "--quiet"});
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_EQ(done.err, "");
  const json report = json::parse(done.out, nullptr, false);
  EXPECT_EQ(report["segments"], 1);
  EXPECT_EQ(report["prefixes"], 1);
  ASSERT_NO_FATAL_FAILURE(StartIn(dir_.path()));
  EXPECT_EQ(RunJson({"prefixes", "list", "--all-tenants"})[0]["id"], prefix_);
  EXPECT_EQ(RunJson({"prefixes", "verify", "--all-tenants"})["segments"], 1);
  daemon_.reset();
  EXPECT_NE(recover({}).out.find("old catalog"), std::string::npos);
  EXPECT_TRUE(std::filesystem::exists(store / "catalog.lost-1"));
  EXPECT_EQ(testing::RunProgram(PREFIXCTL_BINARY, {"recover", "--dir", "/nonexistent"}).code, 3);
}

TEST(PrefixctlHelp, EveryCommandExplainsItselfWithAnExample) {
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{},
                                             {"status"},
                                             {"stats"},
                                             {"recover"},
                                             {"models"},
                                             {"models", "list"},
                                             {"models", "show"},
                                             {"models", "register"},
                                             {"prefixes"},
                                             {"prefixes", "list"},
                                             {"prefixes", "show"},
                                             {"prefixes", "remove"},
                                             {"prefixes", "pin"},
                                             {"prefixes", "unpin"},
                                             {"prefixes", "ttl"},
                                             {"prefixes", "verify"}}) {
    auto args = command;
    args.push_back("--help");
    const Finished f = testing::RunProgram(PREFIXCTL_BINARY, args);
    EXPECT_EQ(f.code, 0);
    EXPECT_NE(f.out.find("Example: prefixctl"), std::string::npos) << f.out;
  }
}

}  // namespace
}  // namespace prefixd
