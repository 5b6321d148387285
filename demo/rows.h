// Turns what was measured into JSON, as report.json has it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "demo/evaluate.h"
#include "prefixd/ingest.h"
#include "prefixd/session_info.h"

namespace prefixd::demo {

// Holds times per generated token at fixed K, with rows in host memory ([RC]).
struct BreakEven {
  uint32_t k_phi = 0;
  std::vector<std::pair<uint32_t, Evaluator::Timing>> topk;           // for each K
  std::vector<std::pair<std::string, Evaluator::Timing>> completion;  // for each method, at k_phi
};

nlohmann::json RowJson(const Row& row);
nlohmann::json BreakEvenJson(const BreakEven& sweep);
nlohmann::json ChoicesJson(const std::vector<HeadChoice>& choices);
nlohmann::json SessionJson(const SessionInfo& session);

}  // namespace prefixd::demo
