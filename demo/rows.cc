#include "demo/rows.h"

#include <nlohmann/json.hpp>

namespace prefixd::demo {

using nlohmann::json;

json RowJson(const Row& row) {
  const std::optional<double> budget = row.reading.budget;
  json j = {{"method", row.reading.method}, {"feasible", row.feasible}};
  j["budget"] = budget ? json(*budget) : json();
  if (!row.feasible) {
    j["reason"] = row.reason;
    for (const char* key :
         {"nll", "rel_l1", "tokens_per_step", "bytes_per_step", "ms_per_token", "k"}) {
      j[key] = nullptr;
    }
    return j;
  }
  j["nll"] = row.nll;
  j["rel_l1"] = row.rel_l1;
  j["rel_l1_by_head"] = row.rel_l1_by_head;
  j["rel_l1_by_quartile"] = row.rel_l1_by_quartile;
  j["tokens_per_step"] = row.tokens_per_step;
  j["k"] = row.k;
  j["bytes_per_step"] = row.bytes_per_step;
  j["ssd_bytes_per_step"] = row.ssd_bytes_per_step;
  j["host_bytes_per_step"] = row.host_bytes_per_step;
  j["scan_bytes_per_step"] = row.scan_bytes_per_step;
  j["ms_per_token"] = row.ms_per_token;
  return j;
}

json BreakEvenJson(const BreakEven& sweep) {
  json j = {{"k_phi", sweep.k_phi},       {"k", json::array()},
            {"load_ms", json::array()},   {"compute_ms", json::array()},
            {"select_ms", json::array()}, {"completion", json::object()}};
  for (const auto& [k, timing] : sweep.topk) {
    j["k"].push_back(k);
    j["load_ms"].push_back(timing.load_ms);
    j["compute_ms"].push_back(timing.compute_ms);
    j["select_ms"].push_back(timing.select_ms);
  }
  for (const auto& [method, timing] : sweep.completion) {
    j["completion"][method] = {{"load_ms", timing.load_ms},
                               {"compute_ms", timing.compute_ms},
                               {"select_ms", timing.select_ms}};
  }
  return j;
}

json ChoicesJson(const std::vector<HeadChoice>& choices) {
  const auto number = [](double x) { return x == x ? json(x) : json(); };
  json all = json::array();
  for (const HeadChoice& c : choices) {
    json errors = json::object();
    for (const EstimatorError& e : c.errors) errors[e.estimator.Name()] = number(e.error);
    all.push_back({{"layer", c.layer},
                   {"kv_head", c.kv_head},
                   {"budget", c.budget},
                   {"chosen", c.chosen.Name()},
                   {"errors", std::move(errors)}});
  }
  return all;
}

json SessionJson(const SessionInfo& session) {
  const KvGeometry& geometry = session.geometry;
  return {
      {"geometry",
       {{"n_layers", geometry.n_layers},
        {"n_q_heads", geometry.n_q_heads},
        {"n_kv_heads", geometry.n_kv_heads},
        {"key_dim", geometry.key_dim},
        {"value_dim", geometry.value_dim},
        {"dtype", DTypeName(geometry.dtype)}}},
      {"anchors", {{"n_sink", session.anchors.n_sink}, {"n_tail", session.anchors.n_tail}}},
  };
}

}  // namespace prefixd::demo
