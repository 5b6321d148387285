// Tests that a daemon's end is told from the one that was asked for, with programs in its place.
#include "bench/steps/daemon_child.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

class DaemonChildTest : public ::testing::Test {
 protected:
  // A program that says that it serves, does `what`, and ends on SIGTERM with `status`.
  std::string Program(const std::string& what, int status = 0) const {
    const fs::path file = dir_ / "program";
    testing::WriteFile(file,
                       "#!/bin/bash\necho began\n"
                       "while [ \"$1\" != --ready-fd ]; do shift; done\n"
                       "trap 'exit " +
                           std::to_string(status) +
                           "' TERM\n"
                           "printf x >&$2\n" +
                           what + "\n");
    ::chmod(file.c_str(), 0755);
    return file;
  }
  static constexpr const char* kServe = "while :; do sleep 0.01; done";

  const testing::TempDir dir_;
};

TEST_F(DaemonChildTest, EndsAsAsked) {
  fs::path folder;
  {
    DaemonChild daemon({}, dir_.path());
    EXPECT_TRUE(daemon.Stop().ok());  // nothing was started
    ASSERT_TRUE(daemon.Start(Program(kServe), {}).ok());
    folder = daemon.dir();
    EXPECT_TRUE(daemon.Stop().ok());
    ASSERT_TRUE(daemon.Start(Program(kServe), {}).ok());
    EXPECT_EQ(daemon.dir(), folder);
    // Another benchmark that begins meanwhile leaves it alone.
    DaemonChild another({}, dir_.path());
    ASSERT_TRUE(another.Start(Program(kServe), {}).ok());
    EXPECT_TRUE(fs::exists(folder / "log"));
    EXPECT_TRUE(daemon.Kill().ok());
    EXPECT_TRUE(daemon.Kill().ok());
  }
  EXPECT_FALSE(fs::exists(folder));
}

TEST_F(DaemonChildTest, AnotherEndIsAnError) {
  DaemonChild daemon({}, dir_.path());
  ASSERT_TRUE(daemon.Start(Program(kServe, 3), {}).ok());
  Status ended = daemon.Stop();
  ASSERT_FALSE(ended.ok());
  EXPECT_EQ(ended.error().code, Code::kInternal);
  EXPECT_NE(ended.error().message.find("ended with status 3: began"), std::string::npos)
      << ended.error().message;
  ASSERT_TRUE(daemon.Start(Program("kill -SEGV $$"), {}).ok());
  siginfo_t info;
  ::waitid(P_PID, static_cast<id_t>(daemon.pid()), &info, WEXITED | WNOWAIT);
  ended = daemon.Kill();
  ASSERT_FALSE(ended.ok());
  EXPECT_NE(ended.error().message.find("was ended by signal 11 before it was killed"),
            std::string::npos)
      << ended.error().message;
  ended = daemon.Start("/bin/false", {});
  ASSERT_FALSE(ended.ok());
  EXPECT_EQ(ended.error().code, Code::kUnavailable);
}

}  // namespace
}  // namespace prefixd::bench
