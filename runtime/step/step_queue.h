// Schedules steps that arrive at the same time. A step begins at once while a core is free for it.
// Where all cores are busy steps wait, and all waiting steps of a tenant on one prefix and layer
// run as one batch, whose searches read codes and keys once; exact passes, which do not search, run
// each by itself. So no step waits that could have
// begun, and the fuller the machine, the more steps share their reads.
//
// Tenants share the cores by deficit round robin: in each round a tenant may hold cores for
// kQuantum of their time, measured as it is used; what it used beyond that it owes in the next
// rounds. A round ends when no tenant that wants cores has time left. Who had no steps before goes
// first, with the time of the round at most: time that was not used is not kept. A call whose
// tenant is not among those whose turn it is stops between two pieces of work, and goes on later
// where it stopped. Calls of one tenant begin in order of arrival.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/long_turn.h"
#include "runtime/step/step.h"

namespace prefixd {

class StepQueue {
  struct Tenant;

 public:
  // Several steps of a small prompt, and a few pieces of a long pass: shorter turns would cost more
  // in changes between tenants, longer ones in waiting.
  static constexpr std::chrono::nanoseconds kQuantum = std::chrono::milliseconds(4);

  // The steps of one caller; a batch of sessions stays together.
  struct Call {
    std::vector<GroupTask> tasks;
    std::string_view tenant;  // who is charged

    // The queue alone uses these.
    std::vector<GroupTask::Key> keys;  // of tasks that search, ascending, each once
    bool done = false;
    std::vector<Call*> leads;  // calls that this call's thread must run
    std::condition_variable changed;
    Tenant* of = nullptr;
    std::list<Call*>::iterator place;  // in a list of its tenant, if `listed`
    bool listed = false;
    size_t left = 0;                   // tasks of `leads` that have not ended
    std::atomic<bool> stopped{false};  // may be read without the queue's lock
  };
  // What runs a call's tasks learns and tells by this. Thread-safe.
  class Service {
   public:
    Service(StepQueue& queue, Call& call) : queue_(queue), call_(call) {}
    // It is other tenants' turn: work on the tasks is to end soon, and is asked for again later.
    bool stopped() const { return call_.stopped.load(std::memory_order_relaxed); }
    // Several tenants want cores: whoever works should ask often.
    bool contended() const { return queue_.contended_.load(std::memory_order_relaxed); }
    // Charges the tenant with time in which a thread worked for it, and ends `tasks` tasks.
    void Charge(std::chrono::nanoseconds time, size_t tasks);

   private:
    friend StepQueue;
    StepQueue& queue_;
    Call& call_;
  };
  // A thread's work on some of a call's tasks, charged for by the clock: as it goes, so that what
  // takes long is known before it ends. Where the tenant has other calls, too, or it takes long,
  // the thread leaves its core to whoever wakes: to another tenant's call, to the client of one.
  class Stint final : public StepTurn {
   public:
    explicit Stint(Service& service);
    ~Stint() override { End(0); }
    Stint(const Stint&) = delete;
    Stint& operator=(const Stint&) = delete;
    bool GoesOn() override;
    bool shared() const override { return service_.contended(); }
    // Ends `tasks` tasks; the thread has stopped working.
    void End(size_t tasks);

   private:
    friend StepQueue;
    Service& service_;
    std::chrono::steady_clock::time_point since_;  // not charged for
    bool begun_ = true;
    Stint *before_ = nullptr, *after_ = nullptr;  // of those of all calls
    const std::chrono::steady_clock::time_point started_ = since_;
    LongTurn long_turn_;
  };
  // Runs the tasks in any order, and charges for them as they end. Returns when all have ended, or
  // when they have stopped and no thread works on them any more. Does not throw.
  using Runner = std::function<void(std::span<GroupTask*> tasks, Service& service)>;

  // cores: tasks that run at once, at least 1.
  StepQueue(size_t cores, Runner run) : cores_(cores), run_(std::move(run)) {}

  // Returns when the call's tasks are done, by this thread or another's. A call whose tasks are all
  // to end leaves the queue as long as none runs; else they end each by itself, and a call that
  // leads others returns with the last of theirs.
  void Run(Call& call);
  uint64_t joined() const;   // calls since the start that ran in a batch with another call
  uint64_t stopped() const;  // times that a call stopped for another tenant's turn
  size_t waiting() const;    // calls that have not begun, or have stopped

 private:
  struct Tenant {
    std::string_view name;
    std::chrono::nanoseconds credit = kQuantum;  // of this round; below 0: owed
    uint64_t turn = 0;   // when it had last used up its time; 0: not since it wanted cores
    uint64_t since = 0;  // when it began to want cores
    std::list<Call*> waiting, running;
    uint64_t looked_at = 0;  // the pass of Schedule that has placed it
    bool wants() const { return !waiting.empty() || !running.empty(); }
  };

  static bool Related(const Call& a, const Call& b);
  // mutex_ is held for all of these.
  // Ends a call's tasks and takes the call out of the queue, if all that remain are to end.
  bool LeaveEarly(Call& call);
  // Lets the tenants whose turn it is have the cores.
  void Schedule() noexcept;
  Tenant* Next() noexcept;  // the tenant whose turn it is, of those not yet looked at
  void BeginRound() noexcept;
  void Start(Tenant& tenant) noexcept;
  static void Move(Call& call, std::list<Call*>& from, std::list<Call*>& to,
                   std::list<Call*>::iterator before);
  void Unlist(Call& call, std::list<Call*>& from);
  void Charge(Call& call, std::chrono::nanoseconds time, size_t tasks);
  void Deduct(Tenant& tenant, std::chrono::nanoseconds time);
  // Charges for all work up to now.
  void Settle();
  // Before another tenant comes: nobody waited for what the one that wants cores has used so far,
  // also in a stint that has not ended.
  void ForgiveAlone();
  // How long a call waits before it looks again.
  std::chrono::milliseconds Slice() const;

  const size_t cores_;
  const Runner run_;
  mutable std::mutex mutex_;
  std::map<std::string, Tenant, std::less<>> tenants_;  // those that want cores, or owe time
  std::atomic<bool> contended_{false};                  // more than one wants cores
  Stint* stints_ = nullptr;                             // under way
  size_t wanting_ = 0;                                  // tenants that want cores
  uint64_t clock_ = 0;                                  // counts turns and arrivals
  uint64_t passes_ = 0;
  uint64_t joined_ = 0, stopped_ = 0;
};

}  // namespace prefixd
