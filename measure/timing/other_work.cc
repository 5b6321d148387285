#include "measure/timing/other_work.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>
#include <vector>

namespace prefixd::bench {
namespace {

double CpuSecondsOf(int who) {
  rusage usage{};
  ::getrusage(who, &usage);
  const auto seconds = [](const timeval& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double TicksPerSecond() { return static_cast<double>(::sysconf(_SC_CLK_TCK)); }

}  // namespace

OtherWork::OtherWork(std::filesystem::path proc) : proc_(std::move(proc)), begun_(Now()) {}

// In a container they may not be seen; then they count as others'.
OtherWork::KernelThreads OtherWork::ReadKernelThreads() const {
  constexpr unsigned kKernelThread = 0x00200000;  // PF_KTHREAD
  KernelThreads threads;
  std::error_code ec;
  for (const auto& entry : std::filesystem::directory_iterator(proc_, ec)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream in(entry.path() / "stat");
    std::string line;
    std::getline(in, line);
    // pid (name) state ppid pgrp session tty tpgid flags, 4 of faults, utime, stime, 6, starttime
    const size_t end = line.rfind(')');
    if (end == std::string::npos) continue;
    std::istringstream rest(line.substr(end + 1));
    const std::vector<std::string> fields{std::istream_iterator<std::string>(rest), {}};
    if (fields.size() < 20 || !(std::strtoul(fields[6].c_str(), nullptr, 10) & kKernelThread)) {
      continue;
    }
    threads[{std::atoi(name.c_str()), fields[19]}] =
        (std::atof(fields[11].c_str()) + std::atof(fields[12].c_str())) / TicksPerSecond();
  }
  return threads;
}

OtherWork::Times OtherWork::Now() const {
  Times now;
  std::ifstream in(proc_ / "stat");
  std::string name;
  in >> name;
  // user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
  for (int i = 0; i < 8; ++i) {
    double value = 0;
    in >> value;
    now.all += value / TicksPerSecond();
    if (i < 3 || i == 7) now.busy += value / TicksPerSecond();
  }
  now.own = CpuSecondsOf(RUSAGE_SELF) + CpuSecondsOf(RUSAGE_CHILDREN);
  now.kernel = ReadKernelThreads();
  return now;
}

double OtherWork::Share() const {
  const Times now = Now();
  const double all = now.all - begun_.all;
  if (all <= 0) return 0;
  double ours = now.own - begun_.own;
  for (const auto& [thread, seconds] : now.kernel) {
    const auto before = begun_.kernel.find(thread);
    ours += seconds - (before == begun_.kernel.end() ? 0 : before->second);
  }
  return std::clamp((now.busy - begun_.busy - ours) / all, 0.0, 1.0);
}

std::string DisturbedBy(double share) {
  constexpr double kMatters = 0.15;
  if (share < kMatters) return "";
  return "Other work took " + std::to_string(std::lround(100 * share)) +
         "% of this machine's cores during this run: take its ratios as rough, and measure again "
         "on a quiet machine.";
}

}  // namespace prefixd::bench
