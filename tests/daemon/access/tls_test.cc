// Tests TLS against the real daemon: who is let in, what those see who are not, and what a slow or
// strange peer costs the others.
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <signal.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client_lib/remote_store.h"
#include "daemon/access/token.h"
#include "daemon/access/token_file.h"
#include "protocol/socket.h"
#include "tests/daemon/connections/raw_client.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/http/http_client.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/certificates.h"
#include "tests/support/expect_ok.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::Authority;
using testing::DaemonDir;
using testing::DaemonProcess;
using testing::Eventually;
using testing::RunProgram;

class TlsTest : public ::testing::Test {
 protected:
  TlsTest() { authority_.Issue("daemon"); }

  void Start(const std::vector<std::string>& more = {}, const std::string& name = "daemon") {
    std::vector<std::string> args = {"--listen",          "127.0.0.1:0",
                                     "--tls-certificate", authority_.certificate(name),
                                     "--tls-key",         authority_.key(name)};
    args.insert(args.end(), more.begin(), more.end());
    daemon_.emplace(dir_.path(), args);
    ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
    ASSERT_TRUE(address().starts_with("tls:127.0.0.1:")) << daemon_->ready_line();
  }
  std::string address() const { return daemon_->tcp_address(); }
  std::string At(const std::string& scheme, const std::string& host = "127.0.0.1") const {
    return scheme + ":" + host + address().substr(address().rfind(':'));
  }

  ConnectOptions Trusting(const std::string& ca) const {
    ConnectOptions options;
    options.tls_ca = ca;
    options.reconnect_ms = 0;
    return options;
  }
  Result<std::unique_ptr<RemoteStore>> Enter(const std::string& where,
                                             const ConnectOptions& options) const {
    return RemoteStore::Connect(where, options);
  }
  Result<std::unique_ptr<RemoteStore>> Enter() const {
    return Enter(address(), Trusting(authority_.ca()));
  }
  bool Logged(const std::string& text) const {
    return Eventually([&] { return daemon_->Stderr().find(text) != std::string::npos; });
  }

  DaemonDir dir_;
  const Authority authority_{dir_.path()};
  std::optional<DaemonProcess> daemon_;
};

void ExpectRefusal(const Result<std::unique_ptr<RemoteStore>>& client, const std::string& why) {
  ASSERT_FALSE(client.ok()) << why;
  EXPECT_EQ(client.error().code, Code::kFailedPrecondition) << client.error().message;
  EXPECT_NE(client.error().message.find(why), std::string::npos) << client.error().message;
}

TEST_F(TlsTest, PromptsGoBothWays) {
  Start();
  const auto client = Enter();
  ASSERT_OK(client);
  const auto prompt = testing::MakePrompt(9000, testing::Seed("Tls.Prompts"));  // of many records
  ASSERT_OK(testing::PutPrompt(**client, prompt));
  const auto session = (*client)->Attach({.model = prompt.model.name, .tokens = prompt.tokens});
  ASSERT_OK(session);
  std::vector<std::byte> k(prompt.k[1].size()), v(prompt.v[1].size());
  ASSERT_OK((*session)->ReadLayer({.layer = 1, .tokens = {0, 9000}}, k, v));
  EXPECT_EQ(k, prompt.k[1]);
  EXPECT_EQ(v, prompt.v[1]);
  EXPECT_OK(Enter(At("tls", "localhost"), Trusting(authority_.ca())));
}

// As an application leaves them that uses OpenSSL itself and does not ask for the reason.
TEST_F(TlsTest, ErrorsOfOtherUsersOfOpenSslAreNotTheConnections) {
  Start();
  const auto left = [] { ERR_raise(ERR_LIB_USER, 1); };
  left();
  const auto client = Enter();
  ASSERT_OK(client);
  for (int i = 0; i < 20; ++i) {
    left();
    EXPECT_OK((*client)->Stats());
  }
  ERR_clear_error();
}

