#include "daemon/connections/step_service.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/call_scope.h"
#include "base/check.h"
#include "daemon/connections/server_context.h"
#include "daemon/limits/with_memory.h"

namespace prefixd::daemon {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

class StepService::Ring {
 public:
  using TenantEntry = std::map<std::string, Tenant>::iterator;

  Ring(uint64_t number, StepRing mapped, RequestHandler& by, TenantEntry whose)
      : id(number), tenant(whose), ring(std::move(mapped)), handler(by) {}

  const uint64_t id;
  const TenantEntry tenant;
  const StepRing ring;
  RequestHandler& handler;
  std::atomic<bool> polled{false};
  CallCanceller canceller;  // of all calls, once and for all

  // Takes the next slot that is asked for, in turn. `more`: others are. False: there is none, or
  // the client leaves.
  bool Take(uint32_t* slot, bool* more) {
    std::lock_guard lock(mutex_);
    const uint32_t n = ring.shape().slots;
    bool taken = false;
    *more = false;
    for (uint32_t i = 0, first = next_; i < n && !left_; ++i) {
      const uint32_t at = (first + i) % n;
      if (busy_[at] || !ring.asked(at)) continue;
      if (taken) {
        *more = true;
        break;
      }
      taken = busy_[at] = true;
      *slot = at;
      next_ = at + 1;
      ++running_;
    }
    return taken;
  }
  bool asked() const {
    for (uint32_t i = 0; i < ring.shape().slots; ++i) {
      if (ring.asked(i)) return true;
    }
    return false;
  }
  // Answers a slot that Take gave.
  void Answer(uint32_t slot) {
    std::function<void()> ended;
    {
      // The client may hand the slot over again as soon as it is answered, and not before.
      std::lock_guard lock(mutex_);
      busy_[slot] = false;
      ring.Answer(slot);
      PREFIXD_CHECK(running_ > 0);
      if (--running_ == 0 && left_) ended = std::move(ended_);
    }
    ring.Wake(slot);
    if (ended) ended();
  }
  bool left() const {
    std::lock_guard lock(mutex_);
    return left_;
  }
  void Leave(std::function<void()> ended) {
    {
      std::lock_guard lock(mutex_);
      left_ = true;
      if (running_ > 0) {
        ended_ = std::move(ended);
        return;
      }
    }
    ended();
  }

 private:
  mutable std::mutex mutex_;
  std::array<bool, kMostRingSlots> busy_{};
  uint32_t next_ = 0, running_ = 0;
  bool left_ = false;
  std::function<void()> ended_;
};

StepService::StepService(size_t threads, size_t polling, ServerCounters& counters,
                         MemoryAccount memory)
    : counters_(counters),
      at_bells_most_(std::clamp<size_t>(std::thread::hardware_concurrency(), 1, threads)),
      polling_most_(polling),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      stop_bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      memory_(std::move(memory)) {
  epoll_event stop{};
  stop.events = EPOLLIN;
  if (epoll_ < 0 || stop_bell_ < 0 || ::epoll_ctl(epoll_, EPOLL_CTL_ADD, stop_bell_, &stop) != 0) {
    return;  // Serve fails, and all steps go as messages
  }
  threads_.reserve(threads);
  free_ = threads;
  for (size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

StepService::~StepService() {
  Stop();
  if (epoll_ >= 0) ::close(epoll_);
  if (stop_bell_ >= 0) ::close(stop_bell_);
}

void StepService::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    wanted_.notify_all();
  }
  const uint64_t one = 1;
  if (stop_bell_ >= 0) (void)!::write(stop_bell_, &one, sizeof(one));
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

Result<std::shared_ptr<StepService::Ring>> StepService::Serve(StepRing ring,
                                                              RequestHandler& handler,
                                                              const std::string& tenant) {
  std::lock_guard lock(mutex_);
  if (threads_.empty()) return Error{Code::kResourceExhausted, "no thread serves rings"};
  const auto entry = tenants_.try_emplace(tenant).first;
  auto served = std::make_shared<Ring>(next_id_++, std::move(ring), handler, entry);
  rings_.emplace(served->id, served);
  ++entry->second.rings;
  // The daemon never reads or writes this eventfd, which the client could make either block.
  // Edge-triggered, it wakes one thread for each write all the same.
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = served->id;
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, served->ring.bell_fd(), &event) != 0) {
    rings_.erase(served->id);
    --entry->second.rings;
    Forget(*served);
    return Error{Code::kResourceExhausted, std::string("epoll_ctl: ") + std::strerror(errno)};
  }
  return served;
}

