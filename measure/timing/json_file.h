// Writes the figures of a benchmark as JSON to a file, with the facts of the run.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "measure/timing/run_facts.h"
#include "measure/timing/statistics.h"
#include "prefixd/result.h"

namespace prefixd::bench {

inline void to_json(nlohmann::json& out, const Spread& s) {
  out = {{"median", s.median}, {"p25", s.low}, {"p75", s.high}};
}

// `figures` is an object; this adds its member "run".
inline Status WriteJson(const std::string& file, nlohmann::json figures) {
  for (const auto& [name, value] : RunFacts()) figures["run"][name] = value;
  std::ofstream out(file);
  // Names of files come from users and need not be UTF-8: hours of measuring must not end there.
  out << figures.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
  if (!out.flush()) return Error{Code::kIo, "cannot write '" + file + "'"};
  return {};
}

}  // namespace prefixd::bench
