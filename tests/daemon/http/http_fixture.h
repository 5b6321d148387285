// Runs the real daemon with HTTP, and asks it.
#pragma once

#include <sys/stat.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "client_lib/remote_store.h"
#include "daemon/access/token_file.h"
#include "tests/daemon/connections/raw_client.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/http/http_client.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/expect_ok.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::testing {

class HttpTest : public ::testing::Test {
 protected:
  static constexpr const char* kOperator = "operator-token-0123456789";

  void Start(std::vector<std::string> args = {}, const std::string& listen = "127.0.0.1:0") {
    WriteFile(token_file_, std::string(kOperator) + "\n");
    ::chmod(token_file_.c_str(), 0600);
    args.insert(args.end(), {"--http", listen, "--http-token-file", token_file_});
    daemon_.emplace(dir_.path(), args);
    ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
    const std::string& line = daemon_->ready_line();
    const size_t url = line.find("http://");
    ASSERT_NE(url, std::string::npos) << line;
    port_ = std::atoi(line.c_str() + line.find(':', url + 7) + 1);
    ASSERT_GT(port_, 0) << line;
  }
  // Starts a daemon that knows tokens "tenant-token-a" and "tenant-token-b" of tenants a and b, and
  // "admin-token", too.
  void StartWithTokens(std::vector<std::string> args = {}) {
    using daemon::HashToken;
    for (const std::string tenant : {"a", "b"}) {
      ASSERT_OK(daemon::AppendToken(tokens_,
                                    {HashToken("tenant-token-" + tenant), "", {.tenant = tenant}}));
    }
    ASSERT_OK(daemon::AppendToken(tokens_, {HashToken("admin-token"), "", {.admin = true}}));
    args.insert(args.end(), {"--tokens", tokens_});
    Start(args);
  }
  std::unique_ptr<RemoteStore> Client(const std::string& tenant = "") {
    ConnectOptions options;
    options.tenant = tenant;
    auto client = RemoteStore::Connect(daemon_->address(), options);
    EXPECT_OK(client);
    return client.ok() ? *std::move(client) : nullptr;
  }
  // Puts a prompt, attaches, steps once and detaches, all as a tenant. Returns the prefix.
  std::string Use(const std::string& tenant, uint32_t n_tokens = 100) {
    const auto client = Client(tenant);
    const Prompt prompt = MakePrompt(n_tokens, Seed("Http") + n_tokens);
    const auto put = PutPrompt(*client, prompt);
    EXPECT_OK(put);
    AttachSpec spec;
    spec.model = prompt.model.name;
    spec.tokens = prompt.tokens;
    spec.policy.k = 8;
    auto session = client->Attach(spec);
    EXPECT_OK(session);
    if (!session.ok()) return "";
    std::vector<float> q(4 * 16, 0.5f), y(4 * 16), lse(4);
    EXPECT_OK((*session)->Step(0, {}, q, y, lse, nullptr));
    EXPECT_OK((*session)->Detach());
    return put->prefix;
  }
  HttpReply Ask(const std::string& path, const std::string& token = "") const {
    return Get(port_, path, token.empty() ? "" : Bearer(token));
  }

  DaemonDir dir_;
  const std::string token_file_ = dir_ / "http.token", tokens_ = dir_ / "tokens.toml";
  std::optional<DaemonProcess> daemon_;
  int port_ = 0;
};

}  // namespace prefixd::testing
