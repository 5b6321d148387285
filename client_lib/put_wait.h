// Waits for other puts of the same tokens, on the client's side: it asks again and again, so that a
// client that waits holds no thread of the daemon. Internal to client_lib.
//
// Thread-safety: a pure function.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "prefixd/result.h"

namespace prefixd {

// Returns the answer of ask(spec), which is asked with `alone` set, up to spec.wait_ms, while
// another put stores the same tokens; kUnavailable says so unless lost() does not.
template <typename Spec, typename Ask, typename Lost>
auto AskBesideOthers(const Spec& spec, const Ask& ask, const Lost& lost) -> decltype(ask(spec)) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kPause{20};
  const auto until = Clock::now() + std::chrono::milliseconds(spec.wait_ms);
  while (true) {
    const bool waits = Clock::now() < until;
    Spec asked = spec;
    asked.alone = spec.alone || waits;
    auto answer = ask(asked);
    if (answer.ok() || answer.error().code != Code::kUnavailable || !waits || lost()) return answer;
    std::this_thread::sleep_for(std::min<Clock::duration>(kPause, until - Clock::now()));
  }
}

}  // namespace prefixd
