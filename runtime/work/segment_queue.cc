#include "runtime/work/segment_queue.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "base/capture_errors.h"

namespace prefixd {

using storage::SegmentId;

namespace {

constexpr std::chrono::minutes kFirstRetryPause{1}, kLongestRetryPause{60};

bool MayPass(const Error& error) {
  return error.code == Code::kIo || error.code == Code::kUnavailable ||
         error.code == Code::kResourceExhausted;
}

}  // namespace

SegmentQueue::SegmentQueue(std::string makes, BackgroundPace& pace, Job job)
    : makes_(std::move(makes)),
      pace_(pace),
      job_(std::move(job)),
      worker_(WorkPriority::kBackground, [this] { return Take(); }) {}

void SegmentQueue::Push(const SegmentId& id) {
  const auto [at, fresh] = queued_.insert(id);
  if (!fresh) return;
  try {
    queue_.push_back(id);
  } catch (const std::bad_alloc&) {
    queued_.erase(at);
    throw;
  }
}

void SegmentQueue::Pull(const SegmentId& id) {
  if (queued_.erase(id) > 0) std::erase(queue_, id);
}

void SegmentQueue::Enqueue(const SegmentId& id) {
  std::lock_guard lock(worker_.mutex());
  if (queued_.contains(id)) return;
  Push(id);
  if (running_ != id) entries_[id] = {{IngestState::kPending, std::nullopt}, nullptr};
  worker_.changed().notify_all();
}

void SegmentQueue::EnqueueUnknown(const SegmentId& id) {
  std::unique_lock lock(worker_.mutex());
  const auto it = entries_.find(id);
  const bool wanted = it == entries_.end() || it->second.standing.state == IngestState::kFailed;
  lock.unlock();
  if (wanted) Enqueue(id);
}

void SegmentQueue::PutFirst(const SegmentId& id) {
  std::lock_guard lock(worker_.mutex());
  const auto it = std::ranges::find(queue_, id);
  if (it != queue_.end()) std::rotate(queue_.begin(), it, it + 1);
}

void SegmentQueue::MarkReady(const SegmentId& id) {
  std::lock_guard lock(worker_.mutex());
  if (running_ == id) {  // the running job may use another producer: run again after it
    Push(id);
    return;
  }
  if (queued_.contains(id)) return;
  entries_[id] = {{IngestState::kReady, std::nullopt}, nullptr};
  worker_.changed().notify_all();
}

SegmentQueue::Standing SegmentQueue::Get(const SegmentId& id) const {
  std::lock_guard lock(worker_.mutex());
  const auto it = entries_.find(id);
  return it == entries_.end() ? Standing{} : it->second.standing;
}

bool SegmentQueue::Knows(const SegmentId& id) const {
  std::lock_guard lock(worker_.mutex());
  return entries_.contains(id);
}

Worker::Next SegmentQueue::Take() {
  if (queue_.empty()) return {};
  const SegmentId id = queue_.front();
  auto progress = std::make_shared<WorkProgress>();
  progress->pace = &pace_;
  Worker::Next next{[this, id, progress](const std::stop_token&) { Run(id, progress); }};
  Entry& entry = entries_[id];
  // Nothing below allocates: a segment that left the queue is worked on.
  entry = {{IngestState::kRunning, std::nullopt}, std::move(progress), std::nullopt, entry.pause};
  queue_.pop_front();
  queued_.erase(id);
  running_ = id;
  worker_.changed().notify_all();
  return next;
}

void SegmentQueue::Run(const SegmentId& id, const std::shared_ptr<WorkProgress>& progress) {
  const auto attempt = [&] { return CaptureErrors([&] { return job_(id, *progress); }); };
  Status status = attempt();
  // Memory that is short for a while is no reason to give a segment up.
  while (!status.ok() && status.error().retry_after_ms > 0) {
    constexpr std::chrono::milliseconds kLook{20};
    const auto until =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(status.error().retry_after_ms);
    while (std::chrono::steady_clock::now() < until && !progress->cancelled) {
      std::this_thread::sleep_for(kLook);
    }
    if (progress->cancelled || LetOthersGo(id)) break;
    progress->done = 0;
    status = attempt();
  }
  std::lock_guard lock(worker_.mutex());
  running_.reset();
  const auto it = entries_.find(id);
  if (it == entries_.end()) return;
  Standing& standing = it->second.standing;
  if (queued_.contains(id) || (!status.ok() && progress->cancelled)) {
    standing = {IngestState::kPending, std::nullopt};
  } else if (status.ok()) {
    standing = {IngestState::kReady, std::nullopt};
    it->second.pause = {};
  } else {
    Entry& entry = it->second;
    if (MayPass(status.error())) {
      entry.pause =
          std::clamp<std::chrono::minutes>(2 * entry.pause, kFirstRetryPause, kLongestRetryPause);
      entry.again = std::chrono::steady_clock::now() + entry.pause;
    }
    standing = {IngestState::kFailed, std::move(status).error()};
  }
}

void SegmentQueue::RetryFailed(std::chrono::steady_clock::time_point now) {
  std::lock_guard lock(worker_.mutex());
  bool queued = false;
  for (auto& [id, entry] : entries_) {
    if (!entry.again || *entry.again > now) continue;
    Push(id);
    entry.again.reset();
    entry.standing = {IngestState::kPending, std::nullopt};
    queued = true;
  }
  if (queued) worker_.changed().notify_all();
}

// A tenant that has used up its memory must not hold up the segments of others: its own goes behind
// them. Without memory for that it just tries again.
bool SegmentQueue::LetOthersGo(const SegmentId& id) {
  std::lock_guard lock(worker_.mutex());
  if (queue_.empty()) return false;
  const auto queued = CaptureErrors([&]() -> Status {
    Push(id);
    return {};
  });
  return queued.ok();
}

Status SegmentQueue::Wait(std::span<const SegmentId> chain, const ProgressFn& progress) {
  constexpr auto kReportEvery = std::chrono::milliseconds(50);
  const BackgroundPace::Hurry hurry(&pace_);
  std::unique_lock lock(worker_.mutex());
  while (true) {
    bool ready = true;
    uint64_t done = 0, total = 0;
    for (const SegmentId& id : chain) {
      const auto it = entries_.find(id);
      if (it == entries_.end()) {
        return Error{Code::kNotFound, "prefix " + id.ToString() + " was removed"};
      }
      const Entry& entry = it->second;
      if (entry.standing.state == IngestState::kFailed) {
        return Error{entry.standing.error->code,
                     "the " + makes_ + " of prefix " + id.ToString() +
                         " could not be made: " + entry.standing.error->message};
      }
      ready = ready && entry.standing.state == IngestState::kReady;
      if (entry.progress) {
        done += entry.progress->done;
        total += entry.progress->total;
      }
    }
    if (progress) {
      lock.unlock();  // the callback may take long
      const bool go_on = progress(done, std::max(done, total), "heads");
      lock.lock();
      if (ready) return {};
      if (!go_on) return Error{Code::kCancelled, "waiting was stopped by the caller"};
    }
    if (ready) return {};
    PREFIXD_TRY(CheckCall());
    if (worker_.stopping()) return Error{Code::kCancelled, "the store is closing"};
    worker_.changed().wait_for(lock, kReportEvery);
  }
}

Status SegmentQueue::WaitIdle(const ProgressFn& progress) {
  const BackgroundPace::Hurry hurry(&pace_);
  std::unique_lock lock(worker_.mutex());
  while (!queue_.empty() || running_) {
    PREFIXD_TRY(CheckCall());
    if (worker_.stopping()) return Error{Code::kCancelled, "the store is closing"};
    if (progress) {
      const uint64_t left = queue_.size() + 1;
      lock.unlock();
      const bool go_on = progress(0, left, "segments");
      lock.lock();
      if (!go_on) return Error{Code::kCancelled, "waiting was stopped by the caller"};
    }
    worker_.changed().wait_for(lock, std::chrono::milliseconds(50));
  }
  return {};
}

void SegmentQueue::Forget(const SegmentId& id) {
  const BackgroundPace::Hurry hurry(&pace_);
  std::unique_lock lock(worker_.mutex());
  Pull(id);
  if (running_ == id) {
    entries_[id].progress->cancelled = true;
    worker_.changed().wait(lock, [&] { return running_ != id; });
  }
  Pull(id);
  entries_.erase(id);
  worker_.changed().notify_all();
}

void SegmentQueue::Prune(const std::function<bool(const SegmentId&)>& stored) {
  std::vector<SegmentId> known;
  {
    std::lock_guard lock(worker_.mutex());
    for (const auto& [id, entry] : entries_) known.push_back(id);
  }
  std::erase_if(known, [&](const SegmentId& id) { return stored(id); });  // may take long
  if (known.empty()) return;
  std::lock_guard lock(worker_.mutex());
  for (const SegmentId& id : known) {
    if (running_ == id) continue;
    queued_.erase(id);
    entries_.erase(id);
  }
  std::erase_if(queue_, [&](const SegmentId& id) { return !queued_.contains(id); });
  worker_.changed().notify_all();
}

void SegmentQueue::Stop() {
  {
    std::lock_guard lock(worker_.mutex());
    if (running_) entries_[*running_].progress->cancelled = true;
  }
  worker_.Stop();
}

uint64_t SegmentQueue::queued() const {
  std::lock_guard lock(worker_.mutex());
  return queue_.size() + (running_ ? 1 : 0);
}

}  // namespace prefixd
