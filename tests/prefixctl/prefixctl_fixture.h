// Runs a daemon that holds a prompt of tenant "team-a", and prefixctl against it.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client_lib/remote_store.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/test.h"

namespace prefixd::testing {

class PrefixctlFixture : public ::testing::Test {
 protected:
  PrefixctlFixture(Prompt prompt, std::string label)
      : prompt_(std::move(prompt)), label_(std::move(label)) {}

  void SetUp() override {
    StartIn(dir_.path());
    ConnectOptions options;
    options.tenant = "team-a";
    auto client = RemoteStore::Connect(daemon_->address(), options);
    ASSERT_TRUE(client.ok()) << client.error().message;
    client_ = *std::move(client);
    auto put = PutPrompt(*client_, prompt_, label_);
    ASSERT_TRUE(put.ok()) << put.error().message;
    prefix_ = put->prefix;
  }

  // Replaces the running daemon with one whose store lies in `dir`.
  void StartIn(const std::filesystem::path& dir) {
    daemon_ = std::make_unique<DaemonProcess>(dir);
    ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  }

  Finished Run(std::vector<std::string> args) const {
    args.insert(args.end(), {"--socket", daemon_->socket()});
    return RunProgram(PREFIXCTL_BINARY, args);
  }

  const Prompt prompt_;
  const std::string label_;
  DaemonDir dir_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<RemoteStore> client_;
  std::string prefix_;
};

}  // namespace prefixd::testing
