// Times a piece of work, and this process's CPU time in it.
#pragma once

#include <sys/resource.h>

#include <chrono>

#include "measure/timing/paired.h"
#include "prefixd/result.h"

namespace prefixd::bench {

inline double CpuSeconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Times `work`, which moves `amount` (bytes or operations) and `bytes`.
template <typename Work>
Result<Sample> Timed(double amount, double bytes, Work work) {
  constexpr double kGb = 1e9;
  const double cpu = CpuSeconds();
  const auto begun = std::chrono::steady_clock::now();
  PREFIXD_TRY(work());
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  return Sample{amount / seconds, (CpuSeconds() - cpu) / (bytes / kGb)};
}

}  // namespace prefixd::bench
