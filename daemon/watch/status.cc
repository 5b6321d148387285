#include "daemon/watch/status.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace prefixd::daemon {

using wire::Json;

namespace {

constexpr size_t kMostShown = 50;

Json LatencyJson(const LatencyCounts& counts) {
  const uint64_t n = counts.count();
  return {{"calls", n},
          {"mean_seconds", n == 0 ? 0.0 : double(counts.total_ns) * 1e-9 / double(n)},
          {"p50_seconds", counts.QuantileSeconds(0.5)},
          {"p99_seconds", counts.QuantileSeconds(0.99)}};
}

Json SavedJson(const Watch::Saved& saved) {
  Json json = {
      {"attaches", saved.attaches}, {"tokens", saved.tokens}, {"last_unix_ms", saved.last_unix_ms}};
  if (saved.timed_tokens > 0) {
    json["seconds"] = saved.seconds;
    json["timed_tokens"] = saved.timed_tokens;
  }
  return json;
}

Json PrefixJson(const std::string& id, const Watch::Saved& saved) {
  return {{"id", id},
          {"tenant", saved.tenant},
          {"model", saved.model},
          {"n_tokens", saved.n_tokens},
          {"saved", SavedJson(saved)}};
}

Json PrefixJson(const PrefixSummary& s, const std::map<std::string, Watch::Saved>& saved) {
  const auto it = saved.find(s.id);
  Json json = PrefixJson(s.id, it == saved.end() ? Watch::Saved{} : it->second);
  json["tenant"] = s.tenant;
  json["model"] = s.model;
  json["label"] = s.label;
  json["n_tokens"] = s.n_tokens;
  json["bytes"] = s.own_bytes;
  json["pinned"] = s.pinned;
  json["quarantined"] = s.quarantined;
  json["last_used_unix_ms"] = s.last_used_unix_ms;
  return json;
}

Json SessionJson(const Watch::Attachment& a) {
  const Ledger& ledger = a.ledger;
  Json json = {{"tenant", a.tenant},
               {"model", a.model},
               {"prefix", a.prefix},
               {"n_tokens", a.n_tokens},
               {"attached_ms", a.attached_ms},
               {"mode", StepModeName(a.policy.mode)},
               {"steps", ledger.steps},
               {"tokens_per_step", ledger.tokens_per_step()},
               {"completion_share", ledger.mean_rho_z()}};
  if (a.policy.k) {
    json["k"] = *a.policy.k;
  } else {
    json["budget"] = a.policy.budget;
  }
  return json;
}

// Keeps the first kMostShown in the order of `less`, and says how many are left out.
template <typename T, typename Less>
size_t KeepFirst(std::vector<T>* list, const Less& less) {
  const size_t kept = std::min(list->size(), kMostShown);
  std::partial_sort(list->begin(), list->begin() + static_cast<ptrdiff_t>(kept), list->end(), less);
  const size_t left_out = list->size() - kept;
  list->resize(kept);
  return left_out;
}

void AddLists(const Watch::Report& report, Json* json) {
  std::vector<const Watch::Attachment*> sessions;
  for (const Watch::Attachment& a : report.sessions) sessions.push_back(&a);
  (*json)["sessions_left_out"] = KeepFirst(&sessions, [](const auto* a, const auto* b) {
    return std::pair(a->ledger.steps, b->number) > std::pair(b->ledger.steps, a->number);
  });
  Json list = Json::array();
  for (const Watch::Attachment* a : sessions) list.push_back(SessionJson(*a));
  (*json)["sessions"] = std::move(list);

  using Entry = std::pair<const std::string, Watch::Saved>;
  std::vector<const Entry*> saved;
  for (const Entry& entry : report.saved) saved.push_back(&entry);
  (*json)["prefixes_left_out"] = KeepFirst(&saved, [](const Entry* a, const Entry* b) {
    return std::tie(a->second.tokens, b->first) > std::tie(b->second.tokens, a->first);
  });
  list = Json::array();
  for (const Entry* entry : saved) list.push_back(PrefixJson(entry->first, entry->second));
  (*json)["prefixes"] = std::move(list);

  list = Json::array();
  for (const Watch::Failure& f : report.failures) {
    list.push_back({{"unix_ms", f.unix_ms},
                    {"tenant", f.tenant},
                    {"call", f.call},
                    {"request", f.request},
                    {"code", CodeName(f.code)},
                    {"message", f.message}});
  }
  (*json)["failures"] = std::move(list);
}

Json JsonOf(const Watch::Report& report, const Viewer& viewer) {
  Json json = {{"ledger", wire::ToJson(report.ledger)}, {"saved", SavedJson(report.saved_by_all)}};
  Json& latency = json["latency"] = Json::object();
  for (size_t i = 0; i < kTimedNames.size(); ++i) {
    latency[std::string(kTimedNames[i])] = LatencyJson(report.latencies[i]);
  }
  latency["recent_step"] = LatencyJson(report.recent);
  Json& failed = json["failed"] = Json::object();
  for (size_t i = 0; i < kCodes; ++i) {
    if (report.failed[i] > 0) {
      failed[std::string(CodeName(static_cast<Code>(i)))] = report.failed[i];
    }
  }
  Json& points = json["points"] = Json::array();
  for (const Watch::Point& p : report.points) {
    points.push_back({p.unix_ms, p.calls, p.p50_seconds, p.p99_seconds});
  }
  if (viewer.sees != Viewer::Sees::kTotals) AddLists(report, &json);
  return json;
}

std::optional<std::string> TenantOf(const Viewer& viewer) {
  if (viewer.sees == Viewer::Sees::kAll) return std::nullopt;
  return viewer.tenant;
}

// Puts those that are stored, whether anybody attached to them or not, in the place of the list.
Status AddStored(Store& store, const Watch::Report& report, const Viewer& viewer, Json* json) {
  ListSpec spec;
  spec.tenant = TenantOf(viewer);
  PREFIXD_ASSIGN(const PrefixPage page, store.ListPrefixes(spec));
  std::vector<const PrefixSummary*> prefixes;
  for (const PrefixSummary& s : page.prefixes) prefixes.push_back(&s);
  const auto tokens = [&](const PrefixSummary* s) {
    const auto it = report.saved.find(s->id);
    return it == report.saved.end() ? uint64_t{0} : it->second.tokens;
  };
  const size_t left_out = KeepFirst(&prefixes, [&](const auto* a, const auto* b) {
    return std::tuple(tokens(a), a->last_used_unix_ms, b->id) >
           std::tuple(tokens(b), b->last_used_unix_ms, a->id);
  });
  std::vector<Json> list;
  for (const PrefixSummary* s : prefixes) list.push_back(PrefixJson(*s, report.saved));
  size_t beyond = 0;
  // Those beyond the first page that saved something stand here with what is known of them.
  if (!page.next.empty()) {
    std::set<std::string_view> first_page;
    for (const PrefixSummary& s : page.prefixes) first_page.insert(s.id);
    for (Json& known : (*json)["prefixes"]) {
      if (first_page.contains(known["id"].get_ref<const std::string&>())) continue;
      list.push_back(std::move(known));
    }
    std::ranges::stable_sort(list, std::greater<>(), [](const Json& prefix) {
      return prefix["saved"]["tokens"].get<uint64_t>();
    });
    beyond = list.size() - std::min(list.size(), kMostShown);
    list.resize(list.size() - beyond);
  }
  (*json)["prefixes"] = std::move(list);
  (*json)["prefixes_left_out"] = left_out + beyond;
  (*json)["more_prefixes"] = !page.next.empty();
  return {};
}

}  // namespace

