// The figures of a benchmark as a JSON file.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "attention/result.h"

namespace prefixd::bench {

inline Status WriteJson(const std::string& file, const nlohmann::json& figures) {
  std::ofstream out(file);
  out << figures.dump(1) << '\n';
  if (!out.flush()) return Error{Code::kIo, "cannot write '" + file + "'"};
  return {};
}

}  // namespace prefixd::bench
