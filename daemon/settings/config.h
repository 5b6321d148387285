// Reads, checks and prints the daemon's configuration: the store's options and its own. One table
// serves the TOML file, the command line, the output of `prefixd --print-config`, the reference
// page and the checks.
//
// Thread-safety: plain values and free functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/tables/option.h"
#include "prefixd/options.h"
#include "prefixd/result.h"

namespace prefixd::daemon {

// config_options.cc gives bounds, unit and meaning of each member.
struct Config {
  RuntimeOptions store{.dir = "/var/lib/prefixd", .warm_up = true};

  std::string socket = "/run/prefixd/prefixd.sock";
  std::string socket_access = "user";
  std::string socket_group;
  std::string tcp;
  bool tcp_insecure = false;
  std::string tokens_file;

  std::string tls_certificate, tls_key, tls_client_ca;
  std::string http_listen;
  std::string http_token_file;
  uint64_t http_max_connections = 16;
  uint64_t http_timeout_s = 10;

  uint64_t max_connections = 256;
  uint64_t max_tcp_connections = 0;
  uint64_t max_tenant_connections = 0;
  uint64_t max_silent_connections = 32;
  uint64_t max_calls = 64;
  uint64_t max_puts = 16;
  uint64_t max_frame_mib = 256;
  uint64_t shared_memory_mib = 64;
  uint64_t ring_mib = 4;
  uint64_t step_threads = 16;
  uint64_t polling_threads = 1;
  uint64_t workers = 16;
  uint64_t long_workers = 16;
  uint64_t hello_timeout_s = 10;
  uint64_t frame_timeout_s = 30;
  uint64_t write_timeout_s = 60;
  uint64_t put_idle_s = 600;
  uint64_t shutdown_grace_s = 10;

  std::string log_level = "info";
  std::string log_file;
  std::string log_format = "text";
  uint64_t slow_step_ms = 0;
};

// Lists the options of store and daemon, section by section in a file's order. They point into
// `config`.
std::vector<Option> OptionsOf(Config& config);

// Applies a file over `config`. kInvalidArgument names file, line and key: unknown keys, wrong
// types, values out of bounds, broken TOML. kNotFound when the file cannot be read.
Status LoadConfig(const std::filesystem::path& file, Config* config);
// Sets options from the command line, by flag.
Status ApplyFlags(const std::map<std::string, std::string>& flags, Config* config);
// Checks rules that no single option can break (socket path length, TCP that anyone may use ...).
Status CheckConfig(const Config& config);
// Returns a commented TOML file that LoadConfig reads back to the same Config. Options that have
// their defaults are comments, too: "#key = value".
std::string PrintConfig(Config config);

}  // namespace prefixd::daemon