Json WatchJson(const Watch& watch, const Viewer& viewer) {
  return JsonOf(watch.Take(TenantOf(viewer)), viewer);
}

void KeepVisible(const Viewer& viewer, RuntimeStats* stats) {
  if (viewer.sees == Viewer::Sees::kAll) return;
  const bool none = viewer.sees == Viewer::Sees::kTotals;
  const auto hidden = [&](const auto& t) { return none || t.tenant != viewer.tenant; };
  std::erase_if(stats->tenants, hidden);
  std::erase_if(stats->memory_tenants, hidden);
  std::erase_if(stats->host_tenants, hidden);
}

Json StatusJson(Store& store, const Watch& watch, const wire::ServerStats& server,
                const Viewer& viewer) {
  static constexpr const char* kSees[] = {"totals", "tenant", "all"};
  const Watch::Report report = watch.Take(TenantOf(viewer));
  Json json = {{"sees", kSees[static_cast<size_t>(viewer.sees)]},
               {"tenant", viewer.tenant},
               {"now_unix_ms", std::chrono::duration_cast<std::chrono::milliseconds>(
                                   std::chrono::system_clock::now().time_since_epoch())
                                   .count()},
               {"server", wire::ToJson(server)},
               {"watch", JsonOf(report, viewer)}};
  auto stats = store.Stats();
  if (stats.ok()) {
    KeepVisible(viewer, &*stats);
    json["runtime"] = wire::ToJson(*stats);
  } else {
    json["runtime_error"] = stats.error().message;
  }
  if (viewer.sees != Viewer::Sees::kTotals) {
    if (Status s = AddStored(store, report, viewer, &json["watch"]); !s.ok()) {
      json["prefixes_error"] = s.error().message;
    }
  }
  return json;
}

}  // namespace prefixd::daemon