TEST_F(TlsTest, ADaemonThatIsNotWhoItShouldBeIsNotSpokenTo) {
  authority_.Issue("elsewhere", "DNS:elsewhere.example,IP:127.0.0.2");
  authority_.Issue("old", "DNS:localhost,IP:127.0.0.1", -1);
  const Authority other(dir_.path(), "other");
  {
    Start();
    ExpectRefusal(Enter(address(), Trusting(other.ca())), "is not accepted");
    ExpectRefusal(Enter(address(), Trusting("")), "is not accepted");
    const auto none = Enter(address(), Trusting(dir_.path() / "none"));
    ASSERT_FALSE(none.ok());
    EXPECT_EQ(none.error().code, Code::kInvalidArgument) << none.error().message;
    daemon_.reset();
  }
  for (const auto& [name, why] : std::vector<std::pair<std::string, std::string>>{
           {"elsewhere", "IP address mismatch"}, {"old", "certificate has expired"}}) {
    Start({}, name);
    ExpectRefusal(Enter(), why);
    if (name == "elsewhere") {
      ExpectRefusal(Enter(At("tls", "localhost"), Trusting(authority_.ca())), "ostname mismatch");
    }
    daemon_.reset();
  }
}

TEST_F(TlsTest, PlainTextToATlsPortAndTheReverseAreSaid) {
  Start();
  ExpectRefusal(Enter(At("tcp"), {}), "this port takes TLS alone");
  EXPECT_TRUE(Logged("this port takes TLS alone"));
  EXPECT_OK(Enter());
  daemon_.reset();
  daemon_.emplace(dir_.path(), std::vector<std::string>{"--listen", "127.0.0.1:0"});
  ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  const auto client = Enter(At("tls"), Trusting(authority_.ca()));
  ASSERT_FALSE(client.ok());
  EXPECT_NE(client.error().message.find("begins with tcp:"), std::string::npos)
      << client.error().message;
  EXPECT_TRUE(Logged("the client speaks TLS, and this port does not"));
  EXPECT_OK(Enter(At("tcp"), {}));
}

// Nothing waits for them: neither the thread of the sockets nor a worker.
TEST_F(TlsTest, SlowAndStrangeHandshakesDelayNobodyAndEnd) {
  Start({"--hello-timeout", "2", "--workers", "2"});
  const auto soon = [] { return Socket::Clock::now() + std::chrono::seconds(20); };
  const std::vector<std::byte> beginning = {std::byte{0x16}, std::byte{3}, std::byte{1},
                                            std::byte{1},    std::byte{0}, std::byte{1}};
  std::vector<Socket> slow;
  for (int i = 0; i < 24; ++i) {
    auto socket = Socket::Connect(*Address::Parse(At("tcp")), soon());
    ASSERT_OK(socket);
    const std::span<const std::byte> part = std::span(beginning).first(size_t(i) % 7);
    ASSERT_OK(socket->Send(std::span(&part, 1), soon()));
    slow.push_back(*std::move(socket));
  }
  const auto client = Enter();
  ASSERT_OK(client);
  EXPECT_OK((*client)->Stats());
  for (Socket& socket : slow) {
    std::array<std::byte, 64> any;
    EXPECT_FALSE(socket.Receive(any, soon()).ok());  // cut off, and not by this side's deadline
  }
  // A record that is none, in the middle of a handshake.
  auto strange = Socket::Connect(*Address::Parse(At("tcp")), soon());
  ASSERT_OK(strange);
  const std::vector<std::byte> garbage(4096, std::byte{0x16});
  const std::span<const std::byte> all(garbage);
  ASSERT_OK(strange->Send(std::span(&all, 1), soon()));
  std::vector<std::byte> rest(1 << 16);
  EXPECT_FALSE(strange->Receive(rest, soon()).ok());
  EXPECT_TRUE(Logged("closed: TLS: "));
  EXPECT_OK((*client)->Stats());
}

TEST_F(TlsTest, SighupReadsThePairAnewAndKeepsTheOldOneWhereTheNewIsBad) {
  Start();
  const auto first = Enter();
  ASSERT_OK(first);
  const Authority other(dir_.path(), "other");
  const auto replace = [&](const std::string& name) {
    for (const char* kind : {".pem", ".key"}) {
      std::filesystem::copy_file(dir_.path() / (name + kind),
                                 dir_.path() / ("daemon" + std::string(kind)),
                                 std::filesystem::copy_options::overwrite_existing);
    }
  };
  other.Issue("new");
  // A key that is not the certificate's.
  std::filesystem::copy_file(other.certificate("new"), authority_.certificate("daemon"),
                             std::filesystem::copy_options::overwrite_existing);
  daemon_->Signal(SIGHUP);
  ASSERT_TRUE(Logged("what was read before stays in force: cannot use tls.key"));
  EXPECT_OK(Enter());
  replace("new");
  daemon_->Signal(SIGHUP);
  ASSERT_TRUE(Logged("new connections see the certificate"));
  ExpectRefusal(Enter(), "is not accepted");
  EXPECT_OK(Enter(address(), Trusting(other.ca())));
  EXPECT_OK((*first)->Stats());  // which goes on
}

