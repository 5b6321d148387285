// Tests what prefixctl says of a daemon that is well while its disk is not: it does not call the
// daemon absent, and not damaged what could not be read.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/daemon/connections/stepping_store.h"
#include "tests/daemon/daemon_in_process.h"
#include "tests/daemon/daemon_process.h"
#include "tests/support/test.h"

namespace prefixd::testing {
namespace {

// A store whose disk does not answer, or answers with errors.
class SickStore final : public SteppingStore {
 public:
  using SteppingStore::SteppingStore;
  Status RemoveModel(std::string_view) override {
    return Error{Code::kUnavailable, "the disk did not answer within 30000 ms"};
  }
  Result<VerifySummary> VerifyTenant(std::string_view tenant, const ProgressFn&) override {
    VerifySummary summary{2, 10, 0, 40960, {}, {"a", "b"}, {"segment c: cannot read page 3"}};
    if (tenant == "both") summary.damaged = {"segment d: page 4 does not verify"};
    return summary;
  }
};

class SilentDiskTest : public ::testing::Test {
 protected:
  Finished Run(std::vector<std::string> args) const {
    args.insert(args.end(), {"--socket", daemon_.path()});
    return RunProgram(PREFIXCTL_BINARY, args);
  }
  daemon::DaemonInProcess daemon_{
      std::make_unique<SickStore>(std::make_shared<SteppingStore::Control>()), daemon::Config{}};
};

TEST_F(SilentDiskTest, IsNoAbsentDaemon) {
  const Finished silent = Run({"models", "remove", "m"});
  EXPECT_EQ(silent.code, 1) << silent.err;
  EXPECT_NE(silent.err.find("did not answer"), std::string::npos) << silent.err;
  daemon_.Stop();
  EXPECT_EQ(Run({"models", "remove", "m"}).code, 3);
}

TEST_F(SilentDiskTest, WhatCouldNotBeReadIsNotCalledQuarantined) {
  const Finished unread = Run({"prefixes", "verify", "--quiet"});
  EXPECT_EQ(unread.code, 1);
  EXPECT_NE(unread.out.find(": 1 not read\nnot read: segment c"), std::string::npos) << unread.out;
  EXPECT_NE(unread.err.find("1 could not be read"), std::string::npos) << unread.err;
  EXPECT_EQ((unread.out + unread.err).find("damaged"), std::string::npos);
  EXPECT_EQ((unread.out + unread.err).find("quarantined"), std::string::npos);
  const Finished both = Run({"prefixes", "verify", "--quiet", "--tenant", "both"});
  EXPECT_EQ(both.code, 1);
  EXPECT_NE(both.out.find(": 1 damaged, 1 not read\ndamaged: segment d"), std::string::npos)
      << both.out;
  EXPECT_NE(both.err.find("1 damaged; segments are quarantined"), std::string::npos) << both.err;
  const auto json =
      nlohmann::json::parse(Run({"prefixes", "verify", "--json"}).out, nullptr, false);
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(json["unread"].size(), 1u);
  EXPECT_EQ(json["damaged"].size(), 0u);
}

}  // namespace
}  // namespace prefixd::testing
