#include "runtime/prefix/head_loads.h"

#include <algorithm>
#include <utility>

#include "base/caught.h"
#include "runtime/prefix/prepared_prefix.h"

namespace prefixd {

HeadLoads::HeadLoads(WorkPriority priority, Load load) : load_(std::move(load)) {
  thread_ = std::thread([this, priority] {
    if (priority == WorkPriority::kBackground) YieldToOthers();
    Loop();
  });
}

void HeadLoads::Want(PreparedPrefix& prefix, index::IndexKind kind) {
  std::lock_guard lock(mutex_);
  const bool known = std::ranges::any_of(
      entries_, [&](const Entry& e) { return e.prefix == &prefix && e.kind == kind; });
  if (known || stopping_) return;
  entries_.push_back({&prefix, kind});
  changed_.notify_all();
}

void HeadLoads::Forget(const PreparedPrefix& prefix) {
  std::unique_lock lock(mutex_);
  entries_.remove_if([&](const Entry& e) { return e.prefix == &prefix; });
  if (running_ != &prefix) return;
  stop_ = true;
  changed_.wait(lock, [&] { return running_ != &prefix; });
}

void HeadLoads::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = stop_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

bool HeadLoads::Loads(const PreparedPrefix& prefix, size_t head) const {
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(entries_, [&](const Entry& e) {
    const bool running = running_ == &prefix && e.next == head + 1;
    return e.prefix == &prefix && (e.next <= head || running);
  });
}

uint64_t HeadLoads::queued() const {
  std::lock_guard lock(mutex_);
  uint64_t heads = running_ ? 1 : 0;
  for (const Entry& e : entries_) heads += e.prefix->heads() - e.next;
  return heads;
}

void HeadLoads::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    const auto todo = [this] {
      return std::ranges::find_if(entries_,
                                  [](const Entry& e) { return e.next < e.prefix->heads(); });
    };
    changed_.wait(lock, [&] { return stopping_ || todo() != entries_.end(); });
    if (stopping_) return;
    const auto entry = todo();
    const Entry now = *entry;
    ++entry->next;
    running_ = now.prefix;
    stop_ = false;
    lock.unlock();
    const Status status = Caught([&] { return load_(*now.prefix, now.kind, now.next, stop_); });
    lock.lock();
    running_ = nullptr;
    changed_.notify_all();
    if (status.ok()) continue;
    for (Entry& e : entries_) {
      if (e.prefix == now.prefix && e.kind == now.kind) e.next = e.prefix->heads();
    }
  }
}

}  // namespace prefixd
