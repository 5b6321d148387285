#include "demo/report.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "prefixd/version.h"

namespace prefixd::demo {
namespace {

using nlohmann::json;

std::string MachineName() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string model = "unknown processor";
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.starts_with("model name")) {
      model = line.substr(std::min(line.size(), line.find(": ") + 2));
      break;
    }
  }
  return model + ", " + std::to_string(std::thread::hardware_concurrency()) + " cores";
}

std::string Today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d", &utc);
  return text;
}

json RowJson(const Row& row) {
  json j = {{"method", row.method}, {"feasible", row.feasible}};
  j["budget"] = row.budget ? json(*row.budget) : json();
  if (!row.feasible) {
    j["reason"] = row.reason;
    for (const char* key : {"accuracy", "nll", "rel_l1", "tokens_per_step", "bytes_per_step",
                            "ms_per_token", "k", "correct"}) {
      j[key] = nullptr;
    }
    return j;
  }
  j["accuracy"] = row.questions == 0 ? 0.0 : double(row.correct) / row.questions;
  j["correct"] = row.correct;
  j["questions"] = row.questions;
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

std::string BudgetText(const std::optional<double>& budget) {
  char text[16] = "all";
  if (budget) std::snprintf(text, sizeof text, "%g%%", 100 * *budget);
  return text;
}

Status WriteFile(const json& all, const std::filesystem::path& path) {
  std::ofstream out(path);
  out << all.dump(1, ' ', false, json::error_handler_t::replace) << '\n';
  out.close();
  if (!out) {
    return Error{Code::kIo, "cannot write '" + path.string() + "': " + std::strerror(errno)};
  }
  return {};
}

}  // namespace

void PrintTable(const Report& report) {
  std::printf("\n   %-11s %6s %7s %8s %8s %9s %6s %11s %11s %9s\n", "method", "budget", "answers",
              "nll", "rel. l1", "tok-equiv", "K", "bytes/step", "of it SSD", "ms/token");
  for (const Row& row : report.rows) {
    const std::string budget = BudgetText(row.budget);
    if (!row.feasible) {
      std::printf("   %-11s %6s  - infeasible: %s\n", row.method.c_str(), budget.c_str(),
                  row.reason.c_str());
      continue;
    }
    std::printf("   %-11s %6s %3u/%-3u %8.4f %8.4f %9.1f %6u %11.0f %11.0f %9.2f\n",
                row.method.c_str(), budget.c_str(), row.correct, row.questions, row.nll, row.rel_l1,
                row.tokens_per_step, row.k, row.bytes_per_step, row.ssd_bytes_per_step,
                row.ms_per_token);
  }
  std::printf(
      "\n   A step is one token through all layers. tok-equiv: per KV head, the whole summary "
      "charged to\n   every step. Bytes are physical (pages from SSD, rows from host memory). The "
      "model is small:\n   it finds planted needles and answers no real questions.\n");
}

Status WriteJson(const Report& report, const std::filesystem::path& path) {
  const DemoState& state = report.state;
  const KvGeometry& geometry = report.session.geometry;
  json rows = json::array();
  for (const Row& row : report.rows) rows.push_back(RowJson(row));
  const json all = {
      {"version", PREFIXD_VERSION},
      {"date", Today()},
      {"machine", MachineName()},
      {"document", state.document},
      {"model", state.model},
      {"prompt_tokens", state.prompt.size()},
      {"continuation_tokens", state.continuation.size()},
      {"facts", state.facts.size()},
      {"geometry",
       {{"n_layers", geometry.n_layers},
        {"n_q_heads", geometry.n_q_heads},
        {"n_kv_heads", geometry.n_kv_heads},
        {"key_dim", geometry.key_dim},
        {"value_dim", geometry.value_dim},
        {"dtype", DTypeName(geometry.dtype)}}},
      {"anchors",
       {{"n_sink", report.session.anchors.n_sink}, {"n_tail", report.session.anchors.n_tail}}},
      {"l_gen", 1},
      {"cold_prefill_s", state.cold_prefill_s},
      {"put_s", state.put_s},
      {"put_bytes", state.put_bytes},
      {"ingest_s", state.ingest_s},
      {"attach_s", report.attach_s},
      {"resume_s", report.resume_s},
      {"agreement",
       {{"same_tokens", report.agreement.same_tokens && report.first_token_same},
        {"max_logit_difference", report.agreement.max_logit_difference}}},
      {"entropy", report.entropy},
      {"choices", ChoicesJson(report.choices)},
      {"break_even", BreakEvenJson(report.break_even)},
      {"rows", rows},
  };
  return WriteFile(all, path);
}

void PrintCold(const std::vector<ColdRow>& rows) {
  std::printf("\n   %-11s %6s %16s %14s\n", "method", "budget", "SSD bytes/step", "ms/token");
  for (const ColdRow& row : rows) {
    std::printf("   %-11s %6s %16.0f %14.2f\n", row.method.c_str(), BudgetText(row.budget).c_str(),
                row.bytes_per_step, row.ms_per_token);
  }
}

Status AddColdToJson(const std::vector<ColdRow>& rows, const std::filesystem::path& path) {
  std::ifstream in(path);
  if (!in) {
    return Error{Code::kNotFound,
                 "cannot read '" + path.string() + "'; run `prefixd-demo decode` first"};
  }
  try {
    json all = json::parse(in);
    for (json& j : all.at("rows")) {
      j["cold_bytes_per_step"] = j["cold_ms_per_token"] = nullptr;
      for (const ColdRow& row : rows) {
        const json budget = row.budget ? json(*row.budget) : json();
        if (j.at("method") != row.method || j.at("budget") != budget) continue;
        j["cold_bytes_per_step"] = row.bytes_per_step;
        j["cold_ms_per_token"] = row.ms_per_token;
      }
    }
    return WriteFile(all, path);
  } catch (const json::exception& error) {
    return Error{Code::kCorrupt, "'" + path.string() + "' is not a report: " + error.what()};
  }
}

}  // namespace prefixd::demo
