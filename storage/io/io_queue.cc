#include "storage/io/io_queue.h"

#include <algorithm>
#include <cerrno>
#include <new>

#include "base/check.h"

namespace prefixd::storage {
namespace {

constexpr uint32_t kMaxRetries = 16;

// The queue ages operations: an operation goes next after kPatience times its own bytes went before
// it. The measure is bytes, not operations or time, so that each less urgent class gets at least
// 1/17 of the bytes that the disk moves, whatever the sizes and however fast the disk, and takes
// little more from the more urgent classes: a 1 MiB write waits for 4096 single pages, a scrub page
// for 16.
constexpr uint64_t kPatience = 16;
constexpr uint64_t kLeastCost = 4096;  // a sync is not free

uint64_t Cost(const QueuedOp& queued) { return std::max(queued.bytes, kLeastCost); }

constexpr auto kStepRead = static_cast<size_t>(IoPriority::kStepRead);
constexpr auto kScrub = static_cast<size_t>(IoPriority::kScrub);

bool IsBackground(size_t priority) { return priority >= static_cast<size_t>(IoPriority::kWrite); }

// Limits the part of the caps that writes and scrub may take. The rest leaves room for a step read
// at once, instead of after the next of their large operations; with the default caps the wait is
// in the disk's own queue, and the share made no measurable difference.
IoLimits BackgroundShare(const IoLimits& limits) {
  return {limits.max_inflight_bytes / 4 * 3, std::max(1u, limits.max_inflight_ops * 3 / 4)};
}

}  // namespace

void Completions::Add(const QueuedOp& done, int64_t result) noexcept {
  done.op->result = result;
  if (!batches_.empty() && batches_.back().first == done.batch) {
    ++batches_.back().second;
    return;
  }
  try {
    batches_.emplace_back(done.batch, 1);
  } catch (const std::bad_alloc&) {
    done.batch->Complete(1);
  }
}

bool Completions::Wakes() const {
  return std::ranges::any_of(batches_, [](const auto& b) { return b.first->EndsWith(b.second); });
}

void Completions::Tell() {
  for (const auto& [batch, n] : batches_) batch->Complete(n);
  batches_.clear();
}

IoQueue::IoQueue(const IoLimits& limits, const ScrubManners& manners)
    : manners_(manners), limits_(limits), background_limits_(BackgroundShare(limits)) {}

void IoQueue::Push(const QueuedOp& queued) {
  Class& c = classes_[static_cast<size_t>(queued.op->priority)];
  if (c.waiting.empty()) {
    c.passed_over = 0;
    if (queued.op->priority == IoPriority::kScrub) scrub_waits_since_ = IoBatch::Clock::now();
  }
  c.waiting.push_back(queued);
}

void IoQueue::Push(std::span<IoOp> ops, IoBatch& batch, Completions& done) {
  for (IoOp& op : ops) {
    const QueuedOp queued{&op, &batch, op.length(), 0, 0};
    try {
      Push(queued);
    } catch (const std::bad_alloc&) {
      done.Add(queued, -ENOMEM);
    }
  }
}

bool IoQueue::Fits(const Load& load, const QueuedOp& next, const IoLimits& limits) {
  return load.ops == 0 || (load.ops < limits.max_inflight_ops &&
                           load.bytes + next.bytes <= limits.max_inflight_bytes);
}

bool IoQueue::MayGo(size_t priority) const {
  return !IsBackground(priority) ||
         Fits(background_, classes_[priority].waiting.front(), background_limits_);
}

// Returns the class whose turn it is. The turn is kept even if the operation does not fit yet:
// smaller ones passing it could hold up a large one for ever.
std::optional<size_t> IoQueue::Next(std::optional<TimePoint>& held_until) const {
  held_until.reset();
  for (size_t p = kIoPriorities; p-- > 1;) {
    const Class& c = classes_[p];
    if (c.waiting.empty() || !MayGo(p)) continue;
    if (c.passed_over >= kPatience * Cost(c.waiting.front())) return p;
  }
  for (size_t p = 0; p < kIoPriorities; ++p) {
    if (classes_[p].waiting.empty()) continue;
    if (p == kScrub) {
      const TimePoint at = MayScrubAt();
      if (at > IoBatch::Clock::now()) {
        held_until = at;
        return std::nullopt;
      }
    }
    return MayGo(p) ? std::optional(p) : std::nullopt;
  }
  return std::nullopt;
}

IoQueue::TimePoint IoQueue::MayScrubAt() const {
  const TimePoint latest = scrub_waits_since_ + manners_.longest_hold;
  if (step_reads_ > 0 || !classes_[kStepRead].waiting.empty()) return latest;
  if (step_ended_ == TimePoint::min()) return step_ended_;  // no step has read yet
  return std::min(latest, step_ended_ + manners_.quiet);
}

bool IoQueue::Ready() const {
  std::optional<TimePoint> held_until;
  const std::optional<size_t> next = Next(held_until);
  return held_until || (next && Fits(inflight_, classes_[*next].waiting.front(), limits_));
}

std::optional<QueuedOp> IoQueue::Pop(Completions& done) {
  while (true) {
    const std::optional<size_t> next = Next(held_until_);
    if (!next) return std::nullopt;
    Class& c = classes_[*next];
    const QueuedOp queued = c.waiting.front();
    if (!Fits(inflight_, queued, limits_)) return std::nullopt;
    c.waiting.pop_front();
    const IoBatch::Clock::time_point deadline = queued.batch->deadline();
    if (deadline != deadline.max() && deadline <= IoBatch::Clock::now()) {
      done.Add(queued, -ETIMEDOUT);
      continue;
    }
    c.passed_over = 0;
    for (size_t p = *next + 1; p < kIoPriorities; ++p) classes_[p].passed_over += Cost(queued);
    ++inflight_.ops;
    inflight_.bytes += queued.bytes;
    if (*next == kStepRead) ++step_reads_;
    if (*next == kScrub) scrub_waits_since_ = IoBatch::Clock::now();
    if (IsBackground(*next)) {
      ++background_.ops;
      background_.bytes += queued.bytes;
    }
    return queued;
  }
}

bool IoQueue::Done(QueuedOp& queued, int64_t result, Completions& done) {
  PREFIXD_CHECK(inflight_.ops > 0 && inflight_.bytes >= queued.bytes, inflight_.ops,
                inflight_.bytes, queued.bytes);
  --inflight_.ops;
  inflight_.bytes -= queued.bytes;
  if (IsBackground(static_cast<size_t>(queued.op->priority))) {
    --background_.ops;
    background_.bytes -= queued.bytes;
  }
  if (queued.op->priority == IoPriority::kStepRead) {
    --step_reads_;
    step_ended_ = IoBatch::Clock::now();
  }
  // A cancellation may come late and hit the operation that took its target's slot.
  const bool interrupted = result == -EINTR || result == -EAGAIN || result == -ECANCELED;
  if (queued.cancel_error != 0 && interrupted) {
    result = -queued.cancel_error;
  } else if (interrupted && queued.attempts < kMaxRetries) {
    ++queued.attempts;
    try {
      Push(queued);
      return false;
    } catch (const std::bad_alloc&) {
      result = -ENOMEM;
    }
  }
  done.Add(queued, result);
  return true;
}

void IoQueue::Cancel(const IoBatch* batch, int error, Completions& done) {
  for (Class& c : classes_) {
    std::erase_if(c.waiting, [&](const QueuedOp& queued) {
      if (batch != nullptr && queued.batch != batch) return false;
      done.Add(queued, -error);
      return true;
    });
  }
}

}  // namespace prefixd::storage
