#include "daemon/config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "protocol/address.h"

namespace prefixd::daemon {
namespace {

// The value of one key, from either source.
using Table = std::map<std::string, uint64_t>;
using Value = std::variant<std::string, uint64_t, bool, std::vector<double>, Table>;

std::string Quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

std::string Number(double x) {
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), x).ptr;
  return {buffer, end};
}

Status Assign(const ConfigItem& item, const Value& value, Config* config) {
  const auto bad = [&](const std::string& why) { return InvalidArgument(item.path() + " " + why); };
  const auto in_bounds = [&](uint64_t n) { return n >= item.min && n <= item.max; };
  const std::string bounds =
      "must be from " + std::to_string(item.min) + " to " + std::to_string(item.max) + ", not ";
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
    if (!in_bounds(number)) return bad(bounds + std::to_string(number));
    config->** n = number;
  } else if (auto* b = std::get_if<bool Config::*>(&item.member)) {
    config->** b = std::get<bool>(value);
  } else if (auto* t = std::get_if<Table Config::*>(&item.member)) {
    for (const auto& [name, number] : std::get<Table>(value)) {
      if (!in_bounds(number)) {
        return bad("of " + Quoted(name) + " " + bounds + std::to_string(number));
      }
    }
    config->** t = std::get<Table>(value);
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
    case 4: {
      Table out;
      if (!node.is_table()) return wrong("a table of whole numbers, { name = number }");
      for (const auto& [key, entry] : *node.as_table()) {
        const auto number = entry.is_integer() ? entry.value<int64_t>() : std::nullopt;
        if (!number || *number < 0) return wrong("a table of whole numbers, { name = number }");
        out[std::string(key.str())] = static_cast<uint64_t>(*number);
      }
      return Value(std::move(out));
    }
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

std::optional<uint64_t> WholeNumber(std::string_view text) {
  uint64_t number = 0;
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (ec != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return number;
}

Result<Value> FromText(const ConfigItem& item, std::string_view text) {
  switch (item.member.index()) {
    case 0:
      return Value(std::string(text));
    case 1: {
      const auto number = WholeNumber(text);
      if (!number) {
        return InvalidArgument(item.path() + " must be a whole number, not " + Quoted(text));
      }
      return Value(*number);
    }
    case 4: {
      Table out;
      std::stringstream stream{std::string(text)};
      for (std::string part; std::getline(stream, part, ',');) {
        const size_t equals = part.rfind('=');
        const auto number = equals == part.npos
                                ? std::nullopt
                                : WholeNumber(std::string_view(part).substr(equals + 1));
        if (!number) {
          return InvalidArgument(item.path() + " must be name=number pairs between commas, not " +
                                 Quoted(text));
        }
        out[part.substr(0, equals)] = *number;
      }
      return Value(std::move(out));
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
        } else if constexpr (std::is_same_v<T, Table>) {
          out << '{';
          const char* before = " ";
          for (const auto& [name, number] : value) {
            out << std::exchange(before, ", ") << toml::value<std::string>(name) << " = " << number;
          }
          out << (value.empty() ? "}" : " }");
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
  if (item.member.index() == 1 || item.member.index() == 4) {
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

Result<std::vector<std::pair<std::string, double>>> ParseShares(std::string_view text) {
  std::vector<std::pair<std::string, double>> shares;
  double sum = 0;
  const auto trim = [](std::string_view s) {
    const size_t begin = s.find_first_not_of(" \t"), end = s.find_last_not_of(" \t");
    return begin == s.npos ? std::string_view() : s.substr(begin, end - begin + 1);
  };
  std::stringstream stream{std::string(text)};
  for (std::string part; std::getline(stream, part, ',');) {
    const size_t equals = part.rfind('=');
    const std::string_view number =
        equals == part.npos ? "" : trim(std::string_view(part).substr(equals + 1));
    double share = 0;
    const auto [end, ec] = std::from_chars(number.data(), number.data() + number.size(), share);
    if (equals == part.npos || ec != std::errc{} || end != number.data() + number.size() ||
        !(share > 0 && share <= 1)) {
      return InvalidArgument(
          "store.host_tier_shares must be TENANT=FRACTION between commas, with "
          "fractions above 0 and up to 1, not " +
          Quoted(part));
    }
    const std::string tenant(trim(std::string_view(part).substr(0, equals)));
    if (std::ranges::find(shares, tenant, &std::pair<std::string, double>::first) != shares.end()) {
      return InvalidArgument("store.host_tier_shares names tenant " + Quoted(tenant) + " twice");
    }
    shares.emplace_back(tenant, share);
    sum += share;
  }
  if (sum > 1 + 1e-9) {
    return InvalidArgument("store.host_tier_shares add up to " + Number(sum) +
                           "; they may be 1 at most");
  }
  return shares;
}

Status CheckConfig(const Config& config) {
  PREFIXD_TRY(ParseShares(config.host_tier_shares));
  if (const auto estimators = ParseVariants(config.estimators); !estimators.ok()) {
    return InvalidArgument("ingest.estimators: " + estimators.error().message);
  }
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
  if (auto shares = ParseShares(host_tier_shares); shares.ok()) {  // else CheckConfig refused it
    o.host_tier_shares = *std::move(shares);
  }
  o.host_tier_hugetlb = host_tier_hugetlb;
  o.host_tier_mlock = host_tier_mlock;
  o.pin_host_tier = pin_host_tier;
  o.selector_memory_bytes = selector_memory_mib << 20;
  o.shared_rows_bytes = shared_rows_mib << 20;
  o.min_free_bytes = min_free_mib << 20;
  o.quota_bytes = quota_mib << 20;
  o.read_deadline_ms = static_cast<uint32_t>(read_deadline_ms);
  o.tenant_quota_bytes = tenant_quota_mib << 20;
  for (const auto& [tenant, mib] : tenant_quotas_mib) o.tenant_quotas[tenant] = mib << 20;
  o.encoding = encoding;
  o.evict = evict;
  o.settle = settle;
  o.settle_min_tokens = static_cast<uint32_t>(settle_min_tokens);
  o.merge_max_tokens = static_cast<uint32_t>(merge_max_tokens);
  o.scrub_bytes_per_second = scrub_mib_per_second << 20;
  o.scrub_interval_hours = static_cast<uint32_t>(scrub_interval_hours);
  o.threads = static_cast<uint32_t>(threads);
  o.compute = compute;
  o.anchors = {static_cast<uint32_t>(n_sink), static_cast<uint32_t>(n_tail)};
  o.checkpoint_tokens = static_cast<uint32_t>(checkpoint_tokens);
  if (auto parsed = ParseVariants(estimators); parsed.ok()) {  // CheckConfig has said so if not
    o.estimators = *std::move(parsed);
  }
  o.phi_features = phi_features;
  o.clusters = static_cast<uint32_t>(clusters);
  o.query_samples = static_cast<uint32_t>(query_samples);
  o.choice_budgets = choice_budgets;
  o.build_codes = build_codes;
  o.codes_min_tokens = static_cast<uint32_t>(codes_min_tokens);
  o.recall_target = static_cast<double>(recall_percent) / 100;
  o.build_ivf = build_ivf;
  o.ivf_min_tokens = static_cast<uint32_t>(ivf_min_tokens);
  o.max_sessions = static_cast<uint32_t>(max_sessions);
  return o;
}

}  // namespace prefixd::daemon
