#include "demo/events.h"

#include <cstdio>
#include <nlohmann/json.hpp>

namespace prefixd::demo {

using nlohmann::json;

void Emit(const json& event) {
  const std::string line = event.dump(-1, ' ', false, json::error_handler_t::replace);
  std::puts(line.c_str());
  std::fflush(stdout);
}

void Progress::Update(uint64_t done, uint64_t total, std::string_view unit) {
  const auto now = std::chrono::steady_clock::now();
  if (now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  Emit({{"event", "progress"}, {"what", what_}, {"done", done}, {"total", total}, {"unit", unit}});
}

}  // namespace prefixd::demo
