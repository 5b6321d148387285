#include "daemon/config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

#include "client_lib/address.h"

namespace prefixd::daemon {
namespace {

// The value of one key, from either source.
using Value = std::variant<std::string, uint64_t, bool, std::vector<double>>;

std::string Quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

std::string Number(double x) {
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), x).ptr;
  return {buffer, end};
}

Status Assign(const ConfigItem& item, const Value& value, Config* config) {
  const auto bad = [&](const std::string& why) { return InvalidArgument(item.path() + " " + why); };
  if (auto* m = std::get_if<std::string Config::*>(&item.member)) {
    const std::string& text = std::get<std::string>(value);
    if (!item.choices.empty() && std::ranges::find(item.choices, text) == item.choices.end()) {
      std::string list;
      for (std::string_view c : item.choices) list += (list.empty() ? "" : ", ") + std::string(c);
      return bad("must be one of " + list + ", not " + Quoted(text));
    }
    config->** m = text;
  } else if (auto* n = std::get_if<uint64_t Config::*>(&item.member)) {
    const uint64_t number = std::get<uint64_t>(value);
    if (number < item.min || number > item.max) {
      return bad("must be from " + std::to_string(item.min) + " to " + std::to_string(item.max) +
                 ", not " + std::to_string(number));
    }
    config->** n = number;
  } else if (auto* b = std::get_if<bool Config::*>(&item.member)) {
    config->** b = std::get<bool>(value);
  } else {
    const auto& list = std::get<std::vector<double>>(value);
    for (double x : list) {
      if (!(x > 0 && x <= 1))
        return bad("must hold fractions above 0 and up to 1, not " + Number(x));
    }
    if (list.empty() || list.size() > 16) return bad("must hold 1 to 16 fractions");
    config->*std::get<std::vector<double> Config::*>(item.member) = list;
  }
  return {};
}

Result<Value> FromToml(const ConfigItem& item, const toml::node& node) {
  const auto wrong = [&](const char* want) {
    return InvalidArgument(item.path() + " must be " + want);
  };
  switch (item.member.index()) {
    case 0:
      if (!node.is_string()) return wrong("a string");
      return Value(node.value<std::string>().value());
    case 1: {
      const auto number = node.is_integer() ? node.value<int64_t>() : std::nullopt;
      if (!number || *number < 0) return wrong("a whole number of at least 0");
      return Value(static_cast<uint64_t>(*number));
    }
    case 2:
      if (!node.is_boolean()) return wrong("true or false");
      return Value(node.value<bool>().value());
    default: {
      std::vector<double> list;
      if (!node.is_array()) return wrong("a list of numbers");
      for (const toml::node& x : *node.as_array()) {
        if (!x.is_number()) return wrong("a list of numbers");
        list.push_back(x.value<double>().value());
      }
      return Value(std::move(list));
    }
  }
}

Result<Value> FromText(const ConfigItem& item, std::string_view text) {
  switch (item.member.index()) {
    case 0:
      return Value(std::string(text));
    case 1: {
      uint64_t number = 0;
      const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), number);
      if (ec != std::errc{} || end != text.data() + text.size()) {
        return InvalidArgument(item.path() + " must be a whole number, not " + Quoted(text));
      }
      return Value(number);
    }
    case 2:
      if (text == "true" || text == "on" || text == "1") return Value(true);
      if (text == "false" || text == "off" || text == "0") return Value(false);
      return InvalidArgument(item.path() + " must be true or false, not " + Quoted(text));
    default: {
      std::vector<double> list;
      std::stringstream stream{std::string(text)};
      for (std::string part; std::getline(stream, part, ',');) {
        double x = 0;
        const auto [end, ec] = std::from_chars(part.data(), part.data() + part.size(), x);
        if (ec != std::errc{} || end != part.data() + part.size()) {
          return InvalidArgument(item.path() + " must be numbers between commas, not " +
                                 Quoted(text));
        }
        list.push_back(x);
      }
      return Value(std::move(list));
    }
  }
}

std::string TomlText(const ConfigItem& item, const Config& config) {
  std::ostringstream out;
  std::visit(
      [&](auto member) {
        const auto& value = config.*member;
        using T = std::remove_cvref_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::string>) {
          out << toml::value<std::string>(value);
        } else if constexpr (std::is_same_v<T, bool>) {
          out << (value ? "true" : "false");
        } else if constexpr (std::is_same_v<T, uint64_t>) {
          out << value;
        } else {
          out << '[';
          for (size_t i = 0; i < value.size(); ++i) {
            const std::string text = Number(value[i]);
            out << (i ? ", " : "") << text << (text.find_first_of(".e") == text.npos ? ".0" : "");
          }
          out << ']';
        }
      },
      item.member);
  return out.str();
}

