// The daemon's configuration: one table of keys serves the TOML file, the command line, the output
// of `prefixd --print-config` and the checks. Sizes carry their unit in the name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "prefixd/options.h"
#include "prefixd/result.h"

namespace prefixd::daemon {

// Plain values; config_items.cc gives default, bounds, unit and meaning of each.
struct Config {
  std::string dir = "/var/lib/prefixd";

  std::string socket = "/run/prefixd/prefixd.sock";
  std::string socket_access = "user";
  std::string tcp;
  std::string tcp_token_file;

  std::string io = "auto";
  uint64_t host_tier_mib = 1024;
  std::string host_tier_shares;
  bool host_tier_hugetlb = false;
  bool host_tier_mlock = false;
  bool pin_host_tier = false;
  uint64_t selector_memory_mib = 1024;
  uint64_t shared_rows_mib = 512;
  uint64_t min_free_mib = 256;
  uint64_t quota_mib = 0;
  uint64_t read_deadline_ms = 30'000;
  uint64_t tenant_quota_mib = 0;
  std::map<std::string, uint64_t> tenant_quotas_mib;
  std::string encoding = "as_given";
  std::string evict = "worth";
  bool settle = true;
  uint64_t settle_min_tokens = 2048;
  uint64_t merge_max_tokens = 8192;

  uint64_t scrub_mib_per_second = 32;
  uint64_t scrub_interval_hours = 168;

  std::string compute = "auto";
  uint64_t threads = 0;

  uint64_t n_sink = 4;
  uint64_t n_tail = 16;
  uint64_t checkpoint_tokens = 4096;
  std::string estimators = VariantNames(DefaultEstimators());
  uint64_t clusters = 32;
  std::string phi_features = "auto";
  uint64_t query_samples = 32;
  std::vector<double> choice_budgets = {0.01, 0.02, 0.03, 0.04, 0.05};
  bool build_codes = true;
  uint64_t codes_min_tokens = 4096;
  uint64_t recall_percent = 95;
  bool build_ivf = false;
  uint64_t ivf_min_tokens = 16384;

  uint64_t max_sessions = 1024;
  uint64_t max_connections = 256;
  uint64_t max_calls = 64;
  uint64_t max_puts = 16;
  uint64_t max_frame_mib = 256;
  uint64_t shared_memory_mib = 64;
  uint64_t workers = 16;
  uint64_t long_workers = 16;
  uint64_t hello_timeout_s = 10;
  uint64_t write_timeout_s = 60;
  uint64_t put_idle_s = 600;
  uint64_t shutdown_grace_s = 10;

  std::string log_level = "info";
  std::string log_file;

  RuntimeOptions Runtime() const;
};

// One key. `choices` (strings) and [min, max] (numbers, and those of a table) are its bounds.
struct ConfigItem {
  const char* section;  // "" for the top of the file
  const char* key;
  const char* flag;  // on the command line, without "--"
  std::variant<std::string Config::*, uint64_t Config::*, bool Config::*,
               std::vector<double> Config::*, std::map<std::string, uint64_t> Config::*>
      member;
  uint64_t min = 0, max = 0;
  std::vector<std::string_view> choices;
  const char* unit;  // "" where there is none
  const char* help;

  std::string path() const;  // "listen.socket"
};

std::span<const ConfigItem> ConfigItems();

// Applies a file over `config`. kInvalidArgument names file, line and key: unknown keys, wrong
// types, values out of bounds, broken TOML. kNotFound when the file cannot be read.
Status LoadConfig(const std::filesystem::path& file, Config* config);
// Sets one key from text, as the command line gives it.
Status SetItem(const ConfigItem& item, std::string_view text, Config* config);
// "team-a=0.5, team-b=0.25" as pairs; kInvalidArgument says what is wrong with it.
Result<std::vector<std::pair<std::string, double>>> ParseShares(std::string_view text);
// What only whole configurations can violate (socket path length, TCP without a token ...).
Status CheckConfig(const Config& config);
// A commented TOML file that LoadConfig reads back to the same Config.
std::string PrintConfig(const Config& config);

}  // namespace prefixd::daemon
