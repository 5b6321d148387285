// Measures the cost of spreading a step's KV heads over the cores: pieces of equal length, as many
// as a layer has heads, in loops after pauses of different lengths. A decoder sleeps between its
// steps, waiting for a device or a socket, and its helper threads sleep, too.
//
// The floor is the pieces' own time on as many cores.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "bench/support/bench_main.h"
#include "measure/timing/json_file.h"
#include "measure/timing/statistics.h"
#include "runtime/work/thread_pool.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  uint32_t pieces = 8, piece_us = 200, rounds = 300, threads = 0;
  std::string json_file;
};

double Microseconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::micro>(to - from).count();
}

Status Run(const Options& options) {
  ThreadPool pool(options.threads);
  const uint32_t at_once = std::clamp(std::thread::hardware_concurrency(), 1u, pool.threads());
  const uint32_t in_turn = (options.pieces + at_once - 1) / at_once;
  const double floor = double(in_turn) * options.piece_us;
  std::printf("%u pieces of %u us on %u threads: %.0f us at least\n", options.pieces,
              options.piece_us, pool.threads(), floor);
  std::printf("%12s %26s %26s %8s\n", "pause, ms", "all pieces, us", "until a helper begins, us",
              "floor");
  nlohmann::json rows = nlohmann::json::array();
  for (const double pause_ms : {0.0, 0.3, 3.0, 30.0}) {
    std::vector<double> whole, helped;
    for (uint32_t round = 0; round < options.rounds; ++round) {
      std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(pause_ms));
      const auto caller = std::this_thread::get_id();
      std::atomic<bool> any{false};
      double first = 0;
      const auto begun = Clock::now();
      PREFIXD_TRY(pool.ParallelFor(options.pieces, [&](size_t) -> Status {
        const auto begin = Clock::now();
        if (std::this_thread::get_id() != caller && !any.exchange(true)) {
          first = Microseconds(begun, begin);
        }
        while (Microseconds(begin, Clock::now()) < options.piece_us) {
        }
        return {};
      }));
      whole.push_back(Microseconds(begun, Clock::now()));
      // A helper that never came counts with the whole time of the loop.
      helped.push_back(any ? first : whole.back());
    }
    const Spread all = Summarise(whole), help = Summarise(helped);
    std::printf("%12.1f %10.0f (%6.0f-%6.0f) %10.0f (%6.0f-%6.0f) %7.2fx\n", pause_ms, all.median,
                all.low, all.high, help.median, help.low, help.high, all.median / floor);
    rows.push_back({{"pause_ms", pause_ms}, {"us", all}, {"first_help_us", help}});
  }
  if (options.json_file.empty()) return {};
  return WriteJson(options.json_file, {{"bench", "parallel"},
                                       {"pieces", options.pieces},
                                       {"piece_us", options.piece_us},
                                       {"threads", pool.threads()},
                                       {"floor_us", floor},
                                       {"loops", rows}});
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Loops over a layer's KV heads, after pauses, against the time of their pieces.");
  app.add_option("--pieces", options.pieces, "Pieces of a loop")
      ->check(CLI::Range(2, 1024))
      ->capture_default_str();
  app.add_option("--piece-us", options.piece_us, "Microseconds of each")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "Loops after each pause")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "Threads; 0: one per core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Run(options); });
}
