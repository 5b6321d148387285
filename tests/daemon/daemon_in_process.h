// Runs the daemon's server in this process, over a store of the test's own.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client_lib/remote_store.h"
#include "daemon/connections/listener.h"
#include "daemon/server.h"
#include "daemon/settings/config.h"
#include "runtime/store/local_store.h"
#include "tests/support/expect_ok.h"
#include "tests/support/files.h"

namespace prefixd::daemon {

class DaemonInProcess {
 public:
  explicit DaemonInProcess(std::unique_ptr<LocalStore> store, Config config = {})
      : config_(std::move(config)) {
    config_.workers = 4;
    const std::shared_ptr<MemoryBudget> memory = store->memory();
    Start(std::move(store), memory);
  }
  DaemonInProcess(std::unique_ptr<Store> store, Config config) : config_(std::move(config)) {
    Start(std::move(store), nullptr);
  }
  ~DaemonInProcess() { Stop(); }

  std::unique_ptr<RemoteStore> Connect(const ConnectOptions& options = {}) const {
    auto client = RemoteStore::Connect("unix:" + path_, options);
    EXPECT_TRUE(client.ok()) << (client.ok() ? "" : client.error().message);
    return client.ok() ? *std::move(client) : nullptr;
  }
  const std::string& path() const { return path_; }
  std::string address() const { return "unix:" + path_; }
  const std::string& tcp_address() const { return tcp_address_; }

  // Stops the daemon as a signal does. Returns its exit code.
  int Stop() {
    if (!thread_.joinable()) return exit_code_;
    ::kill(::getpid(), SIGTERM);
    thread_.join();
    return exit_code_;
  }

 private:
  void Start(std::unique_ptr<Store> store, const std::shared_ptr<MemoryBudget>& memory) {
    server_ = std::make_unique<Server>(config_, std::move(store), access_, memory, 1000);
    std::vector<Listener> listeners;
    auto listener = Listener::Unix(path_, /*group=*/false);
    EXPECT_TRUE(listener.ok());
    listeners.push_back(*std::move(listener));
    auto tcp = Listener::Tcp(*Address::Parse("tcp:127.0.0.1:0"));
    EXPECT_TRUE(tcp.ok());
    tcp_address_ = tcp->address().ToString();
    listeners.push_back(*std::move(tcp));
    std::promise<void> ready;
    thread_ = std::thread([this, &ready, l = std::move(listeners)]() mutable {
      exit_code_ = server_->Run(
          std::move(l), [&] { ready.set_value(); }, [] {});
    });
    ready.get_future().wait();
  }

  testing::TempDir dir_;
  const std::string path_ = (dir_.path() / "socket").string();
  std::string tcp_address_;
  Access access_;
  Config config_;
  std::unique_ptr<Server> server_;
  std::thread thread_;
  int exit_code_ = -1;
};

}  // namespace prefixd::daemon
