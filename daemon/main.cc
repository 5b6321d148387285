// prefixd: keeps the KV cache of long prompts on SSD and in host memory and serves attention over
// it. See `prefixd --help` and docs/operations.md.
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>

#include "attention/kernels.h"
#include "base/build_info.h"
#include "daemon/config.h"
#include "daemon/listener.h"
#include "daemon/logging.h"
#include "daemon/server.h"
#include "runtime/local_store.h"

namespace prefixd::daemon {
namespace {

constexpr int kExitError = 1;
constexpr int kExitUsage = 2;

struct Options {
  std::string config_file;
  std::map<std::string, std::string> flags;  // by ConfigItem::flag
  bool print_config = false;
  int ready_fd = -1;
};

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

void Declare(CLI::App* app, Options* options) {
  app->set_version_flag("--version", Version, "Print version, commit, features and CPU level.");
  app->add_option("-c,--config", options->config_file,
                  "Configuration file (TOML). Flags override it.")
      ->type_name("FILE");
  app->add_flag("--print-config", options->print_config,
                "Print the configuration that would be used, with every key explained, as a file "
                "for --config; then exit.");
  app->add_option("--ready-fd", options->ready_fd,
                  "Write the ready line to this file descriptor too, and close it.")
      ->type_name("FD");
  for (const ConfigItem& item : ConfigItems()) {
    std::string help = item.help;
    for (size_t i = 0; i < item.choices.size(); ++i) {
      help += (i ? "|" : " One of ") + std::string(item.choices[i]);
    }
    app->add_option_function<std::string>(
           std::string("--") + item.flag,
           [options, flag = std::string(item.flag)](const std::string& text) {
             options->flags[flag] = text;
           },
           help)
        ->type_name(*item.unit ? item.unit : "VALUE")
        ->group(*item.section ? std::string("[") + item.section + "]" : "Store");
  }
  app->footer(
      "Example: prefixd --dir /srv/prefixd --socket /run/prefixd/prefixd.sock --host-tier-mib "
      "8192\n"
      "Exit codes: 0 stopped by SIGTERM or SIGINT, 1 error (one line on standard error), 2 usage.\n"
      "`prefixctl` looks after a running daemon.");
}

Status Configure(const Options& options, Config* config) {
  if (!options.config_file.empty()) PREFIXD_TRY(LoadConfig(options.config_file, config));
  for (const ConfigItem& item : ConfigItems()) {
    if (const auto it = options.flags.find(item.flag); it != options.flags.end()) {
      Status status = SetItem(item, it->second, config);
      if (!status.ok()) {
        return InvalidArgument(std::string("--") + item.flag + ": " + status.error().message);
      }
    }
  }
  return CheckConfig(*config);
}

Result<std::string> ReadToken(const std::string& file) {
  std::string token;
  if (file.empty()) return token;
  std::ifstream in(file);
  if (!std::getline(in, token) || token.size() < 16) {
    return InvalidArgument("listen.tcp_token_file " + file +
                           " must hold a first line of at least 16 characters");
  }
  return token;
}

int Serve(const Options& options, const Config& config) {
  if (Status s = SetUpLogging(config.log_level, config.log_file); !s.ok()) return Fail(s.error());
  auto token = ReadToken(config.tcp_token_file);
  if (!token.ok()) return Fail(token.error());
  std::signal(SIGPIPE, SIG_IGN);

  auto store = LocalStore::Open(config.Runtime());
  if (!store.ok()) return Fail(store.error());
  // Before the sockets: who sees one may stop the daemon, which is to hear it.
  Server server(config, *std::move(store), *std::move(token));
  std::vector<Listener> listeners;
  if (!config.socket.empty()) {
    auto listener = Listener::Unix(config.socket);
    if (!listener.ok()) return Fail(listener.error());
    listeners.push_back(*std::move(listener));
  }
  if (!config.tcp.empty()) {
    auto address = Address::ParseTcp(config.tcp);
    auto listener = address.ok() ? Listener::Tcp(*address) : Result<Listener>(address.error());
    if (!listener.ok()) return Fail(listener.error());
    listeners.push_back(*std::move(listener));
  }
  std::string ready = "prefixd ready:";
  for (const Listener& l : listeners) ready += " " + l.address().ToString();

  return server.Run(std::move(listeners), [&] {
    spdlog::info("{} pid {} dir {}", ready, ::getpid(), config.dir);
    std::printf("%s\n", ready.c_str());
    std::fflush(stdout);
    if (options.ready_fd >= 0) {
      const std::string line = ready + "\n";
      (void)!::write(options.ready_fd, line.data(), line.size());
      ::close(options.ready_fd);
    }
  });
}

int Main(int argc, char** argv) {
  CLI::App app(
      "prefixd keeps the KV cache of long prompts on SSD and in host memory and answers "
      "attention over a stored prompt while reading about 1% of it per step.");
  Options options;
  Declare(&app, &options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kExitUsage;
  }
  Config config;
  if (Status s = Configure(options, &config); !s.ok()) return Fail(s.error(), kExitUsage);
  if (options.print_config) {
    std::fputs(PrintConfig(config).c_str(), stdout);
    return 0;
  }
  return Serve(options, config);
}

}  // namespace
}  // namespace prefixd::daemon

int main(int argc, char** argv) { return prefixd::daemon::Main(argc, argv); }
