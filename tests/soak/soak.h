// A soak: one daemon, many clients, some of them bad; see docs/reliability.md.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace prefixd::soak {

struct Options {
  double seconds = 1800;
  uint32_t sessions = 300;
  uint32_t tenants = 6;        // each with a token of its own; the last one floods
  uint32_t clients = 30;       // processes, which share the sessions evenly
  double pause_ms = 20;        // mean time between calls of a client whose tenant does not flood
  uint32_t memory_mib = 1024;  // the daemon's budget
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

// Steps of one tenant until `at` seconds, since the point before. Times are those of the client's
// call, within 9%.
struct TenantPoint {
  double at = 0;
  size_t tenant = 0;
  uint64_t steps = 0;
  double p50_us = 0, p99_us = 0;
};
struct TenantReport {
  std::vector<std::string> names;
  std::string flooding;            // empty: none
  std::vector<TenantPoint> whole;  // a point for each tenant
  std::vector<TenantPoint> points;
};

struct Report {
  std::vector<Finding> findings;
  std::vector<std::string> errors;  // what went wrong first
  TenantReport tenants;
  bool good() const;
  void Find(const std::string& name, double value, const std::string& unit,
            const std::string& bound = "", bool good = true);
  void FindAtMost(const std::string& name, double value, const std::string& unit, double most);
};

// Runs to the end, or until `interrupted`, printing progress every 10 s.
Report RunSoak(const Options& options, const std::atomic<bool>& interrupted);

}  // namespace prefixd::soak
