// Says in the log how far the opening of a large store is, so that who waits for it sees that it
// gets on.
//
// Thread-safety: Note may be called concurrently.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string_view>

#include "storage/io/errors.h"

namespace prefixd::storage {

class OpeningLog {
 public:
  using Say = std::function<void(std::string_view)>;
  explicit OpeningLog(std::chrono::milliseconds pause = std::chrono::seconds(5), Say say = LogInfo);

  // `done` of `total`, in units of `what`, are behind it. It is said where nothing was for a pause.
  void Note(uint64_t done, uint64_t total, std::string_view what);

 private:
  const std::chrono::steady_clock::duration pause_;
  const Say say_;
  std::atomic<std::chrono::steady_clock::time_point> next_;
};

}  // namespace prefixd::storage
