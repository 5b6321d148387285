// Tests completion in real shells, beside a real daemon. zsh and fish are tested where they are
// installed.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/prefixctl/prefixctl_fixture.h"

namespace prefixd {
namespace {

using testing::Finished;
using testing::RunProgram;

std::string Installed(const std::string& shell) {
  for (const std::string dir : {"/bin/", "/usr/bin/"}) {
    if (std::filesystem::exists(dir + shell)) return dir + shell;
  }
  return "";
}

class CompletionTest : public testing::PrefixctlFixture {
 protected:
  CompletionTest() : PrefixctlFixture(testing::MakePrompt(120, 5), "a label") {}

  void SetUp() override {
    PrefixctlFixture::SetUp();
    // The scripts call the prefixctl that a user would run.
    path_ = std::filesystem::path(PREFIXCTL_BINARY).parent_path().string() + ":" +
            (std::getenv("PATH") ? std::getenv("PATH") : "/bin:/usr/bin");
    for (const char* shell : {"bash", "zsh", "fish"}) {
      const Finished made = RunProgram(PREFIXCTL_BINARY, {"completion", shell});
      ASSERT_EQ(made.code, 0) << made.err;
      std::ofstream(Script(shell)) << made.out;
    }
  }

  std::string Script(const std::string& shell) const { return dir_.path() / ("complete." + shell); }

  // Returns what bash offers for the last word of a line; words are split as bash splits them.
  std::string Bash(const std::string& words) const {
    const Finished f = RunProgram(
        "/bin/bash", {"--norc", "-c",
                      "export PATH='" + path_ + "'; source '" + Script("bash") + "'; COMP_WORDS=(" +
                          words + "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); " +
                          "_prefixctl \"${COMP_WORDS[0]}\"; echo \"${COMPREPLY[*]}\""});
    EXPECT_EQ(f.err, "") << words;
    return f.out.empty() ? "" : f.out.substr(0, f.out.size() - 1);
  }

  std::string path_;
};

TEST_F(CompletionTest, BashOffersCommandsOptionsAndChoices) {
  EXPECT_EQ(Bash("prefixctl pre"), "prefixes");
  EXPECT_EQ(Bash("prefixctl models ''"), "list show register remove");
  EXPECT_EQ(Bash("prefixctl --socket models prefixes un"), "unpin");
  EXPECT_EQ(Bash("prefixctl prefixes verify --q"), "--quiet");
  EXPECT_EQ(Bash("prefixctl prefixes ttl 0123 n"), "never");
  EXPECT_EQ(Bash("prefixctl completion ''"), "bash zsh fish");
  EXPECT_EQ(Bash("prefixctl status --tenant ''"), "");
  EXPECT_EQ(Bash("prefixctl no-such-command --js"), "--json");
  EXPECT_EQ(Bash("/usr/bin/prefixd --print"), "--print-config");
  EXPECT_EQ(Bash("prefixd --io u"), "uring");
  EXPECT_EQ(Bash("prefixd --io = t"), "threads");  // --io=t
  EXPECT_EQ(Bash("prefixd --io ="), "auto uring threads");
  EXPECT_EQ(Bash("prefixd --recluster ''"), "true false");
  EXPECT_EQ(Bash("prefixd --config " + dir_.path().string() + "/complete.b"),
            dir_.path().string() + "/complete.bash");
}

TEST_F(CompletionTest, BashAsksTheDaemon) {
  const std::string where = "--socket " + daemon_->socket();
  EXPECT_EQ(Bash("prefixctl models show " + where + " ''"), "test-model");
  EXPECT_EQ(Bash("prefixctl prefixes show " + where + " --tenant = team-a ''"), prefix_);
  EXPECT_EQ(Bash("prefixctl " + where + " --all-tenants prefixes pin " + prefix_.substr(0, 5)),
            prefix_);
  EXPECT_EQ(Bash("prefixctl prefixes show " + where + " ''"), "");  // another tenant's prefix
  EXPECT_EQ(Bash("prefixctl prefixes show --socket /nonexistent ''"), "");
}

TEST_F(CompletionTest, ZshOffersTheSame) {
  const std::string zsh = Installed("zsh");
  if (zsh.empty()) GTEST_SKIP() << "zsh is not installed";
  const Finished syntax = RunProgram(zsh, {"-f", "-n", Script("zsh")});
  EXPECT_EQ(syntax.code, 0) << syntax.err;
  // Returns what zsh's completion system receives, which then picks what fits.
  const auto offers = [&](const std::string& words) {
    const Finished f =
        RunProgram(zsh, {"-f", "-c",
                         "compdef() { }; compset() { }; _files() { print files }; "
                         "compadd() { shift; print -r -- $@ }; "
                         "_describe() { local a=${@[-1]}; print -r -- ${(@)${(@P)a}%%:*} }; "
                         "PATH='" +
                             path_ + "'; source '" + Script("zsh") + "'; words=(" + words +
                             "); CURRENT=$#words PREFIX=$words[-1]; _prefixctl"});
    EXPECT_EQ(f.err, "") << words;
    return f.out.empty() ? "" : f.out.substr(0, f.out.size() - 1);
  };
  EXPECT_EQ(offers("prefixctl pre"), "status stats models prefixes recover completion");
  EXPECT_EQ(offers("prefixctl -s models models ''"), "list show register remove");
  EXPECT_NE(offers("prefixctl prefixes verify --q").find(" --quiet"), std::string::npos);
  EXPECT_EQ(offers("prefixctl recover --dir ''"), "files");
  EXPECT_EQ(offers("prefixd --io ''"), "auto uring threads");
  EXPECT_EQ(offers("prefixd --io=u"), "auto uring threads");
  EXPECT_EQ(offers("prefixctl prefixes ttl abc ''"), "never");
  EXPECT_EQ(offers("prefixctl prefixes show --socket " + daemon_->socket() + " --all-tenants ''"),
            prefix_);
}

TEST_F(CompletionTest, FishOffersTheSame) {
  const std::string fish = Installed("fish");
  if (fish.empty()) GTEST_SKIP() << "fish is not installed";
  ::setenv("HOME", dir_.path().c_str(), 1);
  const auto offers = [&](const std::string& line) {
    const Finished f = RunProgram(fish, {"--no-config", "-c",
                                         "set -gx PATH (string split : '" + path_ + "'); source " +
                                             Script("fish") + "; complete -C \"" + line + "\""});
    EXPECT_EQ(f.err, "") << line;
    std::string words;  // without descriptions
    for (size_t at = 0; at < f.out.size();) {
      const size_t end = f.out.find('\n', at), tab = f.out.find('\t', at);
      words += (words.empty() ? "" : " ") + f.out.substr(at, std::min(end, tab) - at);
      at = end + 1;
    }
    return words;
  };
  EXPECT_EQ(offers("prefixctl pre"), "prefixes");
  EXPECT_EQ(offers("prefixctl models "), "list register remove show");
  EXPECT_EQ(offers("prefixctl prefixes verify --qu"), "--quiet");
  EXPECT_EQ(offers("prefixd --io "), "auto threads uring");
  EXPECT_EQ(offers("prefixctl prefixes show --socket " + daemon_->socket() + " --all-tenants "),
            prefix_);
}

TEST_F(CompletionTest, OtherShellsAreRefused) {
  EXPECT_EQ(RunProgram(PREFIXCTL_BINARY, {"completion", "tcsh"}).code, 2);
  EXPECT_EQ(RunProgram(PREFIXCTL_BINARY, {"completion"}).code, 2);
}

}  // namespace
}  // namespace prefixd
