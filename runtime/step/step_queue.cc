#include "runtime/step/step_queue.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "base/call_scope.h"
#include "base/capture_errors.h"
#include "base/check.h"
#include "runtime/step/exact_pass.h"

namespace prefixd {

namespace {

// What works longer leaves its core to whoever wakes.
constexpr std::chrono::milliseconds kLong{1};

}  // namespace

bool StepQueue::Related(const Call& a, const Call& b) {
  auto of_a = a.keys.begin(), of_b = b.keys.begin();
  while (of_a != a.keys.end() && of_b != b.keys.end()) {
    if (*of_a == *of_b) return true;
    ++(*of_a < *of_b ? of_a : of_b);
  }
  return false;
}

void StepQueue::Move(Call& call, std::list<Call*>& from, std::list<Call*>& to,
                     std::list<Call*>::iterator before) {
  to.splice(before, from, call.place);  // allocates nothing, and the iterator stays
}

// The call wants nothing more; neither may its tenant.
void StepQueue::Unlist(Call& call, std::list<Call*>& from) {
  Tenant& tenant = *call.of;
  from.erase(call.place);
  call.listed = false;
  if (tenant.wants()) return;
  tenant.turn = 0;
  --wanting_;
  if (wanting_ > 0) {
    if (tenant.credit >= kQuantum) tenants_.erase(tenants_.find(tenant.name));
  } else {
    // Nobody waits for what was owed. The entry stays for the next step, which mostly is the same
    // tenant's.
    std::erase_if(tenants_, [&](const auto& entry) { return &entry.second != &tenant; });
    tenant.credit = kQuantum;
  }
  contended_ = wanting_ > 1;
}

// All get the time of as many rounds as one that wants cores needs.
void StepQueue::BeginRound() noexcept {
  int64_t rounds = std::numeric_limits<int64_t>::max();
  for (const auto& [name, tenant] : tenants_) {
    if (tenant.wants()) rounds = std::min(rounds, -tenant.credit / kQuantum + 1);
  }
  for (auto it = tenants_.begin(); it != tenants_.end();) {
    Tenant& tenant = it->second;
    tenant.credit = std::min<std::chrono::nanoseconds>(kQuantum, tenant.credit + rounds * kQuantum);
    it = !tenant.wants() && tenant.credit == kQuantum ? tenants_.erase(it) : std::next(it);
  }
}

StepQueue::Tenant* StepQueue::Next() noexcept {
  const auto before = [](const Tenant& a, const Tenant& b) {
    const bool a_may = a.credit.count() > 0, b_may = b.credit.count() > 0;
    if (a_may != b_may) return a_may;
    return a.turn != b.turn ? a.turn < b.turn : a.since < b.since;
  };
  Tenant* next = nullptr;
  for (auto& [name, tenant] : tenants_) {
    if (!tenant.wants() || tenant.looked_at == passes_) continue;
    if (next == nullptr || before(tenant, *next)) next = &tenant;
  }
  return next;
}

void StepQueue::Start(Tenant& tenant) noexcept {
  Call& leader = *tenant.waiting.front();
  Move(leader, tenant.waiting, tenant.running, tenant.running.end());
  if (!leader.leads.empty()) {  // it has stopped before
    leader.stopped = false;
    leader.changed.notify_one();
    return;
  }
  leader.leads.push_back(&leader);  // Run has reserved one place
  for (auto it = tenant.waiting.begin(); it != tenant.waiting.end();) {
    Call& call = **it;
    const bool joins = call.leads.empty() && Related(leader, call) &&
                       // One that cannot be added for lack of memory waits for its own turn.
                       CaptureErrors([&]() -> Status {
                         leader.leads.push_back(&call);
                         return {};
                       }).ok();
    if (joins) call.listed = false;
    it = joins ? tenant.waiting.erase(it) : std::next(it);
  }
  for (const Call* call : leader.leads) leader.left += call->tasks.size();
  if (leader.leads.size() > 1) joined_ += leader.leads.size();
  leader.changed.notify_one();
}

void StepQueue::Schedule() noexcept {
  if (wanting_ == 0) return;
  ++passes_;
  Tenant* tenant = Next();
  if (tenant->credit.count() <= 0) {
    BeginRound();
    tenant = Next();
  }
  size_t claimed = 0;  // tasks of those whose turn it is
  for (; tenant != nullptr && claimed < cores_; tenant = Next()) {
    tenant->looked_at = passes_;
    for (const Call* call : tenant->running) claimed += call->left;
    while (claimed < cores_ && !tenant->waiting.empty()) {
      Start(*tenant);
      claimed += tenant->running.back()->left;
    }
  }
  if (tenant == nullptr) return;
  // The others give way. What they have begun goes on before what waits.
  for (auto& [name, other] : tenants_) {
    if (other.looked_at == passes_) continue;
    while (!other.running.empty()) {
      Call& call = *other.running.back();
      call.stopped = true;
      ++stopped_;
      Move(call, other.running, other.waiting, other.waiting.begin());
    }
  }
}

void StepQueue::Charge(Call& call, std::chrono::nanoseconds time, size_t tasks) {
  PREFIXD_CHECK(call.left >= tasks, call.left, tasks);
  Tenant& tenant = *call.of;
  Deduct(tenant, time);
  call.left -= tasks;
  if (call.left == 0 && call.listed) Unlist(call, call.stopped ? tenant.waiting : tenant.running);
  if (tasks > 0 || contended_) {
    Schedule();
  } else if (tenant.credit.count() <= 0) {
    BeginRound();  // nobody waits for what a tenant alone uses
  }
}

void StepQueue::Deduct(Tenant& tenant, std::chrono::nanoseconds time) {
  tenant.credit -= time;
  if (tenant.credit.count() <= 0 && time.count() > 0) tenant.turn = ++clock_;
}

void StepQueue::Settle() {
  const auto now = std::chrono::steady_clock::now();
  for (Stint* s = stints_; s != nullptr; s = s->after_) {
    Deduct(*s->service_.call_.of, now - std::exchange(s->since_, now));
  }
}

void StepQueue::ForgiveAlone() {
  if (wanting_ != 1 || stints_ == nullptr) return;
  Settle();
  if (stints_->service_.call_.of->credit.count() <= 0) BeginRound();
}

std::chrono::milliseconds StepQueue::Slice() const {
  constexpr std::chrono::milliseconds kShared{2};
  return contended_ ? kShared : kCallSlice;
}

StepQueue::Stint::Stint(Service& service)
    : service_(service), since_(std::chrono::steady_clock::now()) {
  StepQueue& queue = service_.queue_;
  bool crowd = false;
  {
    std::lock_guard lock(queue.mutex_);
    after_ = queue.stints_;
    if (after_ != nullptr) after_->before_ = this;
    queue.stints_ = this;
    const Call& call = service_.call_;
    crowd = call.of->waiting.size() + call.of->running.size() > 1 || call.leads.size() > 1;
  }
  if (crowd) long_turn_.Begin();
}

bool StepQueue::Stint::GoesOn() {
  if (std::chrono::steady_clock::now() - started_ > kLong) long_turn_.Begin();
  if (service_.contended()) {
    StepQueue& queue = service_.queue_;
    std::lock_guard lock(queue.mutex_);
    queue.Settle();
    queue.Schedule();
  }
  return !service_.stopped();
}

void StepQueue::Stint::End(size_t tasks) {
  if (!std::exchange(begun_, false)) return;
  long_turn_.End();
  const auto now = std::chrono::steady_clock::now();
  StepQueue& queue = service_.queue_;
  std::lock_guard lock(queue.mutex_);
  (before_ != nullptr ? before_->after_ : queue.stints_) = after_;
  if (after_ != nullptr) after_->before_ = before_;
  // Others settled up to a time that may lie behind the lock.
  queue.Charge(service_.call_, std::max<std::chrono::nanoseconds>(now - since_, {}), tasks);
}

void StepQueue::Service::Charge(std::chrono::nanoseconds time, size_t tasks) {
  std::lock_guard lock(queue_.mutex_);
  queue_.Charge(call_, time, tasks);
}

void StepQueue::Run(Call& call) {
  if (call.tasks.empty()) return;
  call.keys.reserve(call.tasks.size());
  // An exact pass saves nothing beside others, which would wait for the end of all of it.
  for (const GroupTask& task : call.tasks) {
    if (!IsExact(task)) call.keys.push_back(task.key());
  }
  std::ranges::sort(call.keys);
  call.keys.erase(std::ranges::unique(call.keys).begin(), call.keys.end());
  call.leads.reserve(1);
  std::list<Call*> own{&call};
  std::unique_lock lock(mutex_);
  ForgiveAlone();
  auto found = tenants_.find(call.tenant);
  if (found == tenants_.end()) {
    found = tenants_.try_emplace(std::string(call.tenant)).first;
    found->second.name = found->first;
  }
  Tenant& tenant = found->second;
  call.of = &tenant;
  call.place = own.begin();
  if (!tenant.wants()) {
    tenant.since = ++clock_;
    contended_ = ++wanting_ > 1;
  }
  Move(call, own, tenant.waiting, tenant.waiting.end());
  call.listed = true;
  if (contended_) Settle();
  Schedule();
  const auto begun = [&] { return call.done || !call.leads.empty(); };
  while (!call.changed.wait_for(lock, Slice(), begun)) {
    if (LeaveEarly(call)) return;
    Settle();
    Schedule();
  }
  if (call.done) return;  // another thread led it
  std::vector<GroupTask*> tasks;
  Service service(*this, call);
  lock.unlock();
  const Status listed = CaptureErrors([&]() -> Status {
    tasks.reserve(call.left);
    return {};
  });
  for (Call* led : call.leads) {
    for (GroupTask& task : led->tasks) {
      if (listed.ok()) {
        tasks.push_back(&task);
      } else {
        task.status = listed;
        service.Charge({}, 1);
      }
    }
  }
  lock.lock();
  while (call.left > 0) {
    if (!call.changed.wait_for(lock, Slice(), [&] { return !call.stopped.load(); })) {
      if (!LeaveEarly(call)) {
        Settle();
        Schedule();
      }
      continue;
    }
    lock.unlock();
    run_(tasks, service);
    std::erase_if(tasks, [](const GroupTask* task) { return task->done; });
    lock.lock();
  }
  for (Call* led : call.leads) {
    led->done = true;
    if (led != &call) led->changed.notify_one();
  }
}

bool StepQueue::LeaveEarly(Call& call) {
  if (!call.listed || (!call.leads.empty() && !call.stopped)) return false;
  const auto each = [&call](const auto& visit) {
    if (call.leads.empty()) return std::ranges::all_of(call.tasks, visit);
    return std::ranges::all_of(call.leads,
                               [&](Call* led) { return std::ranges::all_of(led->tasks, visit); });
  };
  const auto ends = [](const GroupTask& task) { return task.done || !task.limits.Check().ok(); };
  if (!each(ends)) return false;
  each([](GroupTask& task) {
    if (!task.done) task.status = task.limits.Check();
    return task.done = true;
  });
  call.left = 0;
  Unlist(call, call.of->waiting);
  Schedule();
  return true;
}

uint64_t StepQueue::joined() const {
  std::lock_guard lock(mutex_);
  return joined_;
}

uint64_t StepQueue::stopped() const {
  std::lock_guard lock(mutex_);
  return stopped_;
}

size_t StepQueue::waiting() const {
  std::lock_guard lock(mutex_);
  size_t n = 0;
  for (const auto& [name, tenant] : tenants_) n += tenant.waiting.size();
  return n;
}

}  // namespace prefixd