void StepService::Leave(const std::shared_ptr<Ring>& ring, std::function<void()> ended) {
  {
    std::lock_guard lock(mutex_);
    ::epoll_ctl(epoll_, EPOLL_CTL_DEL, ring->ring.bell_fd(), nullptr);
    if (rings_.erase(ring->id) > 0) {
      --ring->tenant->second.rings;
      Forget(*ring);
    }
  }
  ring->Leave(std::move(ended));
}

void StepService::Cancel(Ring& ring) { ring.canceller.Cancel(); }

std::shared_ptr<StepService::Ring> StepService::Find(uint64_t id) const {
  std::lock_guard lock(mutex_);
  const auto it = rings_.find(id);
  return it == rings_.end() ? nullptr : it->second;
}

// Wakes one more thread for a ring whose bell has rung before.
void StepService::RingAgain(const Ring& ring) const {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = ring.id;
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, ring.ring.bell_fd(), &event);  // fails when the ring has left
}

bool StepService::Enter(const std::shared_ptr<Ring>& ring) {
  return WithMemory([&] {
    std::lock_guard lock(mutex_);
    if (!rings_.contains(ring->id)) return false;  // it has left
    Tenant& tenant = ring->tenant->second;
    if (tenant.running == 0 || tenant.running + 1 <= 3 * (free_ - 1)) {
      ++tenant.running;
      --free_;
      return true;
    }
    if (std::ranges::find(tenant.waiting, ring->id) == tenant.waiting.end()) {
      tenant.waiting.push_back(ring->id);
      ++tenant.waits;
    }
    return false;
  });
}

std::shared_ptr<StepService::Ring> StepService::NextFor(const Ring& ring) {
  std::lock_guard lock(mutex_);
  Tenant& tenant = ring.tenant->second;
  while (!tenant.waiting.empty()) {
    const auto next = rings_.find(tenant.waiting.front());
    tenant.waiting.pop_front();
    --tenant.waits;
    if (next != rings_.end()) return next->second;
  }
  ++free_;
  --tenant.running;
  Forget(ring);
  return nullptr;
}

void StepService::Forget(const Ring& ring) {
  const Tenant& tenant = ring.tenant->second;
  if (tenant.rings == 0 && tenant.running == 0) tenants_.erase(ring.tenant);
}

void StepService::Work() {
  StepScratch scratch(memory_);
  while (true) {
    {
      std::unique_lock lock(mutex_);
      ++spare_;
      wanted_.wait(lock, [this] { return stopping_ || at_bells_ < at_bells_most_; });
      --spare_;
      if (stopping_) return;
      ++at_bells_;
    }
    epoll_event event{};
    const int n = ::epoll_wait(epoll_, &event, 1, -1);
    {
      std::lock_guard lock(mutex_);
      if (--at_bells_ == 0 && spare_ > 0) wanted_.notify_one();
      if (stopping_) return;
    }
    if (n < 1) continue;
    auto ring = Find(event.data.u64);
    if (!ring || !Enter(ring)) continue;
    for (; ring; ring = NextFor(*ring)) RunCalls(*ring, scratch);
  }
}

void StepService::RunCalls(Ring& ring, StepScratch& scratch) {
  uint32_t slot = 0;
  bool more = false;
  while (ring.Take(&slot, &more)) {
    if (more) RingAgain(ring);
    const CallCanceller client(ring.ring.cancelled(slot));
    const CallScope whole({.canceller = &ring.canceller}), own({.canceller = &client});
    const StepServed served = ring.handler.StepInSlot(ring.ring.slot(slot), scratch);
    ++counters_.calls;
    ++counters_.ring_calls;
    counters_.ring_steps += served.steps;
    if (!served.ok) ++counters_.calls_failed;
    ring.Answer(slot);
    if (served.spin_us == 0 || !Poll(ring, std::chrono::microseconds(served.spin_us))) return;
  }
}

bool StepService::OthersWant(const Ring& ring) const {
  return free_ == 0 || ring.tenant->second.waits > 0;
}

// Returns whether a slot is asked for. While the ring counts as polled its client rings no bell, so
// all slots are looked at again behind that.
bool StepService::Poll(Ring& ring, std::chrono::microseconds time) {
  if (polling_.fetch_add(1) >= polling_most_ || OthersWant(ring) || ring.polled.exchange(true)) {
    --polling_;
    return false;
  }
  ring.ring.SetPolling(true);
  const auto until = Clock::now() + std::min<std::chrono::microseconds>(time, kMostSpin);
  for (uint32_t round = 0; !ring.asked(); ++round) {
    if (round % 16 == 15 && (OthersWant(ring) || Clock::now() >= until || ring.left())) break;
    PollPause(round);
  }
  ring.ring.SetPolling(false);
  ring.polled = false;
  --polling_;
  return ring.asked();
}

}  // namespace prefixd::daemon
