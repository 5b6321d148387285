#include "runtime/step/step_queue.h"

#include <algorithm>

#include "base/call_scope.h"
#include "base/capture_errors.h"
#include "base/check.h"

namespace prefixd {

bool StepQueue::Related(const Call& a, const Call& b) {
  auto of_a = a.keys.begin(), of_b = b.keys.begin();
  while (of_a != a.keys.end() && of_b != b.keys.end()) {
    if (*of_a == *of_b) return true;
    ++(*of_a < *of_b ? of_a : of_b);
  }
  return false;
}

void StepQueue::Dispatch() noexcept {
  while (!waiting_.empty() && busy_ < cores_) {
    Call& leader = *waiting_.front();
    leader.leads.push_back(&leader);  // Run has reserved one place
    waiting_.pop_front();
    std::erase_if(waiting_, [&](Call* call) {
      if (!Related(leader, *call)) return false;
      // A call that cannot be appended for lack of memory waits for its own turn.
      return CaptureErrors([&]() -> Status {
               leader.leads.push_back(call);
               return {};
             })
          .ok();
    });
    for (const Call* call : leader.leads) busy_ += call->tasks.size();
    if (leader.leads.size() > 1) joined_ += leader.leads.size();
    leader.changed.notify_one();
  }
}

void StepQueue::Run(Call& call) {
  if (call.tasks.empty()) return;
  call.keys.reserve(call.tasks.size());
  for (const GroupTask& task : call.tasks) call.keys.push_back(task.key());
  std::ranges::sort(call.keys);
  call.keys.erase(std::ranges::unique(call.keys).begin(), call.keys.end());
  call.leads.reserve(1);
  std::unique_lock lock(mutex_);
  waiting_.push_back(&call);
  Dispatch();
  const auto begun = [&] { return call.done || !call.leads.empty(); };
  while (!call.changed.wait_for(lock, kCallSlice, begun)) {
    if (LeaveEarly(call)) return;
  }
  if (call.done) return;  // another thread led it
  lock.unlock();
  const auto free_core = [this] {
    std::lock_guard free(mutex_);
    PREFIXD_CHECK(busy_ > 0);
    --busy_;
    Dispatch();
  };
  const Status ran = CaptureErrors([&]() -> Status {
    std::vector<GroupTask*> tasks;
    size_t n = 0;
    for (const Call* led : call.leads) n += led->tasks.size();
    tasks.reserve(n);
    for (Call* led : call.leads) {
      for (GroupTask& task : led->tasks) tasks.push_back(&task);
    }
    run_(tasks, free_core);
    return {};
  });
  for (size_t i = 0; !ran.ok() && i < call.leads.size(); ++i) {
    for (GroupTask& task : call.leads[i]->tasks) {
      task.status = ran;
      free_core();
    }
  }
  lock.lock();
  for (Call* led : call.leads) {
    led->done = true;
    if (led != &call) led->changed.notify_one();
  }
}

bool StepQueue::LeaveEarly(Call& call) {
  const auto place = std::ranges::find(waiting_, &call);
  const auto ends = [](const GroupTask& task) { return !task.limits.Check().ok(); };
  if (place == waiting_.end() || !std::ranges::all_of(call.tasks, ends)) return false;
  waiting_.erase(place);
  for (GroupTask& task : call.tasks) task.status = task.limits.Check();
  return true;
}

uint64_t StepQueue::joined() const {
  std::lock_guard lock(mutex_);
  return joined_;
}

size_t StepQueue::waiting() const {
  std::lock_guard lock(mutex_);
  return waiting_.size();
}

}  // namespace prefixd
