// The numbers of segment files, and which of them the catalog has decided about. A file gets its
// number before it is sealed and its commit comes later: a sealed file that the catalog does not
// name either never committed, or was removed, or its commit was lost with the catalog's tail. The
// row that every commit writes tells them apart: it says which numbers were given out and which of
// those had no fate yet.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "prefixd/result.h"

namespace prefixd::storage {

class Sequences;

// A number on its way to its commit. Destroyed: decided, one way or the other.
class SequenceTicket {
 public:
  SequenceTicket(Sequences* owner, uint64_t number) : owner_(owner), number_(number) {}
  SequenceTicket(SequenceTicket&& other) noexcept
      : owner_(std::exchange(other.owner_, nullptr)), number_(other.number_) {}
  SequenceTicket& operator=(SequenceTicket&&) = delete;
  ~SequenceTicket();

  uint64_t number() const { return number_; }
  // Nobody knows whether the commit reached the disk: it stays undecided until the next opening.
  void LeaveOpen() { owner_ = nullptr; }

 private:
  Sequences* owner_;
  const uint64_t number_;
};

class Sequences {
 public:
  SequenceTicket Next();
  void Decide(uint64_t number);
  // A file with this number exists: later numbers are higher.
  void Saw(uint64_t number);
  // A file whose fate the catalog does not know, found at open.
  void FoundUndecided(uint64_t number);

  // The catalog's row: the highest number given out and those without a fate, uint64 each. The
  // numbers in `deciding` have one once the row is committed.
  std::string Row(std::span<const uint64_t> deciding) const;
  // Takes over the row of an opened catalog; none (an older prefixd wrote it): all is decided.
  Status Restore(std::string_view row);
  // Whether the catalog that was opened knew what became of the file with this number.
  bool WasDecided(uint64_t number) const;

 private:
  mutable std::mutex mutex_;
  uint64_t highest_ = 0;
  std::set<uint64_t> undecided_;
  uint64_t restored_highest_ = UINT64_MAX;
  std::set<uint64_t> restored_undecided_;
};

}  // namespace prefixd::storage
