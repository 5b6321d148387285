// The ring of a connection: memory of its own with some slots, in which calls of steps wait for a
// thread of the daemon and their answers for the client. The client rings an eventfd, the daemon
// wakes a futex in the slot; who polls is not woken.
//
//   offset  size
//        0     4  whether a thread of the daemon polls
//       64i   12  slot i - 1: state, whether a thread of the client sleeps, whether it gave up
//     4096        the slots, one after another (step_frame.h)
//
// The client may write to all of it at any time. The daemon therefore keeps in memory of its own
// which slots it works on, and takes a state for no more than a hint.
//
// Thread-safety: a slot belongs to one thread of each side; all else may be called concurrently.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "prefixd/result.h"
#include "protocol/shared_region.h"

namespace prefixd {

inline constexpr uint32_t kMostRingSlots = 63;

struct RingShape {
  uint32_t slots = 0;
  uint64_t slot_bytes = 0;
  uint64_t bytes() const;
  // kInvalidArgument for 0 or too many slots, and for sizes that are no multiple of a page.
  Status Check() const;
};

// Owns the mapping, the eventfd and, where it made the memory, its descriptor. Move-only.
class StepRing {
 public:
  StepRing() = default;
  ~StepRing();
  StepRing(StepRing&& other) noexcept;
  StepRing& operator=(StepRing&& other) noexcept;

  static Result<StepRing> Create(const RingShape& shape);
  // Takes ownership of both descriptors, also on failure. kInvalidArgument as SharedRegion::Map.
  static Result<StepRing> Map(int memory, int bell, const RingShape& shape);

  bool empty() const { return region_.empty(); }
  const RingShape& shape() const { return shape_; }
  int memory_fd() const { return region_.fd(); }
  int bell_fd() const { return bell_; }
  void CloseMemoryFd() { region_.CloseFd(); }
  std::span<std::byte> slot(uint32_t i) const;

  // The client: hands a slot over, and wakes a thread of the daemon unless one polls.
  void Ask(uint32_t i) const;
  bool answered(uint32_t i) const;
  // Tells the daemon that nobody wants the answer any more; it comes all the same, and soon.
  void Cancel(uint32_t i) const;
  // Sleeps until the slot is answered, at most `time`; may return early.
  void Sleep(uint32_t i, std::chrono::nanoseconds time) const;

  // The daemon: whether a slot has been handed over.
  bool asked(uint32_t i) const;
  // Not 0 once the client has cancelled the call of the slot; read as an atomic.
  uint32_t* cancelled(uint32_t i) const { return word(i + 1, 2); }
  void Answer(uint32_t i) const;  // the client may use the slot from now on
  void Wake(uint32_t i) const;    // who sleeps for the answer
  // Whoever stops polling looks at all slots once more.
  void SetPolling(bool polling) const;

 private:
  uint32_t* word(uint32_t line, uint32_t i) const;

  SharedRegion region_;
  RingShape shape_;
  int bell_ = -1;
};

// Lets the other hyper-thread run, and now and then another thread.
void PollPause(uint32_t round);

}  // namespace prefixd
