#include "measure/timing/other_work.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>

namespace prefixd::bench {
namespace {

double CpuSecondsOf(int who) {
  rusage usage{};
  ::getrusage(who, &usage);
  const auto seconds = [](const timeval& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

OtherWork::OtherWork() : begun_(Now()) {}

OtherWork::Times OtherWork::Now() {
  Times now;
  std::ifstream in("/proc/stat");
  std::string name;
  in >> name;
  // user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
  const auto ticks = static_cast<double>(::sysconf(_SC_CLK_TCK));
  for (int i = 0; i < 8; ++i) {
    double value = 0;
    in >> value;
    now.all += value / ticks;
    if (i != 3 && i != 4) now.busy += value / ticks;
  }
  now.own = CpuSecondsOf(RUSAGE_SELF) + CpuSecondsOf(RUSAGE_CHILDREN);
  return now;
}

double OtherWork::Share() const {
  const Times now = Now();
  const double all = now.all - begun_.all;
  if (all <= 0) return 0;
  return std::clamp((now.busy - begun_.busy - (now.own - begun_.own)) / all, 0.0, 1.0);
}

std::string DisturbedBy(double share) {
  constexpr double kMatters = 0.15;
  if (share < kMatters) return "";
  return "Other work took " + std::to_string(std::lround(100 * share)) +
         "% of this machine's cores during this run: take its ratios as rough, and measure again "
         "on a quiet machine.";
}

}  // namespace prefixd::bench
