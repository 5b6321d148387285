// Tests tokens against the real daemon: who enters over TCP, what for, and until when.
#include <signal.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "client_lib/remote_store.h"
#include "daemon/access/token.h"
#include "daemon/access/token_file.h"
#include "tests/daemon/connections/connect.h"
#include "tests/daemon/connections/raw_client.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/expect_ok.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using daemon::HashToken;
using testing::DaemonDir;
using testing::DaemonProcess;
using testing::Eventually;
using testing::RunProgram;

class TokensTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const auto& [token, tenant] :
         std::vector<std::pair<std::string, std::string>>{{"one", "a"}, {"two", "b"}}) {
      ASSERT_OK(daemon::AppendToken(file_, {HashToken(token), "", {.tenant = tenant}}));
    }
    ASSERT_OK(
        daemon::AppendToken(file_, {HashToken("reader"), "", {.tenant = "a", .write = false}}));
    ASSERT_OK(
        daemon::AppendToken(file_, {HashToken("writer"), "", {.tenant = "a", .read = false}}));
    ASSERT_OK(daemon::AppendToken(file_, {HashToken("admin"), "", {.admin = true}}));
    daemon_.emplace(dir_.path(),
                    std::vector<std::string>{"--listen", "127.0.0.1:0", "--tokens", file_});
    ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  }
  // reconnect_ms: 0: a call over a connection that ended fails at once.
  Result<std::unique_ptr<RemoteStore>> Enter(const std::string& token,
                                             const std::string& tenant = "", bool admin = false) {
    ConnectOptions options;
    options.token = token, options.tenant = tenant, options.admin = admin;
    options.reconnect_ms = 0;
    return RemoteStore::Connect(daemon_->tcp_address(), options);
  }
  // Writes the file anew, with these alone, and has the daemon read it.
  void Rewrite(const std::string& text) {
    std::ofstream(file_, std::ios::trunc) << text;
    daemon_->Signal(SIGHUP);
  }
  bool Logged(const std::string& text) {
    return Eventually([&] { return daemon_->Stderr().find(text) != std::string::npos; });
  }

  DaemonDir dir_;
  const std::string file_ = dir_.path() / "tokens.toml";
  std::optional<DaemonProcess> daemon_;
};

TEST_F(TokensTest, AWrongTokenLetsNobodyIn) {
  for (const char* wrong : {"", "onE", "one ", "pfx_one"}) {
    const auto client = Enter(wrong);
    ASSERT_FALSE(client.ok()) << wrong;
    EXPECT_EQ(client.error().code, Code::kFailedPrecondition) << client.error().message;
  }
  EXPECT_FALSE(Enter("one", "b").ok());
  EXPECT_FALSE(Enter("one", "", /*admin=*/true).ok());
  EXPECT_OK(Enter("one"));
  EXPECT_OK(Enter("one", "a"));
}

// A token's tenant is that of all calls, whatever the client says, and what it does not own looks
// as if nobody had it.
TEST_F(TokensTest, PrefixesOfOthersLookUnknown) {
  const auto a = Enter("one"), b = Enter("two");
  ASSERT_TRUE(a.ok() && b.ok());
  const auto prompt = testing::MakePrompt(100, testing::Seed("Tokens.Foreign"));
  ASSERT_OK(testing::PutPrompt(**a, prompt));
  const auto own = (*a)->Match({.model = prompt.model.name, .tokens = prompt.tokens});
  ASSERT_OK(own);
  ASSERT_EQ(own->n_tokens, 100u);
  const std::string nobodys(own->prefix.size(), '0');
  // The two errors are equal but for the id itself.
  const auto text = [](const auto& result, const std::string& id) {
    if (result.ok()) return std::string("done");
    std::string message = result.error().ToString();
    for (size_t at; (at = message.find(id)) != std::string::npos;)
      message.replace(at, id.size(), "ID");
    return message;
  };
  RemoteStore& other = **b;
  const auto attach = [&](const std::string& id) {
    return other.Attach({.model = prompt.model.name, .prefix = id});
  };
  EXPECT_EQ(text(attach(own->prefix), own->prefix), text(attach(nobodys), nobodys));
  EXPECT_EQ(text(other.Prefix(own->prefix), own->prefix), text(other.Prefix(nobodys), nobodys));
  EXPECT_EQ(text(other.Remove(own->prefix), own->prefix), text(other.Remove(nobodys), nobodys));
  EXPECT_EQ(text(other.SetLifetime(own->prefix, {}), own->prefix),
            text(other.SetLifetime(nobodys, {}), nobodys));
  EXPECT_EQ(text(other.Verify(own->prefix, {}), own->prefix),
            text(other.Verify(nobodys, {}), nobodys));
  EXPECT_EQ(text(other.WaitReady(own->prefix, {}), own->prefix),
            text(other.WaitReady(nobodys, {}), nobodys));
  EXPECT_NE(text(other.Prefix(own->prefix), own->prefix), "done");
  EXPECT_EQ(other.Match({.model = prompt.model.name, .tokens = prompt.tokens})->n_tokens, 0u);
  EXPECT_TRUE(other.ListPrefixes({})->prefixes.empty());
  EXPECT_FALSE(other.ListPrefixes({.tenant = "a"}).ok());
  EXPECT_FALSE(other.VerifyTenant("a", {}).ok());
  EXPECT_FALSE(
      other.Match({.model = prompt.model.name, .tenant = "a", .tokens = prompt.tokens}).ok());
  const auto all = Enter("admin", "", /*admin=*/true);
  ASSERT_OK(all);
  EXPECT_OK((*all)->Prefix(own->prefix));
}

