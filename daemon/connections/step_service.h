// Carries out the steps that come through rings. Whoever wakes for a ring runs one of its calls
// itself: no other thread is involved before the engine. As many threads as cores stand by at the
// rings; the others are woken only while those are at work, so that steps which wait for cores can
// be joined by more.
//
// A thread takes one call of a ring and then turns to whichever ring has waited longest, so no
// client keeps others waiting with many calls. Who asks for it is polled after an answer, for
// kMostSpin at most and by limits.polling_threads threads at a time; nobody polls an idle ring.
//
// Thread-safety: all methods may be called concurrently. They must not be called after Stop.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/memory_budget.h"
#include "daemon/calls/request_handler.h"
#include "prefixd/result.h"
#include "protocol/step_ring.h"

namespace prefixd::daemon {

struct ServerCounters;

class StepService {
 public:
  static constexpr std::chrono::milliseconds kMostSpin{2};

  // threads, polling: limits.step_threads and limits.polling_threads. memory: for the threads'
  // buffers.
  StepService(size_t threads, size_t polling, ServerCounters& counters, MemoryAccount memory);
  ~StepService();

  class Ring;
  // Serves the calls of `ring` by `handler`, which must live until they have ended (Leave).
  Result<std::shared_ptr<Ring>> Serve(StepRing ring, RequestHandler& handler);
  // Takes no more calls of the ring. Calls `ended` when none runs any more: here, or on the thread
  // that ran the last one.
  void Leave(const std::shared_ptr<Ring>& ring, std::function<void()> ended);
  // Cancels the calls of a ring that run, after Leave.
  static void Cancel(Ring& ring);
  // Ends the threads, after their calls.
  void Stop();

 private:
  void Work();
  void StandBy(const std::function<void(uint64_t id)>& serve);
  std::shared_ptr<Ring> Find(uint64_t id) const;
  void RunCalls(Ring& ring, StepScratch& scratch);
  bool Poll(Ring& ring, std::chrono::microseconds time);
  void RingAgain(const Ring& ring) const;

  ServerCounters& counters_;
  const size_t at_bells_most_;  // threads that wait for rings
  const size_t polling_most_;
  int epoll_ = -1, stop_bell_ = -1;
  std::atomic<size_t> polling_{0};

  mutable std::mutex mutex_;  // guards the rest
  std::map<uint64_t, std::shared_ptr<Ring>> rings_;
  uint64_t next_id_ = 1;  // 0: stop_bell_
  size_t at_bells_ = 0, spare_ = 0;
  std::condition_variable wanted_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  const MemoryAccount memory_;
};

}  // namespace prefixd::daemon