// Three files are read on one signal. Whichever of them is bad keeps neither of the others.
TEST_F(TlsTest, SighupReadsTheTokenOfHttpAndTheTokensBesideThePair) {
  const std::string http = dir_.path() / "http.token", tokens = dir_.path() / "tokens.toml";
  const auto write = [](const std::string& file, const std::string& text) {
    testing::WriteFile(file, text);
    ASSERT_EQ(::chmod(file.c_str(), 0600), 0);
  };
  const auto entry = [](const std::string& token) {
    return daemon::TokenLines({daemon::HashToken(token), "", {.tenant = "a"}});
  };
  write(http, "first-token-of-http\n");
  write(tokens, entry("one"));
  Start({"--http", "127.0.0.1:0", "--http-token-file", http, "--tokens", tokens});
  const std::string& line = daemon_->ready_line();
  const int port = std::atoi(line.c_str() + line.find(':', line.find("http://") + 7) + 1);
  const auto admits = [&](const std::string& token) {
    return testing::Get(port, "/status.json", testing::Bearer(token)).status == 200;
  };
  const auto enters = [&](const Authority& authority, const std::string& token) {
    ConnectOptions options = Trusting(authority.ca());
    options.token = token;
    return Enter(address(), options).ok();
  };
  ASSERT_TRUE(admits("first-token-of-http"));
  ASSERT_TRUE(admits("one"));
  ASSERT_TRUE(enters(authority_, "one"));

  // A pair that does not fit, and new tokens of both kinds.
  const Authority other(dir_.path(), "other");
  other.Issue("new");
  const auto overwrite = std::filesystem::copy_options::overwrite_existing;
  std::filesystem::copy_file(other.certificate("new"), authority_.certificate("daemon"), overwrite);
  write(http, "second-token-of-http\n");
  write(tokens, entry("two"));
  daemon_->Signal(SIGHUP);
  ASSERT_TRUE(Logged("what was read before stays in force: cannot use tls.key"));
  ASSERT_TRUE(Logged("tokens were read again from"));
  EXPECT_TRUE(Logged("the token of HTTP was read again from"));
  EXPECT_TRUE(admits("second-token-of-http"));
  EXPECT_TRUE(admits("two"));
  EXPECT_FALSE(admits("first-token-of-http"));
  EXPECT_FALSE(admits("one"));
  EXPECT_TRUE(enters(authority_, "two"));
  EXPECT_FALSE(enters(authority_, "one"));

  // The pair fits now, and neither file of tokens can be used.
  std::filesystem::copy_file(other.key("new"), authority_.key("daemon"), overwrite);
  write(http, "short\n");
  write(tokens, "[[tokens\n");
  daemon_->Signal(SIGHUP);
  ASSERT_TRUE(Logged("new connections see the certificate"));
  EXPECT_TRUE(Logged("what was read before stays in force: http.token_file"));
  EXPECT_TRUE(Logged("what was read before stays in force: " + tokens));
  EXPECT_TRUE(admits("second-token-of-http"));
  EXPECT_TRUE(admits("two"));
  EXPECT_TRUE(enters(other, "two"));
  EXPECT_FALSE(enters(authority_, "two"));
}

TEST_F(TlsTest, ClientsShowACertificateWhereTheyAreAskedForOne) {
  const Authority clients(dir_.path(), "clients");
  clients.Issue("engine", "DNS:engine");
  authority_.Issue("stranger", "DNS:engine");
  Start({"--tls-client-ca", clients.ca()});
  ConnectOptions options = Trusting(authority_.ca());
  ExpectRefusal(Enter(address(), options), "tls.client_ca");
  options.tls_certificate = authority_.certificate("stranger");
  options.tls_key = authority_.key("stranger");
  ExpectRefusal(Enter(address(), options), "tls.client_ca");
  options.tls_certificate = clients.certificate("engine");
  options.tls_key = clients.key("engine");
  EXPECT_OK(Enter(address(), options));
  options.tls_key = "";
  EXPECT_EQ(Enter(address(), options).error().code, Code::kInvalidArgument);
}