TEST_F(TokensTest, RightsAreKept) {
  const auto owner = Enter("one"), reader = Enter("reader"), writer = Enter("writer");
  ASSERT_TRUE(owner.ok() && reader.ok() && writer.ok());
  const auto prompt = testing::MakePrompt(100, testing::Seed("Tokens.Rights"));
  const auto refused = [](const auto& result, const std::string& right) {
    return !result.ok() && result.error().code == Code::kFailedPrecondition &&
           result.error().message.find("'" + right + "'") != std::string::npos;
  };
  EXPECT_TRUE(refused((*reader)->RegisterModel(prompt.model), "write"));
  ASSERT_OK(testing::PutPrompt(**writer, prompt));
  const auto match = (*reader)->Match({.model = prompt.model.name, .tokens = prompt.tokens});
  ASSERT_OK(match);
  {
    const auto session = (*reader)->Attach(
        {.model = prompt.model.name, .tokens = prompt.tokens, .policy = {.mode = StepMode::kFull}});
    ASSERT_OK(session);
    EXPECT_TRUE(refused((*session)->Persist(prompt.tokens), "write"));
    // What moves behind the prefix is written to the store.
    EXPECT_TRUE(refused((*reader)->Attach({.model = prompt.model.name,
                                           .tokens = prompt.tokens,
                                           .policy = {.mode = StepMode::kFull},
                                           .own_memory_tokens = kMinOwnMemoryTokens}),
                        "write"));
    EXPECT_FALSE(refused((*session)->ForkPersisted(0), "write"));  // there is nothing yet
  }
  EXPECT_TRUE(refused((*reader)->BeginPut({prompt.model.name, "", prompt.tokens, ""}), "write"));
  EXPECT_TRUE(refused((*reader)->Remove(match->prefix), "write"));
  EXPECT_TRUE(refused((*reader)->SetLifetime(match->prefix, {}), "write"));
  EXPECT_OK((*writer)->WaitReady(match->prefix, {}));
  EXPECT_TRUE(refused((*writer)->Prefix(match->prefix), "read"));
  EXPECT_TRUE(refused((*writer)->ListPrefixes({}), "read"));
  EXPECT_TRUE(
      refused((*writer)->Attach({.model = prompt.model.name, .tokens = prompt.tokens}), "read"));
  EXPECT_OK((*writer)->Remove(match->prefix));
}

TEST_F(TokensTest, AConnectionEndsWithItsToken) {
  const auto a = Enter("one"), b = Enter("two");
  ASSERT_TRUE(a.ok() && b.ok());
  std::string text;
  for (const char* token : {"two", "three"}) {
    text += daemon::TokenLines({HashToken(token), "", {.tenant = "b"}});
  }
  // A file that is broken, or that others may read, changes nothing.
  Rewrite("[[tokens]]\ntenant = 3\n");
  ASSERT_TRUE(
      Logged("what was read before stays in force: " + file_ + ":2: tenant must be a text"));
  ASSERT_EQ(::chmod(file_.c_str(), 0644), 0);
  Rewrite(text);
  ASSERT_TRUE(Logged("chmod 600"));
  EXPECT_OK((*a)->Stats());
  EXPECT_OK(Enter("one"));
  EXPECT_FALSE(Enter("three").ok());
  ASSERT_EQ(::chmod(file_.c_str(), 0600), 0);
  Rewrite(text);
  ASSERT_TRUE(Eventually([&] { return !(*a)->Stats().ok(); }));
  EXPECT_FALSE(Enter("one").ok());
  EXPECT_OK((*b)->Stats());  // the same connection
  EXPECT_OK(Enter("three"));
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->Wait(), 0) << daemon_->Stderr();
}

