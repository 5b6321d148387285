// prefixd: keeps the KV cache of long prompts on SSD and in host memory and serves attention over
// it. See `prefixd --help` and docs/operations.md.
#include <malloc.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "attention/kernels/kernels.h"
#include "base/build_info.h"
#include "daemon/access/access.h"
#include "daemon/access/tls.h"
#include "daemon/connections/listener.h"
#include "daemon/http/readers.h"
#include "daemon/limits/descriptors.h"
#include "daemon/process/logging.h"
#include "daemon/process/notify.h"
#include "daemon/server.h"
#include "daemon/settings/command_line.h"
#include "daemon/settings/config.h"
#include "daemon/settings/reference.h"
#include "runtime/store/local_store.h"

namespace prefixd::daemon {
namespace {

constexpr int kExitError = 1;
constexpr int kExitUsage = 2;
constexpr uint64_t kCloseSeconds = 20;  // ample for aborting calls and closing the store

std::string Version() {
#if defined(PREFIXD_HAVE_CUDA)
  const std::string features = "cuda";
#else
  const std::string features = "no cuda";
#endif
  return VersionText("prefixd", "features: " + features + "\ncpu: " + std::string(CpuLevel()) +
                                    ", kernels for " + Kernels().name);
}

int Fail(const Error& error, int code = kExitError) {
  std::fprintf(stderr, "prefixd: %s\n", error.message.c_str());
  return code;
}

void Declare(CLI::App* app, CommandLine* line) {
  app->set_version_flag("--version", Version, "Print version, commit, features and CPU level.");
  DeclareOptions(app, line);
  app->footer(
      "Example: prefixd --dir /srv/prefixd --socket /run/prefixd/prefixd.sock --host-tier-mib "
      "8192\n"
      "Exit codes: 0 stopped by SIGTERM or SIGINT, 1 error (one line on standard error), 2 usage.\n"
      "`prefixctl` looks after a running daemon.");
}

Status Configure(const CommandLine& line, Config* config) {
  if (!line.config_file.empty()) PREFIXD_TRY(LoadConfig(line.config_file, config));
  PREFIXD_TRY(ApplyFlags(line.flags, config));
  return CheckConfig(*config);
}

// A failure is only logged: a daemon serves even when the service manager cannot be reached.
void Tell(const std::string& assignments) {
  if (Status s = Notify(assignments); !s.ok()) spdlog::warn("{}", s.error().message);
}

// Opens what http.listen names, and returns it as a URL.
Result<std::string> ListenHttp(const Config& config, Server* server) {
  std::optional<TokenHash> token;
  if (!config.http_token_file.empty()) {
    PREFIXD_ASSIGN(token, ReadHttpToken(config.http_token_file));
  }
  PREFIXD_ASSIGN(const Address address, Address::ParseTcp(config.http_listen));
  PREFIXD_ASSIGN(Listener listener, Listener::Tcp(address));
  const Address bound = listener.address();
  const bool v6 = bound.host.find(':') != std::string::npos;
  server->ServeHttp(std::move(listener), token);
  return "http://" + (v6 ? "[" + bound.host + "]" : bound.host) + ":" + std::to_string(bound.port);
}

// Until the server catches it SIGHUP waits: it must not end a daemon that opens its store, and
// files that changed after they were read are read again.
void HoldHangup(int how) {
  sigset_t hangup;
  ::sigemptyset(&hangup);
  ::sigaddset(&hangup, SIGHUP);
  ::pthread_sigmask(how, &hangup, nullptr);
}

int Serve(const CommandLine& line, Config config) {
  HoldHangup(SIG_BLOCK);  // threads that are made meanwhile never take it
  if (Status s = SetUpLogging(config.log_level, config.log_file, config.log_format); !s.ok())
    return Fail(s.error());
  const auto descriptors = DivideDescriptors(config, RaiseDescriptorLimit());
  if (!descriptors.ok()) return Fail(descriptors.error());
  if (!descriptors->warning.empty()) spdlog::warn("{}", descriptors->warning);
  LowerConnections(*descriptors, &config);
  auto table = Access::Load(config.tokens_file);
  if (!table.ok()) return Fail(table.error());
  auto tls = LoadTls(TlsFilesOf(config));
  if (!tls.ok()) return Fail(tls.error());
  std::signal(SIGPIPE, SIG_IGN);
  // Threads share few arenas, so that what is resident follows what is counted. The thresholds stay
  // the allocator's own: buffers of answers that went back to the system each time would cost more
  // than what is copied into them.
  ::mallopt(M_ARENA_MAX, 4);

  Tell("STATUS=Opening the store " + config.store.dir.string());
  spdlog::info("opening the store {}", config.store.dir.string());
  auto store = LocalStore::Open(config.store);
  if (!store.ok()) return Fail(store.error());
  // The server is made before the sockets, because it catches signals from then on: a process that
  // sees a socket may stop the daemon at once.
  const std::shared_ptr<MemoryBudget> memory = (*store)->memory();
  Server server(config, *std::move(store), Access(*std::move(table)), memory, descriptors->puts,
                *tls);
  HoldHangup(SIG_UNBLOCK);
  std::vector<Listener> listeners;
  if (!config.socket.empty()) {
    auto listener =
        Listener::Unix(config.socket, config.socket_access == "group", config.socket_group);
    if (!listener.ok()) return Fail(listener.error());
    listeners.push_back(*std::move(listener));
  }
  if (!config.tcp.empty()) {
    auto address = Address::ParseTcp(config.tcp);
    if (address.ok()) address->tls = *tls != nullptr;
    auto listener = address.ok() ? Listener::Tcp(*address) : Result<Listener>(address.error());
    if (!listener.ok()) return Fail(listener.error());
    listeners.push_back(*std::move(listener));
  }
  std::string ready = "prefixd ready:";
  for (const Listener& l : listeners) ready += " " + l.address().ToString();
  if (!config.http_listen.empty()) {
    auto http = ListenHttp(config, &server);
    if (!http.ok()) return Fail(http.error());
    ready += " " + *http;
  }

  const auto on_ready = [&] {
    spdlog::info("{} pid {} dir {}", ready, ::getpid(), config.store.dir.string());
    std::printf("%s\n", ready.c_str());
    std::fflush(stdout);
    if (line.ready_fd >= 0) {
      const std::string text = ready + "\n";
      (void)!::write(line.ready_fd, text.data(), text.size());
      ::close(line.ready_fd);
    }
    Tell("READY=1\nSTATUS=" + ready);
  };
  // The service manager must wait for the configured grace, however long, and then for the store.
  const auto on_stopping = [&] {
    const uint64_t us = (config.shutdown_grace_s + kCloseSeconds) * 1'000'000;
    Tell("STOPPING=1\nSTATUS=Finishing calls\nEXTEND_TIMEOUT_USEC=" + std::to_string(us));
  };
  return server.Run(std::move(listeners), on_ready, on_stopping);
}

int Main(int argc, char** argv) {
  CLI::App app(
      "prefixd keeps the KV cache of long prompts on SSD and in host memory and answers "
      "attention over a stored prompt while reading about 1% of it per step.");
  CommandLine line;
  Declare(&app, &line);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kExitUsage;
  }
  if (line.reference) {
    std::fputs(ReferencePage().c_str(), stdout);
    return 0;
  }
  Config config;
  if (Status s = Configure(line, &config); !s.ok()) return Fail(s.error(), kExitUsage);
  if (line.print_config) {
    std::fputs(PrintConfig(config).c_str(), stdout);
    return 0;
  }
  return Serve(line, config);
}

}  // namespace
}  // namespace prefixd::daemon

int main(int argc, char** argv) { return prefixd::daemon::Main(argc, argv); }
