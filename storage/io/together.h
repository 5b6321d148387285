// Does many small pieces of blocking work at a time: a disk takes several requests at once, and one
// thread that waits for each would leave it idle.
//
// Thread-safety: a free function.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "base/capture_errors.h"
#include "prefixd/result.h"

namespace prefixd::storage {

inline constexpr size_t kReadsAtOnce = 16;  // of recovery

// Calls body(i), which returns a Status, for every i below n, from up to `threads` threads, the
// caller's among them, and returns when all are done. After an error no further piece begins;
// returns the error of the lowest i that has one. For recovery: pieces do not run under
// the limits of the caller's call (base/call_scope.h).
template <typename Body>
Status Together(size_t n, size_t threads, const Body& body) {
  return CaptureErrors([&]() -> Status {
    threads = std::clamp<size_t>(threads, 1, std::max<size_t>(n, 1));
    std::atomic<size_t> next{0};
    std::atomic<bool> failed{false};
    std::vector<std::pair<size_t, Status>> errors(threads, {n, Status()});
    const auto work = [&](size_t t) {
      for (size_t i = next++; i < n && !failed; i = next++) {
        Status status = CaptureErrors([&] { return body(i); });
        if (status.ok()) continue;
        errors[t] = {i, std::move(status)};
        failed = true;
      }
    };
    std::vector<std::thread> team;
    team.reserve(threads - 1);
    for (size_t t = 1; t < threads; ++t) {
      // Fewer do it, too, where the system has no more threads or no memory for one. Nothing may
      // leave this block while threads of the team run.
      try {
        team.emplace_back(work, t);
      } catch (const std::exception&) {
        break;
      }
    }
    work(0);
    for (std::thread& thread : team) thread.join();
    return std::ranges::min_element(errors, {}, [](const auto& e) { return e.first; })->second;
  });
}

}  // namespace prefixd::storage