std::string Bounds(const ConfigItem& item) {
  std::string text;
  for (std::string_view c : item.choices) text += (text.empty() ? "" : " | ") + std::string(c);
  if (item.member.index() == 1) {
    text = std::to_string(item.min) + " to " + std::to_string(item.max);
  } else if (item.member.index() == 2) {
    text = "true | false";
  } else if (item.member.index() == 3) {
    text = "above 0, up to 1, at most 16 of them";
  }
  return text;
}

const ConfigItem* FindItem(std::string_view section, std::string_view key) {
  for (const ConfigItem& item : ConfigItems()) {
    if (section == item.section && key == item.key) return &item;
  }
  return nullptr;
}

bool IsSection(std::string_view name) {
  return !name.empty() && std::ranges::any_of(ConfigItems(), [&](const ConfigItem& item) {
    return name == item.section;
  });
}

Status ApplyTable(const std::string& file, std::string_view section, const toml::table& table,
                  Config* config) {
  for (const auto& [key_node, node] : table) {
    const std::string_view key = key_node.str();
    const std::string where = file + ":" + std::to_string(key_node.source().begin.line) + ": ";
    if (section.empty() && node.is_table() && IsSection(key)) {
      PREFIXD_TRY(ApplyTable(file, key, *node.as_table(), config));
      continue;
    }
    const ConfigItem* item = FindItem(section, key);
    if (item == nullptr) {
      const std::string path = (section.empty() ? "" : std::string(section) + ".");
      return InvalidArgument(where + "unknown key '" + path + std::string(key) +
                             "'; `prefixd --print-config` lists all keys");
    }
    auto value = FromToml(*item, node);
    Status status = value.ok() ? Assign(*item, *value, config) : Status(value.error());
    if (!status.ok()) return InvalidArgument(where + status.error().message);
  }
  return {};
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
  return ApplyTable(file.string(), "", table, config);
}

Status SetItem(const ConfigItem& item, std::string_view text, Config* config) {
  PREFIXD_ASSIGN(const Value value, FromText(item, text));
  return Assign(item, value, config);
}

Status CheckConfig(const Config& config) {
  if (config.dir.empty()) return InvalidArgument("dir is empty: name the store's directory");
  if (config.socket.empty() && config.tcp.empty()) {
    return InvalidArgument("nothing to listen on: set listen.socket or listen.tcp");
  }
  if (!config.socket.empty()) PREFIXD_TRY(Address::Parse("unix:" + config.socket));
  if (!config.tcp.empty()) {
    PREFIXD_ASSIGN(const Address tcp, Address::ParseTcp(config.tcp));
    const bool loopback =
        tcp.host == "localhost" || tcp.host == "::1" || tcp.host.starts_with("127.");
    if (!loopback && config.tcp_token_file.empty()) {
      return InvalidArgument("listen.tcp " + config.tcp +
                             " is no loopback address: set listen.tcp_token_file, or anyone who "
                             "reaches the port could read every prompt of their tenant name");
    }
  }
  return {};
}

std::string PrintConfig(const Config& config) {
  std::string out = "# prefixd configuration (TOML). Command-line flags override this file.\n";
  std::string section;
  const Config defaults;
  for (const ConfigItem& item : ConfigItems()) {
    if (section != item.section) {
      section = item.section;
      out += "\n[" + section + "]\n";
    }
    out += "\n# " + std::string(item.help) + "\n# Default " + TomlText(item, defaults);
    if (*item.unit) out += "; " + std::string(item.unit);
    if (const std::string bounds = Bounds(item); !bounds.empty()) out += "; " + bounds;
    out += ". Flag --" + std::string(item.flag) + ".\n";
    out += std::string(item.key) + " = " + TomlText(item, config) + "\n";
  }
  return out;
}

RuntimeOptions Config::Runtime() const {
  RuntimeOptions o;
  o.dir = dir;
  o.io = io;
  o.host_tier_bytes = host_tier_mib << 20;
  o.min_free_bytes = min_free_mib << 20;
  o.quota_bytes = quota_mib << 20;
  o.scrub_bytes_per_second = scrub_mib_per_second << 20;
  o.scrub_interval_hours = static_cast<uint32_t>(scrub_interval_hours);
  o.threads = static_cast<uint32_t>(threads);
  o.compute = compute;
  o.anchors = {static_cast<uint32_t>(n_sink), static_cast<uint32_t>(n_tail)};
  o.checkpoint_tokens = static_cast<uint32_t>(checkpoint_tokens);
  o.moment_cross = moment_cross;
  o.query_samples = static_cast<uint32_t>(query_samples);
  o.choice_budgets = choice_budgets;
  o.build_ivf = build_ivf;
  o.ivf_min_tokens = static_cast<uint32_t>(ivf_min_tokens);
  o.max_sessions = static_cast<uint32_t>(max_sessions);
  return o;
}

}  // namespace prefixd::daemon
