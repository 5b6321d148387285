// Runs calls that must end although another call is held up.
#pragma once

#include <chrono>
#include <future>
#include <utility>

namespace prefixd::testing {

// Returns whether `call` ends while whatever holds up others lasts. The time only bounds how long a
// test that fails takes; `release` then lets everything end.
template <typename Call, typename Release>
bool Ends(Call call, Release release) {
  auto ended = std::async(std::launch::async, std::move(call));
  const bool in_time = ended.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  if (!in_time) release();
  ended.get();
  return in_time;
}

}  // namespace prefixd::testing
