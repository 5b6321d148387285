// A soak: one daemon, many clients, some of them bad; see docs/reliability.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace prefixd::soak {

struct Options {
  double seconds = 1800;
  uint32_t sessions = 300;
  uint32_t clients = 30;  // processes, which share the sessions evenly
  double kill_every_s = 1.5;
  double idle_seconds = 20;  // measured with idle_sessions attached
  uint32_t idle_sessions = 50;
  uint64_t seed = 0;
};

// A line of the report: a figure, and what it is held to where it is held to something.
struct Finding {
  std::string name;
  double value = 0;
  std::string unit;
  std::string bound;  // "at most 1", or empty
  bool good = true;
};

struct Report {
  std::vector<Finding> findings;
  std::vector<std::string> errors;  // what went wrong first
  bool good() const;
  void Find(const std::string& name, double value, const std::string& unit,
            const std::string& bound = "", bool good = true);
  void FindAtMost(const std::string& name, double value, const std::string& unit, double most);
};

// Runs to the end, or until `interrupted`, printing progress every 10 s.
Report RunSoak(const Options& options, const std::atomic<bool>& interrupted);

}  // namespace prefixd::soak
