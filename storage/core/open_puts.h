// Knows the puts under way, so that a put of the same tokens can wait for them instead of storing
// the tokens a second time. Internal to storage/store.
//
// Thread-safety: all methods may be called concurrently. An Entry belongs to one thread at a time
// and must not outlive its OpenPuts.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "prefixd/result.h"
#include "storage/segment/identity.h"

namespace prefixd::storage {

class OpenPuts {
 public:
  using Clock = std::chrono::steady_clock;

  // A put under way, until destruction.
  class Entry {
   public:
    Entry() = default;
    Entry(Entry&& other) noexcept { *this = std::move(other); }
    Entry& operator=(Entry&& other) noexcept;
    ~Entry() { Leave(); }

   private:
    friend class OpenPuts;
    void Leave();
    OpenPuts* puts_ = nullptr;
    std::list<std::vector<BlockHash>>::iterator at_;
  };

  // Counts the puts that have ended; what was matched before a change of it may be out of date.
  uint64_t ended() const;
  // Enters a put of the blocks `hashes`, whose first `stored` blocks were stored when `seen` puts
  // had ended. While a put under way stores the next block, too, waits until `until`. An empty
  // optional: a put has ended meanwhile, so match again. kUnavailable: `alone`, and the other put
  // is under way still.
  Result<std::optional<Entry>> Enter(std::span<const BlockHash> hashes, size_t stored,
                                     uint64_t seen, Clock::time_point until, bool alone);

 private:
  bool Stores(std::span<const BlockHash> hashes, size_t stored) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::vector<BlockHash>> puts_;  // block hashes, each put's
  uint64_t ended_ = 0;
};

}  // namespace prefixd::storage