// A file that changed while the daemon opened its store was read before that.
TEST_F(TokensTest, AHangupBeforeTheDaemonIsReadyIsKept) {
  daemon_.reset();
  for (int round = 0; round < 5; ++round) {
    std::filesystem::remove(dir_.path() / "stderr");  // the last daemon's
    DaemonProcess daemon(dir_.path(), {"--tokens", file_}, DaemonProcess::Await::kNothing);
    const auto said = [&](const std::string& text) {
      return daemon.Stderr().find(text) != std::string::npos;
    };
    ASSERT_TRUE(Eventually([&] { return said("opening the store"); }));
    daemon.Signal(SIGHUP);
    ASSERT_TRUE(Eventually([&] { return said("tokens were read again"); })) << daemon.Stderr();
    daemon.Signal(SIGTERM);
    EXPECT_EQ(daemon.Wait(), 0) << daemon.Stderr();
  }
}

TEST_F(TokensTest, PrefixctlMakesThemAndTheDaemonTakesThem) {
  const auto made = RunProgram(PREFIXCTL_BINARY, {"token", "new", "team-c", "--file", file_,
                                                  "--rights", "read", "--name", "x"});
  ASSERT_EQ(made.code, 0) << made.err;
  const std::string token = made.out.substr(0, made.out.find('\n'));
  EXPECT_EQ(testing::ReadFile(file_).find(token), std::string::npos);  // only its hash
  EXPECT_FALSE(Enter(token).ok());
  daemon_->Signal(SIGHUP);
  ASSERT_TRUE(Eventually([&] { return Enter(token).ok(); }));
  std::ofstream(dir_.path() / "secret") << token << "\n";
  const auto status = RunProgram(PREFIXCTL_BINARY,
                                 {"prefixes", "list", "--json", "--address", daemon_->tcp_address(),
                                  "--token-file", dir_.path() / "secret"});
  EXPECT_EQ(status.code, 0) << status.err;
  // A client finds the token in what is printed without --file, too.
  std::ofstream(dir_.path() / "all") << "# The token, for the client\n\n"
                                     << token << "\n\n# For the daemon's file\n[[tokens]]\n";
  const auto list = [&](const std::string& file) {
    return RunProgram(PREFIXCTL_BINARY, {"prefixes", "list", "--address", daemon_->tcp_address(),
                                         "--token-file", dir_.path() / file});
  };
  EXPECT_EQ(list("all").code, 0) << list("all").err;
  std::ofstream(dir_.path() / "none") << "# nothing\n\n";
  EXPECT_EQ(list("none").code, 1);
  EXPECT_NE(list("none").err.find("there is no token in"), std::string::npos);
  EXPECT_EQ(RunProgram(PREFIXCTL_BINARY, {"token", "check", "/nonexistent"}).code, 1);
  const auto check = RunProgram(PREFIXCTL_BINARY, {"token", "check", file_});
  EXPECT_EQ(check.code, 0) << check.err;
  EXPECT_NE(check.out.find("team-c"), std::string::npos) << check.out;
  EXPECT_EQ(RunProgram(PREFIXCTL_BINARY, {"token", "new", "d", "--rights", "all"}).code, 1);
  const auto shown = RunProgram(PREFIXCTL_BINARY, {"token", "new", "d"});
  EXPECT_NE(shown.out.find("[[tokens]]"), std::string::npos) << shown.out;
}

TEST(TokenFiles, TheDaemonDoesNotStartWithOneThatOthersRead) {
  DaemonDir dir;
  const std::string file = dir.path() / "tokens.toml";
  std::ofstream(file) << "";
  ASSERT_EQ(::chmod(file.c_str(), 0644), 0);
  DaemonProcess daemon(dir.path(), {"--listen", "127.0.0.1:0", "--tokens", file});
  EXPECT_FALSE(daemon.ready());
  EXPECT_EQ(daemon.Wait(), 1);
  EXPECT_NE(daemon.Stderr().find("chmod 600 " + file), std::string::npos) << daemon.Stderr();
}

}  // namespace
}  // namespace prefixd
