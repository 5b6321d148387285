// Gives segment files their numbers and records which of them the catalog has decided about. A file
// gets its number before it is sealed and its commit comes later: a sealed file that the catalog
// does not name either never committed, or was removed, or its commit was lost with the catalog's
// tail. The row that every commit writes tells these cases apart: it says which numbers were given
// out and which of those were undecided.
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

// A SequenceTicket is a number on its way to its commit. Its destruction means that the number is
// decided, one way or the other.
class SequenceTicket {
 public:
  SequenceTicket(Sequences* owner, uint64_t number) : owner_(owner), number_(number) {}
  SequenceTicket(SequenceTicket&& other) noexcept
      : owner_(std::exchange(other.owner_, nullptr)), number_(other.number_) {}
  SequenceTicket& operator=(SequenceTicket&&) = delete;
  ~SequenceTicket();

  uint64_t number() const { return number_; }
  // Keeps the number undecided until the next opening: it is unknown whether the commit reached the
  // disk.
  void LeaveOpen() { owner_ = nullptr; }

 private:
  Sequences* owner_;
  const uint64_t number_;
};

class Sequences {
 public:
  SequenceTicket Next();
  void Decide(uint64_t number);
  // Notes that a file with this number exists: later numbers are higher.
  void Saw(uint64_t number);
  // Notes a file, found at open, whose fate the catalog does not know.
  void FoundUndecided(uint64_t number);

  // Returns the catalog's row: the highest number given out and the undecided ones, uint64 each.
  // The numbers in `deciding` are decided once the row is committed.
  std::string Row(std::span<const uint64_t> deciding) const;
  // Takes over the row of an opened catalog; an absent row (an older prefixd wrote it) means that
  // all numbers are decided.
  Status Restore(std::string_view row);
  // Returns whether the opened catalog had decided about the file with this number.
  bool WasDecided(uint64_t number) const;

 private:
  mutable std::mutex mutex_;
  uint64_t highest_ = 0;
  std::set<uint64_t> undecided_;
  uint64_t restored_highest_ = UINT64_MAX;
  std::set<uint64_t> restored_undecided_;
};

}  // namespace prefixd::storage
