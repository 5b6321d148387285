#include "daemon/settings/config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <concepts>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <utility>
#include <variant>

#include "protocol/address.h"

namespace prefixd::daemon {
namespace {

constexpr std::string_view kAuto = "auto";  // kByMemory, kByDisk

// ---- from TOML ------------------------------------------------------------------------------

// Each returns false when the node is of another kind than the value.
bool Read(const toml::node& node, bool* out) {
  return node.is_boolean() && (*out = node.value<bool>().value(), true);
}
bool Read(const toml::node& node, uint64_t* out) {
  if (node.is_string() && *node.value<std::string_view>() == kAuto) return *out = kByMemory, true;
  if (!node.is_integer() || node.value<int64_t>().value() < 0) return false;
  *out = static_cast<uint64_t>(node.value<int64_t>().value());
  return true;
}
bool Read(const toml::node& node, double* out) {
  return node.is_number() && (*out = node.value<double>().value(), true);
}
bool Read(const toml::node& node, std::string* out) {
  return node.is_string() && (*out = node.value<std::string>().value(), true);
}
template <typename T>
bool Read(const toml::node& node, std::vector<T>* out) {
  out->clear();
  return node.is_array() && std::ranges::all_of(*node.as_array(), [&](const toml::node& item) {
           return Read(item, &out->emplace_back());
         });
}
template <typename T>
bool Read(const toml::node& node, std::map<std::string, T>* out) {
  out->clear();
  if (!node.is_table()) return false;
  for (const auto& [key, item] : *node.as_table()) {
    if (!Read(item, &(*out)[std::string(key.str())])) return false;
  }
  return true;
}

Status SetFromToml(const Option& option, const toml::node& node) {
  OptionValue value = GetOption(option, OptionForm::kWritten);
  if (!std::visit([&](auto& out) { return Read(node, &out); }, value)) {
    std::ostringstream given;
    node.visit([&](const auto& n) { given << n; });
    return WrongKind(option, OptionForm::kWritten, option.key, given.str());
  }
  return SetOption(option, value, OptionForm::kWritten, option.key);
}

Status ApplyTable(const std::string& file, const std::string& prefix, const toml::table& table,
                  const std::vector<Option>& options) {
  for (const auto& [key_node, node] : table) {
    const std::string key(key_node.str());
    const std::string where = file + ":" + std::to_string(key_node.source().begin.line) + ": ";
    if (prefix.empty() && node.is_table() && std::ranges::count(options, key, &Option::section)) {
      PREFIXD_TRY(ApplyTable(file, key + ".", *node.as_table(), options));
      continue;
    }
    const auto option = std::ranges::find(options, prefix + key, &Option::key);
    if (option == options.end()) {
      return InvalidArgument(where + "unknown key '" + prefix + key +
                             "'; `prefixd --print-config` lists all keys");
    }
    if (Status s = SetFromToml(*option, node); !s.ok()) {
      return InvalidArgument(where + s.error().message);
    }
  }
  return {};
}

// ---- to TOML --------------------------------------------------------------------------------

std::string Toml(bool value) { return value ? "true" : "false"; }
std::string Toml(uint64_t value) {
  return value == kByMemory ? "\"" + std::string(kAuto) + "\"" : std::to_string(value);
}
std::string Toml(double value) { return ShortNumber(value); }
std::string Toml(const std::string& value) {
  std::ostringstream out;
  out << toml::value<std::string>(value);
  return out.str();
}
template <typename T>
std::string Toml(const std::vector<T>& list) {
  std::string text;
  for (const T& item : list) text += (text.empty() ? "" : ", ") + Toml(item);
  return "[" + text + "]";
}
template <typename T>
std::string Toml(const std::map<std::string, T>& table) {
  std::string text;
  for (const auto& [name, item] : table) {
    text += (text.empty() ? " " : ", ") + Toml(name) + " = " + Toml(item);
  }
  return "{" + text + (text.empty() ? "}" : " }");
}

std::string TomlText(const Option& option) {
  return std::visit([](const auto& value) { return Toml(value); },
                    GetOption(option, OptionForm::kWritten));
}

bool IsLoopback(const Address& address) {
  return address.host == "localhost" || address.host == "::1" || address.host.starts_with("127.");
}

}  // namespace

Status LoadConfig(const std::filesystem::path& file, Config* config) {
  std::ifstream in(file, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(in), {});
  if (!in.is_open() || in.bad()) {
    return Error{Code::kNotFound, "cannot read the configuration file " + file.string()};
  }
  toml::table table;
  try {
    table = toml::parse(text, file.string());
  } catch (const toml::parse_error& e) {
    return InvalidArgument(file.string() + ":" + std::to_string(e.source().begin.line) + ": " +
                           std::string(e.description()));
  }
  return ApplyTable(file.string(), "", table, OptionsOf(*config));
}

Status ApplyFlags(const std::map<std::string, std::string>& flags, Config* config) {
  for (const Option& option : OptionsOf(*config)) {
    const auto it = flags.find(option.flag);
    if (it == flags.end()) continue;
    PREFIXD_TRY(SetOptionFromText(option, it->second, "--" + option.flag));
  }
  return {};
}

namespace {

Status CheckTls(const Config& config) {
  if (config.tls_certificate.empty() != config.tls_key.empty()) {
    return InvalidArgument("tls.certificate and tls.key go together: set both, or none");
  }
  if (config.tls_certificate.empty() && !config.tls_client_ca.empty()) {
    return InvalidArgument(
        "tls.client_ca asks clients for certificates over TLS: set "
        "tls.certificate and tls.key too");
  }
  if (!config.tls_certificate.empty() && config.tcp.empty()) {
    return InvalidArgument("tls.certificate is for clients over TCP: set listen.tcp too");
  }
  return {};
}

// Who reaches a port beyond loopback is a stranger.
Status CheckTcp(const Config& config) {
  if (config.tcp.empty()) return {};
  PREFIXD_ASSIGN(const Address tcp, Address::ParseTcp(config.tcp));
  const bool loopback =
      tcp.host == "localhost" || tcp.host == "::1" || tcp.host.starts_with("127.");
  if (loopback || config.tcp_insecure) return {};
  const std::string beyond = "listen.tcp " + config.tcp + " is no loopback address: ";
  const std::string all_the_same =
      " (listen.tcp_insecure = true permits it all the same, in a network that you trust)";
  if (config.tls_certificate.empty()) {
    return InvalidArgument(beyond +
                           "set tls.certificate and tls.key, or prompts and tokens could be "
                           "overheard" +
                           all_the_same);
  }
  if (config.tokens_file.empty() && config.tls_client_ca.empty()) {
    return InvalidArgument(beyond +
                           "set auth.tokens, or anyone who reaches the port could read every "
                           "prompt" +
                           all_the_same);
  }
  return {};
}

}  // namespace

Status CheckConfig(const Config& config) {
  if (config.store.dir.empty()) return InvalidArgument("dir is empty: name the store's directory");
  if (config.socket.empty() && config.tcp.empty()) {
    return InvalidArgument("nothing to listen on: set listen.socket or listen.tcp");
  }
  if (!config.socket.empty()) PREFIXD_TRY(Address::Parse("unix:" + config.socket));
  if (!config.socket_group.empty() && config.socket_access != "group") {
    return InvalidArgument("listen.socket_group = '" + config.socket_group +
                           "' may only connect with listen.socket_access = 'group'");
  }
  if (!config.socket.empty() && !config.tcp.empty() &&
      (config.max_connections < 2 || config.max_tcp_connections >= config.max_connections)) {
    return InvalidArgument(
        "limits.max_tcp_connections must be less than limits.max_connections, so that local "
        "clients "
        "find a place beside TCP");
  }
  if (!config.http_listen.empty()) {
    PREFIXD_ASSIGN(const Address http, Address::ParseTcp(config.http_listen));
    if (!IsLoopback(http) && config.http_token_file.empty() && config.tokens_file.empty()) {
      return InvalidArgument("http.listen " + config.http_listen +
                             " is no loopback address: set http.token_file (or auth.tokens), or "
                             "anyone who reaches the port could watch the daemon");
    }
  } else if (!config.http_token_file.empty()) {
    return InvalidArgument("http.token_file is for http.listen, which is empty");
  }
  PREFIXD_TRY(CheckTls(config));
  return CheckTcp(config);
}

std::string PrintConfig(Config config) {
  std::string out = "# prefixd configuration (TOML). Command-line flags override this file.\n";
  Config unchanged;
  const std::vector<Option> options = OptionsOf(config), defaults = OptionsOf(unchanged);
  std::string_view section;
  for (size_t i = 0; i < options.size(); ++i) {
    const Option& option = options[i];
    if (section != option.section()) {
      section = option.section();
      out += "\n[" + std::string(section) + "]\n";
    }
    out += "\n# " + std::string(option.help) + "\n# Default " + TomlText(defaults[i]);
    const std::string bounds = OptionBoundsText(option, OptionForm::kWritten);
    if (!bounds.empty()) out += "; " + bounds;
    out += ". Flag --" + option.flag + ".\n";
    // A file that a package or a person keeps says nothing that the daemon would do anyway: so a
    // default may change, and an option go, without an error at the next upgrade.
    const std::string value = TomlText(option);
    if (value == TomlText(defaults[i])) out += "#";
    out += std::string(option.last()) + " = " + value + "\n";
  }
  return out;
}

}  // namespace prefixd::daemon
