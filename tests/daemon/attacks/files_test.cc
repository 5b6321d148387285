// What lies in the store's directory and should not: links that somebody put there, and a directory
// that others may write to. docs/security.md lists the attacks.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/daemon/connections/connect.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/expect_ok.h"
#include "tests/support/files.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

namespace fs = std::filesystem;
using testing::ConnectTo;
using testing::DaemonDir;
using testing::DaemonProcess;

class FileAttacksTest : public ::testing::Test {
 protected:
  // Leaves a store of one prompt, on which no daemon runs.
  void SetUp() override {
    DaemonProcess daemon(dir_.path());
    ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
    const auto client = ConnectTo(daemon);
    ASSERT_TRUE(client);
    const auto put = testing::PutPrompt(*client, prompt_);
    ASSERT_OK(put);
    ASSERT_OK(client->WaitReady(put->prefix, {}));
    Stop(daemon);
  }
  static void Stop(DaemonProcess& daemon) {
    daemon.Signal(SIGTERM);
    EXPECT_EQ(daemon.Wait(), 0) << daemon.Stderr();
  }
  // Returns what the daemon says that does not start.
  std::string Refusal() {
    DaemonProcess daemon(dir_.path());
    EXPECT_FALSE(daemon.ready());
    EXPECT_EQ(daemon.Wait(), 1);
    return daemon.Stderr();
  }
  std::vector<fs::path> Files(const std::string& extension) const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(store_ / "segments")) {
      if (entry.path().extension() == extension) found.push_back(entry.path());
    }
    return found;
  }
  // Moves a file away and puts a link to it in its place.
  fs::path Link(const fs::path& file) {
    const fs::path target = dir_.path() / ("moved-" + file.filename().string());
    fs::rename(file, target);
    fs::create_symlink(target, file);
    return target;
  }

  DaemonDir dir_;
  const fs::path store_ = dir_.path() / "store";
  const testing::Prompt prompt_ = testing::MakePrompt(300, testing::Seed("FileAttacks"));
};

TEST_F(FileAttacksTest, ADirectoryThatEverybodyMayWriteToIsRefused) {
  for (const fs::path& path : {store_, store_ / "segments", store_ / "catalog"}) {
    ASSERT_EQ(::chmod(path.c_str(), 0707), 0);
    const std::string said = Refusal();
    EXPECT_NE(said.find("chmod o-w " + path.string()), std::string::npos) << said;
    ASSERT_EQ(::chmod(path.c_str(), 0700), 0);
  }
  ASSERT_EQ(::chmod(store_.c_str(), 0770), 0);
  DaemonProcess daemon(dir_.path());
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  EXPECT_NE(daemon.Stderr().find("may be written by group"), std::string::npos) << daemon.Stderr();
}

TEST_F(FileAttacksTest, ADirectoryOfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give directories to others";
  for (const fs::path& path : {store_, store_ / "segments", store_ / "catalog"}) {
    ASSERT_EQ(::chown(path.c_str(), 12345, static_cast<gid_t>(-1)), 0);
    const std::string said = Refusal();
    EXPECT_NE(said.find(path.string() + " belongs to user 12345"), std::string::npos) << said;
    ASSERT_EQ(::chown(path.c_str(), 0, static_cast<gid_t>(-1)), 0);
  }
}

TEST_F(FileAttacksTest, LinkedDirectoriesAreRefusedAndALinkToTheWholeStoreIsNot) {
  for (const char* name : {"segments", "catalog"}) {
    const fs::path target = Link(store_ / name);
    const std::string said = Refusal();
    EXPECT_NE(said.find((store_ / name).string() + " is a symbolic link"), std::string::npos)
        << said;
    fs::remove(store_ / name);
    fs::rename(target, store_ / name);
  }
  Link(store_);
  DaemonProcess daemon(dir_.path());
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const auto client = ConnectTo(daemon);
  ASSERT_TRUE(client);
  EXPECT_EQ(client->Match({.model = prompt_.model.name, .tokens = prompt_.tokens})->n_tokens, 300u);
}

// A link is no segment, whatever it leads to: its rows are gone, and the target stays as it is.
TEST_F(FileAttacksTest, LinkedSegmentsAreNotRead) {
  ASSERT_EQ(Files(".seg").size(), 1u);
  const fs::path target = Link(Files(".seg")[0]);
  const std::string bytes = testing::ReadFile(target);
  {
    DaemonProcess daemon(dir_.path());
    ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
    const auto client = ConnectTo(daemon);
    ASSERT_TRUE(client);
    const auto match = client->Match({.model = prompt_.model.name, .tokens = prompt_.tokens});
    EXPECT_TRUE(!match.ok() || match->n_tokens == 0);
    const auto session = client->Attach({.model = prompt_.model.name, .tokens = prompt_.tokens});
    EXPECT_FALSE(session.ok());
    // Others are stored, under names of their own.
    ASSERT_OK(testing::PutPrompt(*client, testing::MakePrompt(300, 7)));
    Stop(daemon);
  }
  EXPECT_EQ(testing::ReadFile(target), bytes);
}

// Links under the names that the daemon is about to write: neither their targets are written to,
// nor does anything but the daemon's own files change.
TEST_F(FileAttacksTest, NothingIsWrittenThroughALink) {
  const fs::path victim = dir_.path() / "victim";
  testing::WriteFile(victim, "precious");
  fs::remove(store_ / "lock");
  fs::create_symlink(victim, store_ / "lock");
  const std::string said = Refusal();
  EXPECT_NE(said.find((store_ / "lock").string() + " is a symbolic link"), std::string::npos)
      << said;
  fs::remove(store_ / "lock");
  fs::create_symlink(victim, store_ / "STORE.tmp");
  for (const fs::path& blob : Files(".blob")) {
    fs::remove(blob);
    fs::create_symlink(victim, blob);
  }
  {
    DaemonProcess daemon(dir_.path());
    if (daemon.ready()) {
      const auto client = ConnectTo(daemon);
      ASSERT_TRUE(client);
      ASSERT_OK(testing::PutPrompt(*client, testing::MakePrompt(300, 7)));
      Stop(daemon);
    }
  }
  EXPECT_EQ(testing::ReadFile(victim), "precious");
}

}  // namespace
}  // namespace prefixd
