// Holds what the demo measured, as a table and as JSON.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "demo/evaluate.h"
#include "demo/state.h"
#include "prefixd/ledger.h"
#include "prefixd/result.h"
#include "prefixd/types.h"

namespace prefixd::demo {

// Holds times per generated token at fixed K, with rows in host memory ([RC]).
struct BreakEven {
  uint32_t k_phi = 0;
  std::vector<std::pair<uint32_t, Evaluator::Timing>> topk;           // for each K
  std::vector<std::pair<std::string, Evaluator::Timing>> completion;  // for each method, at k_phi
};

struct Report {
  DemoState state;
  SessionInfo session;
  double attach_s = 0, resume_s = 0;
  bool first_token_same = false;
  Evaluator::Agreement agreement;
  std::vector<Row> rows;
  std::vector<double> entropy;  // [n_layers * n_q_heads]
  std::vector<HeadChoice> choices;
  BreakEven break_even;
  Ledger ledger;
};

// Holds one row measured against a daemon without host tier.
struct ColdRow {
  std::string method;
  std::optional<double> budget;
  double bytes_per_step = 0, ms_per_token = 0;
};

void PrintTable(const Report& report);
Status WriteJson(const Report& report, const std::filesystem::path& path);

void PrintCold(const std::vector<ColdRow>& rows);
// kNotFound; kCorrupt: `path` is not a report that WriteJson wrote.
Status AddColdToJson(const std::vector<ColdRow>& rows, const std::filesystem::path& path);

}  // namespace prefixd::demo
