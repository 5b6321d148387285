// Lets whoever wakes run before a thread that works on and on. Linux gives a thread turns of some
// milliseconds, within which only threads that ask for shorter ones come between (EEVDF; from 6.12
// on a thread may say how long its turns are, to no disadvantage in what it gets in all). A thread
// that asks for long turns so gives its core up at once.
#pragma once

#include <cstdint>

namespace prefixd {

class LongTurn {
 public:
  LongTurn() = default;
  ~LongTurn() { End(); }
  LongTurn(const LongTurn&) = delete;
  LongTurn& operator=(const LongTurn&) = delete;
  // Asks for turns of 20 ms for the calling thread, once. Nothing happens to threads of real-time
  // or batch policies, nor where the kernel knows no such wish.
  void Begin() noexcept;
  // Gives the thread, which must be the same, its own turns back.
  void End() noexcept;

 private:
  bool begun_ = false, asked_ = false;
  int32_t nice_ = 0;
  uint64_t turn_ns_ = 0;  // its own
};

}  // namespace prefixd
