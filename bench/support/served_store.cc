#include "bench/support/served_store.h"

#include <signal.h>
#include <unistd.h>

#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/access/access.h"
#include "daemon/connections/listener.h"
#include "daemon/server.h"
#include "daemon/settings/config.h"
#include "prefixd/client.h"

namespace prefixd::bench {
namespace {

constexpr uint64_t kMaxPuts = 1000;

class Served {
 public:
  Status Start(std::unique_ptr<LocalStore> store, const std::filesystem::path& dir) {
    const std::shared_ptr<MemoryBudget> memory = store->memory();
    server_ =
        std::make_unique<daemon::Server>(config_, std::move(store), access_, memory, kMaxPuts);
    const std::string path = (dir / "s").string();
    PREFIXD_ASSIGN(daemon::Listener listener, daemon::Listener::Unix(path, /*group=*/false));
    std::vector<daemon::Listener> listeners;
    listeners.push_back(std::move(listener));
    std::promise<void> ready;
    thread_ = std::thread([this, &ready, l = std::move(listeners)]() mutable {
      server_->Run(
          std::move(l), [&] { ready.set_value(); }, [] {});
    });
    ready.get_future().wait();
    PREFIXD_ASSIGN(client_, Connect("unix:" + path));
    return {};
  }
  ~Served() {
    client_.reset();
    if (!thread_.joinable()) return;
    ::kill(::getpid(), SIGTERM);
    thread_.join();
  }

  Store* client() const { return client_.get(); }

 private:
  const daemon::Config config_;
  daemon::Access access_;
  std::unique_ptr<daemon::Server> server_;
  std::thread thread_;
  std::unique_ptr<Store> client_;
};

}  // namespace

Result<std::shared_ptr<Store>> ServeStore(std::unique_ptr<LocalStore> store,
                                          const std::filesystem::path& dir) {
  const auto served = std::make_shared<Served>();
  PREFIXD_TRY(served->Start(std::move(store), dir));
  return std::shared_ptr<Store>(served, served->client());
}

}  // namespace prefixd::bench