TEST_F(TlsTest, VersionsBefore12AreRefused) {
  Start();
  const auto version = [&](int most) -> std::string {
    auto socket = Socket::Connect(*Address::Parse(At("tcp")), std::nullopt);
    if (!socket.ok()) return "";
    ::fcntl(socket->descriptor(), F_SETFL, 0);
    SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_security_level(context, 0);
    SSL_CTX_set_min_proto_version(context, TLS1_VERSION);
    SSL_CTX_set_max_proto_version(context, most);
    SSL* const ssl = SSL_new(context);
    SSL_set_fd(ssl, socket->descriptor());
    const std::string spoken = SSL_connect(ssl) == 1 ? SSL_get_version(ssl) : "none";
    SSL_free(ssl);
    SSL_CTX_free(context);
    return spoken;
  };
  EXPECT_EQ(version(TLS1_VERSION), "none");
  EXPECT_EQ(version(TLS1_1_VERSION), "none");
  EXPECT_EQ(version(TLS1_2_VERSION), "TLSv1.2");
  EXPECT_EQ(version(TLS1_3_VERSION), "TLSv1.3");
}

TEST_F(TlsTest, TokensAndPrefixctlGoThroughIt) {
  const std::string file = dir_.path() / "tokens.toml";
  ASSERT_OK(daemon::AppendToken(file, {daemon::HashToken("secret"), "", {.tenant = "a"}}));
  Start({"--tokens", file});
  ExpectRefusal(Enter(), "token");
  ConnectOptions options = Trusting(authority_.ca());
  options.token = "secret";
  EXPECT_OK(Enter(address(), options));
  testing::WriteFile(dir_.path() / "secret", "secret\n");
  const std::vector<std::string> list = {
      "prefixes", "list", "--json", "--address", address(), "--token-file", dir_.path() / "secret"};
  EXPECT_EQ(RunProgram(PREFIXCTL_BINARY, list).code, 1);  // nobody trusts the certificate
  auto trusting = list;
  trusting.insert(trusting.end(), {"--tls-ca", authority_.ca()});
  const auto shown = RunProgram(PREFIXCTL_BINARY, trusting);
  EXPECT_EQ(shown.code, 0) << shown.err;
  std::vector<std::string> by_environment = {"PREFIXD_TLS_CA=" + authority_.ca(), PREFIXCTL_BINARY};
  by_environment.insert(by_environment.end(), list.begin(), list.end());
  EXPECT_EQ(RunProgram("/usr/bin/env", by_environment).code, 0);
}

TEST_F(TlsTest, TheDaemonDoesNotStartWithFilesThatItCannotUse) {
  const Authority other(dir_.path(), "other");
  other.Issue("new");
  testing::WriteFile(dir_.path() / "nothing", "nothing\n");
  const auto refusal = [&](const std::string& certificate, const std::string& key) {
    DaemonProcess daemon(dir_.path(), {"--listen", "127.0.0.1:0", "--tls-certificate", certificate,
                                       "--tls-key", key});
    EXPECT_FALSE(daemon.ready());
    EXPECT_EQ(daemon.Wait(), 1);
    return daemon.Stderr();
  };
  const std::string good = authority_.certificate("daemon"), key = authority_.key("daemon");
  const auto expect = [](const std::string& said, const std::string& what) {
    EXPECT_NE(said.find(what), std::string::npos) << said;
  };
  expect(refusal(dir_.path() / "none", key), "cannot use tls.certificate");
  expect(refusal(dir_.path() / "nothing", key), "cannot use tls.certificate");
  expect(refusal(good, dir_.path() / "none"), "cannot use tls.key");
  expect(refusal(good, other.key("new")), "cannot use tls.key");
  ASSERT_EQ(::chmod(key.c_str(), 0604), 0);
  expect(refusal(good, key), "chmod o= " + key);
}

}  // namespace
}  // namespace prefixd
