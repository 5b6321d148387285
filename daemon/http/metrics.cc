#include "daemon/http/metrics.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "base/tables/statistics.h"

namespace prefixd::daemon {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

namespace {

using Labels = std::vector<ClientMetric::Label>;

template <typename T>
constexpr bool kIsList = false;
template <typename T>
constexpr bool kIsList<std::vector<T>> = true;

// Names come from clients, and Prometheus takes UTF-8 alone, each series once: different names stay
// different.
std::string Utf8(const std::string& text) {
  using nlohmann::json;
  const std::string replaced =
      json::parse(json(text).dump(-1, ' ', false, json::error_handler_t::replace))
          .get<std::string>();
  if (replaced == text && text.find('\\') == text.npos) return text;
  std::string escaped;
  for (const unsigned char c : text) {
    char hex[5] = {char(c)};
    if (c >= 0x80 || c == '\\') std::snprintf(hex, sizeof(hex), "\\x%02x", c);
    escaped += hex;
  }
  return escaped;
}

std::string WithoutEnd(std::string name, std::string_view end) {
  if (name.ends_with(end)) name.resize(name.size() - end.size());
  return name;
}

// The name of a statistic as Prometheus wants it, and by what its value is divided.
template <typename Entry>
std::pair<std::string, double> NameOf(const std::string& table, const Entry& statistic) {
  std::string name = "prefixd_" + table + "_" + std::string(statistic.name);
  double divisor = 1;
  switch (statistic.unit) {
    case StatisticUnit::kMilliseconds:
      name = WithoutEnd(name, "_ms") + "_seconds", divisor = 1e3;
      break;
    case StatisticUnit::kNanoseconds:
      name = WithoutEnd(name, "_ns") + "_seconds", divisor = 1e9;
      break;
    case StatisticUnit::kUnixMs:
      name = WithoutEnd(name, "_unix_ms") + "_timestamp_seconds", divisor = 1e3;
      break;
    case StatisticUnit::kBytes:
      if (name.find("bytes") == name.npos) name += "_bytes";
      break;
    default:
      break;
  }
  if (statistic.kind == StatisticKind::kCounter) name = WithoutEnd(name, "_total") + "_total";
  return {name, divisor};
}

class Families {
 public:
  // Adds a value to the family of the name, which is made when it is first used.
  void Add(const std::string& name, std::string_view help, bool counter, double value,
           Labels labels = {}) {
    ClientMetric metric;
    metric.label = std::move(labels);
    (counter ? metric.counter.value : metric.gauge.value) = value;
    Family(name, help, counter ? MetricType::Counter : MetricType::Gauge)
        .metric.push_back(std::move(metric));
  }
  void AddHistogram(const std::string& name, std::string_view help, const LatencyCounts& counts,
                    Labels labels) {
    ClientMetric metric;
    metric.label = std::move(labels);
    uint64_t below = 0;
    for (size_t i = 0; i + 1 < LatencyCounts::kBuckets; ++i) {
      below += counts.calls[i];
      if (i % LatencyCounts::kParts != LatencyCounts::kParts - 1) continue;  // whole octaves
      metric.histogram.bucket.push_back({below, double(LatencyCounts::EndOf(i)) * 1e-6});
    }
    metric.histogram.sample_count = counts.count();
    metric.histogram.sample_sum = double(counts.total_ns) * 1e-9;
    metric.histogram.bucket.push_back(
        {metric.histogram.sample_count, std::numeric_limits<double>::infinity()});
    Family(name, help, MetricType::Histogram).metric.push_back(std::move(metric));
  }

  template <typename S>
  void AddTable(const std::string& table, const S& stats) {
    Labels texts;
    ForEachStatistic<S>([&](const auto& statistic) {
      const auto& value = stats.*statistic.member;
      using Value = std::remove_cvref_t<decltype(value)>;
      if constexpr (kIsList<Value>) {
        for (const auto& item : value) AddItem(table + "_" + std::string(statistic.name), item);
      } else if constexpr (std::convertible_to<Value, std::string>) {
        texts.push_back({std::string(statistic.name), Utf8(value)});
      } else if constexpr (std::is_arithmetic_v<Value>) {
        AddNumber(table, statistic, double(value), {});
      } else {
        for (size_t i = 0; i < value.size(); ++i) {
          AddNumber(table, statistic, double(value[i]),
                    {{std::string(statistic.part), std::string(statistic.parts[i])}});
        }
      }
    });
    if (!texts.empty()) {
      Add("prefixd_" + table + "_info", "Texts, as labels of a constant 1.", false, 1, texts);
    }
  }

  std::string Text() const {
    std::vector<MetricFamily> list;
    for (const std::string& name : order_) list.push_back(families_.at(name));
    std::ostringstream out;
    prometheus::TextSerializer().Serialize(out, list);
    return std::move(out).str();
  }

 private:
  MetricFamily& Family(const std::string& name, std::string_view help, MetricType type) {
    const auto [it, made] = families_.try_emplace(name);
    if (made) {
      order_.push_back(name);
      it->second.name = name;
      it->second.help = help;
      it->second.type = type;
    }
    return it->second;
  }
  void AddNumber(const std::string& table, const auto& statistic, double value, Labels labels) {
    const auto [name, divisor] = NameOf(table, statistic);
    Add(name, statistic.help, statistic.kind == StatisticKind::kCounter, value / divisor,
        std::move(labels));
  }
  // One entry of a list, told apart by its label.
  template <typename S>
  void AddItem(const std::string& table, const S& item) {
    Labels labels;
    ForEachStatistic<S>([&](const auto& statistic) {
      if constexpr (std::convertible_to<decltype(item.*statistic.member), std::string>) {
        labels.push_back({std::string(statistic.name), Utf8(item.*statistic.member)});
      }
    });
    ForEachStatistic<S>([&](const auto& statistic) {
      if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(item.*statistic.member)>>) {
        AddNumber(table, statistic, double(item.*statistic.member), labels);
      }
    });
  }

