#include "runtime/background/segment_queue.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "base/caught.h"
#include "runtime/background/thread_pool.h"

namespace prefixd {

using storage::SegmentId;

SegmentQueue::SegmentQueue(std::string makes, Job job)
    : makes_(std::move(makes)), job_(std::move(job)) {
  thread_ = std::thread([this] {
    YieldToOthers();
    Loop();
  });
}

void SegmentQueue::Enqueue(const SegmentId& id) {
  std::lock_guard lock(mutex_);
  if (std::find(queue_.begin(), queue_.end(), id) != queue_.end()) return;
  queue_.push_back(id);
  if (running_ != id) entries_[id] = {{IngestState::kPending, std::nullopt}, nullptr};
  changed_.notify_all();
}

void SegmentQueue::EnqueueUnknown(const SegmentId& id) {
  std::unique_lock lock(mutex_);
  const auto it = entries_.find(id);
  const bool wanted = it == entries_.end() || it->second.standing.state == IngestState::kFailed;
  lock.unlock();
  if (wanted) Enqueue(id);
}

void SegmentQueue::MarkReady(const SegmentId& id) {
  std::lock_guard lock(mutex_);
  if (running_ == id) {  // what runs may be building for another producer: look again after it
    if (std::find(queue_.begin(), queue_.end(), id) == queue_.end()) queue_.push_back(id);
    return;
  }
  entries_[id] = {{IngestState::kReady, std::nullopt}, nullptr};
  changed_.notify_all();
}

SegmentQueue::Standing SegmentQueue::Get(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  const auto it = entries_.find(id);
  return it == entries_.end() ? Standing{} : it->second.standing;
}

void SegmentQueue::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    const SegmentId id = queue_.front();
    queue_.pop_front();
    auto progress = std::make_shared<WorkProgress>();
    entries_[id] = {{IngestState::kRunning, std::nullopt}, progress};
    running_ = id;
    changed_.notify_all();
    lock.unlock();
    Status status = Caught([&] { return job_(id, *progress); });
    lock.lock();
    running_.reset();
    const bool again = std::find(queue_.begin(), queue_.end(), id) != queue_.end();
    if (auto it = entries_.find(id); it != entries_.end()) {
      Standing& standing = it->second.standing;
      if (again || (!status.ok() && progress->cancelled)) {
        standing = {IngestState::kPending, std::nullopt};
      } else if (status.ok()) {
        standing = {IngestState::kReady, std::nullopt};
      } else {
        standing = {IngestState::kFailed, std::move(status).error()};
      }
    }
    changed_.notify_all();
  }
}

Status SegmentQueue::Wait(std::span<const SegmentId> chain, const ProgressFn& progress) {
  constexpr auto kReportEvery = std::chrono::milliseconds(50);
  std::unique_lock lock(mutex_);
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
      lock.unlock();  // the callback may take its time
      const bool go_on = progress(done, std::max(done, total), "heads");
      lock.lock();
      if (ready) return {};
      if (!go_on) return Error{Code::kCancelled, "waiting was stopped by the caller"};
    }
    if (ready) return {};
    if (stopping_) return Error{Code::kCancelled, "the store is closing"};
    changed_.wait_for(lock, kReportEvery);
  }
}

Status SegmentQueue::WaitIdle(const ProgressFn& progress) {
  std::unique_lock lock(mutex_);
  while (!queue_.empty() || running_) {
    if (stopping_) return Error{Code::kCancelled, "the store is closing"};
    if (progress) {
      const uint64_t left = queue_.size() + 1;
      lock.unlock();
      const bool go_on = progress(0, left, "segments");
      lock.lock();
      if (!go_on) return Error{Code::kCancelled, "waiting was stopped by the caller"};
    }
    changed_.wait_for(lock, std::chrono::milliseconds(50));
  }
  return {};
}

void SegmentQueue::Forget(const SegmentId& id) {
  std::unique_lock lock(mutex_);
  std::erase(queue_, id);
  if (running_ == id) {
    entries_[id].progress->cancelled = true;
    changed_.wait(lock, [&] { return running_ != id; });
  }
  std::erase(queue_, id);
  entries_.erase(id);
  changed_.notify_all();
}

void SegmentQueue::Prune(const std::function<bool(const SegmentId&)>& stored) {
  std::vector<SegmentId> known;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, entry] : entries_) known.push_back(id);
  }
  std::erase_if(known, [&](const SegmentId& id) { return stored(id); });  // may take its time
  std::lock_guard lock(mutex_);
  for (const SegmentId& id : known) {
    if (running_ == id) continue;
    std::erase(queue_, id);
    entries_.erase(id);
  }
  changed_.notify_all();
}

void SegmentQueue::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    if (running_) entries_[*running_].progress->cancelled = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

uint64_t SegmentQueue::queued() const {
  std::lock_guard lock(mutex_);
  return queue_.size() + (running_ ? 1 : 0);
}

}  // namespace prefixd
