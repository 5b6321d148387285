// What callers wait for: the middle, the hundredth part that waits longest, and the worst.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "prefixd/result.h"

namespace prefixd::bench {

struct Percentiles {
  double p50_us = 0, p99_us = 0, max_us = 0;
  uint64_t calls = 0;
};

inline Percentiles PercentilesOf(std::vector<double> us) {
  if (us.empty()) return {};
  std::sort(us.begin(), us.end());
  const auto at = [&](double p) { return us[static_cast<size_t>(p * double(us.size() - 1))]; };
  return {at(0.5), at(0.99), us.back(), us.size()};
}

// Calls call(i) for i below n, and times each.
template <typename Call>
Result<Percentiles> TimeCalls(uint32_t n, Call call) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> us;
  for (uint32_t i = 0; i < n; ++i) {
    const auto begun = Clock::now();
    PREFIXD_TRY(call(i));
    us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begun).count());
  }
  return PercentilesOf(std::move(us));
}

inline void to_json(nlohmann::json& out, const Percentiles& p) {
  out = {{"p50_us", p.p50_us}, {"p99_us", p.p99_us}, {"max_us", p.max_us}, {"calls", p.calls}};
}

}  // namespace prefixd::bench
