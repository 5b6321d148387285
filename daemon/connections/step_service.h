// Carries out the steps that come through rings. Whoever wakes for a ring runs one of its calls
// itself: no other thread is involved before the engine. As many threads as cores stand by at the
// rings; the others are woken only while those are at work, so that steps which wait for cores can
// be joined by more.
//
// A thread takes one call of a ring and then turns to whichever ring has waited longest, so no
// client keeps others waiting with many calls. A tenant that has threads takes another only while,
// with it, it holds at most three times as many as stay free: its other calls wait for those. Who
// asks for it is polled after an answer, for kMostSpin at most, by limits.polling_threads threads
// at a time, and only while another thread is free and no ring of its tenant waits for one; nobody
// polls an idle ring.
//
// Thread-safety: all methods may be called concurrently. They must not be called after Stop.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
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

 private:
  struct Tenant {
    size_t rings = 0;
    size_t running = 0;            // threads
    std::deque<uint64_t> waiting;  // rings, each once
    std::atomic<size_t> waits{0};  // its size, for who has no lock
  };

 public:
  // Serves the calls of `ring` by `handler`, which must live until they have ended (Leave).
  Result<std::shared_ptr<Ring>> Serve(StepRing ring, RequestHandler& handler,
                                      const std::string& tenant);
  // Takes no more calls of the ring. Calls `ended` when none runs any more: here, or on the thread
  // that ran the last one.
  void Leave(const std::shared_ptr<Ring>& ring, std::function<void()> ended);
  // Cancels the calls of a ring that run, after Leave.
  static void Cancel(Ring& ring);
  // Ends the threads, after their calls.
  void Stop();

 private:
  void Work();
  // Whether a thread may run calls of the ring. If not, the ring waits for its tenant's threads.
  bool Enter(const std::shared_ptr<Ring>& ring);
  // Returns the ring of the same tenant that the thread must turn to, or null: the thread is free.
  std::shared_ptr<Ring> NextFor(const Ring& ring);
  void Forget(const Ring& ring);  // its tenant, if nothing is left of it; mutex_ is held
  std::shared_ptr<Ring> Find(uint64_t id) const;
  void RunCalls(Ring& ring, StepScratch& scratch);
  bool Poll(Ring& ring, std::chrono::microseconds time);
  // Whether others may wait for this ring's thread: none is free, or a ring of its tenant waits.
  bool OthersWant(const Ring& ring) const;
  void RingAgain(const Ring& ring) const;

  ServerCounters& counters_;
  const size_t at_bells_most_;  // threads that wait for rings
  const size_t polling_most_;
  int epoll_ = -1, stop_bell_ = -1;
  std::atomic<size_t> polling_{0};
  std::atomic<size_t> free_{0};  // threads that run no calls; changed under mutex_

  mutable std::mutex mutex_;  // guards the rest
  std::map<uint64_t, std::shared_ptr<Ring>> rings_;
  uint64_t next_id_ = 1;                   // 0: stop_bell_
  std::map<std::string, Tenant> tenants_;  // those that have rings, or calls that run
  size_t at_bells_ = 0, spare_ = 0;
  std::condition_variable wanted_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  const MemoryAccount memory_;
};

}  // namespace prefixd::daemon
