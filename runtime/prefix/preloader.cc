#include "runtime/prefix/preloader.h"

#include <algorithm>
#include <utility>

#include "base/capture_errors.h"
#include "runtime/prefix/prepared_prefix.h"

namespace prefixd {

Preloader::Preloader(WorkPriority priority, Load load)
    : load_(std::move(load)), worker_(priority, [this] { return Take(); }) {}

void Preloader::Want(PreparedPrefix& prefix, index::IndexKind kind) {
  std::lock_guard lock(worker_.mutex());
  const bool known = std::ranges::any_of(
      entries_, [&](const Entry& e) { return e.prefix == &prefix && e.kind == kind; });
  if (known || worker_.stopping()) return;
  entries_.push_back({&prefix, kind});
  worker_.changed().notify_all();
}

void Preloader::Forget(const PreparedPrefix& prefix) {
  std::unique_lock lock(worker_.mutex());
  entries_.remove_if([&](const Entry& e) { return e.prefix == &prefix; });
  if (running_ != &prefix) return;
  stop_ = true;
  worker_.changed().wait(lock, [&] { return running_ != &prefix; });
}

void Preloader::Stop() {
  {
    std::lock_guard lock(worker_.mutex());
    closed_ = true;  // pieces that begin later see it
    stop_ = true;
  }
  worker_.Stop();
}

bool Preloader::Loads(const PreparedPrefix& prefix, size_t head) const {
  std::lock_guard lock(worker_.mutex());
  return std::ranges::any_of(entries_, [&](const Entry& e) {
    const bool running = running_ == &prefix && e.next == head + 1;
    return e.prefix == &prefix && (e.next <= head || running);
  });
}

uint64_t Preloader::queued() const {
  std::lock_guard lock(worker_.mutex());
  uint64_t heads = running_ ? 1 : 0;
  for (const Entry& e : entries_) heads += e.prefix->heads() - e.next;
  return heads;
}

Worker::Next Preloader::Take() {
  const auto entry =
      std::ranges::find_if(entries_, [](const Entry& e) { return e.next < e.prefix->heads(); });
  if (entry == entries_.end()) return {};
  const Entry now = *entry;
  Worker::Next next{[this, now](const std::stop_token&) { Run(now); }};
  // Nothing below allocates: what counts as running does run.
  ++entry->next;
  running_ = now.prefix;
  stop_ = closed_;
  return next;
}

void Preloader::Run(const Entry& now) {
  const Status status =
      CaptureErrors([&] { return load_(*now.prefix, now.kind, now.next, stop_); });
  std::lock_guard lock(worker_.mutex());
  running_ = nullptr;
  if (status.ok()) return;
  for (Entry& e : entries_) {
    if (e.prefix == now.prefix && e.kind == now.kind) e.next = e.prefix->heads();
  }
}

}  // namespace prefixd