  std::map<std::string, MetricFamily> families_;
  std::vector<std::string> order_;
};

// The tenants that are named, where more come than kNamedTenants: those that take most space.
std::set<std::string> NamedTenants(const MetricsInput& input) {
  std::map<std::string, uint64_t> takes;
  for (const TenantStats& t : input.runtime.tenants) takes[t.tenant] += t.bytes;
  for (const MemoryOfTenant& t : input.runtime.memory_tenants) {
    takes[t.tenant] += t.bytes + t.host_tier_bytes;
  }
  for (const auto& [tenant, n] : input.prefixes) takes[tenant];
  for (const Watch::Attachment& a : input.watch.sessions) takes[a.tenant];
  std::vector<std::pair<uint64_t, std::string>> most;
  for (const auto& [tenant, bytes] : takes) most.emplace_back(bytes, tenant);
  const size_t kept = std::min(most.size(), kNamedTenants);
  std::ranges::partial_sort(most, most.begin() + kept, std::greater());
  std::set<std::string> named;
  for (size_t i = 0; i < kept; ++i) named.insert(most[i].second);
  return named;
}

void AddWatch(const MetricsInput& input, const std::set<std::string>& named, Families* out) {
  const Watch::Report& watch = input.watch;
  for (size_t i = 0; i < kTimedNames.size(); ++i) {
    out->AddHistogram("prefixd_call_seconds",
                      "How long calls took in the daemon. step: a call with one step or a batch; "
                      "put: from its beginning to its commit.",
                      watch.latencies[i], {{"call", std::string(kTimedNames[i])}});
  }
  for (size_t i = 0; i < kCodes; ++i) {
    out->Add("prefixd_failures_total", "Calls answered by an error, by its code.", true,
             double(watch.failed[i]), {{"code", std::string(CodeName(static_cast<Code>(i)))}});
  }
  out->Add("prefixd_saved_attaches_total", "Sessions that attached to a stored prefix.", true,
           double(watch.saved_by_all.attaches));
  out->Add("prefixd_saved_tokens_total",
           "Tokens of the prefixes that sessions attached to: none of them was prefilled again.",
           true, double(watch.saved_by_all.tokens));
  out->Add("prefixd_saved_timed_tokens_total",
           "The part of them for whose model the daemon saw a put, and so knows its pace.", true,
           double(watch.saved_by_all.timed_tokens));
  out->Add("prefixd_saved_seconds_total",
           "How long their prefill would have taken, at the pace of their model's puts.", true,
           watch.saved_by_all.seconds);
  if (input.viewer.sees == Viewer::Sees::kTotals) return;
  std::map<std::string, std::pair<uint64_t, Watch::Saved>> tenants;
  for (const TenantStats& t : input.runtime.tenants) tenants[t.tenant];
  for (const Watch::Attachment& a : watch.sessions) ++tenants[a.tenant].first;
  for (const auto& [prefix, saved] : watch.saved)
    tenants[saved.tenant].second.tokens += saved.tokens;
  for (const auto& [tenant, n] : input.prefixes) {
    if (!named.contains(tenant)) continue;
    out->Add("prefixd_tenant_prefixes", "Stored prefixes, by tenant.", false, double(n),
             {{"tenant", Utf8(tenant)}});
  }
  for (const auto& [tenant, held] : tenants) {
    if (!named.contains(tenant)) continue;
    const Labels labels = {{"tenant", Utf8(tenant)}};
    out->Add("prefixd_tenant_sessions", "Attached sessions, by tenant.", false, double(held.first),
             labels);
    out->Add("prefixd_tenant_saved_tokens",
             "Tokens saved by the prefixes of the tenant that were attached to last.", false,
             double(held.second.tokens), labels);
  }
}

void AddProcess(Families* out) {
  rusage usage{};
  if (::getrusage(RUSAGE_SELF, &usage) != 0) return;
  const auto seconds = [](const timeval& t) { return double(t.tv_sec) + double(t.tv_usec) * 1e-6; };
  out->Add("process_cpu_seconds_total", "Time on the processor, user and system.", true,
           seconds(usage.ru_utime) + seconds(usage.ru_stime));
  out->Add("process_max_resident_memory_bytes", "The most memory that was resident.", false,
           double(usage.ru_maxrss) * 1024);
}

}  // namespace

std::string MetricsText(const MetricsInput& input) {
  Families out;
  out.Add("prefixd_ready", "1 where /readyz says that the daemon serves.", false,
          input.ready ? 1 : 0);
  out.AddTable("server", input.server);
  const std::set<std::string> named = NamedTenants(input);
  RuntimeStats runtime = input.runtime;
  const auto unnamed = [&](const auto& of) { return !named.contains(of.tenant); };
  const size_t left_out = std::erase_if(runtime.tenants, unnamed);
  std::erase_if(runtime.memory_tenants, unnamed);
  std::erase_if(runtime.host_tenants, unnamed);
  out.AddTable("store", runtime);
  out.Add(
      "prefixd_tenants_left_out",
      "Tenants with stored prefixes that are not named here, because a hundred others take more.",
      false, double(left_out));
  out.AddTable("ledger", input.watch.ledger);
  AddWatch(input, named, &out);
  AddProcess(&out);
  return out.Text();
}

}  // namespace prefixd::daemon
