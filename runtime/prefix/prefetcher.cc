#include "runtime/prefix/prefetcher.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/capture_errors.h"
#include "runtime/prefix/prepared_prefix.h"
#include "storage/segment/segment_format.h"

namespace prefixd {

std::vector<uint32_t> NeighboursAt(std::span<const uint32_t> ids, uint32_t distance,
                                   const StepPolicy::Prefetch& reach, TokenRange within) {
  std::vector<uint32_t> all;
  const auto add = [&](uint64_t id) {
    if (id >= within.begin && id < within.end) all.push_back(static_cast<uint32_t>(id));
  };
  for (const uint32_t id : ids) {
    if (distance <= reach.back && id >= distance) add(id - distance);
    if (distance <= reach.forward) add(uint64_t{id} + distance);
  }
  std::ranges::sort(all);
  all.erase(std::unique(all.begin(), all.end()), all.end());
  std::vector<uint32_t> out;
  std::ranges::set_difference(all, ids, std::back_inserter(out));
  return out;
}

Result<uint64_t> PrefetchBytes(uint64_t heads, const StepPolicy::Prefetch& prefetch,
                               uint64_t tier_bytes) {
  constexpr uint64_t kTierParts = 10, kMib = 1 << 20;
  if (heads == 0) return uint64_t{0};
  const uint64_t least = heads * storage::kPageBytes;
  const std::string too_little = " is less than a page of " + std::to_string(storage::kPageBytes) +
                                 " bytes for each of " + std::to_string(heads) +
                                 " heads; rows are prefetched with ";
  if (tier_bytes / kTierParts < least) {
    return Error{Code::kFailedPrecondition,
                 "a tenth of the host tier of " + std::to_string(tier_bytes) + " bytes" +
                     too_little + "store.host_tier_mib of " +
                     std::to_string((least * kTierParts + kMib - 1) / kMib) +
                     " or more; give it so much, or use no prefetch"};
  }
  const uint64_t most = uint64_t{prefetch.max_mib} * kMib;
  if (most < least) {
    return InvalidArgument("prefetch.max_mib " + std::to_string(prefetch.max_mib) + too_little +
                           std::to_string((least + kMib - 1) / kMib) + " or more");
  }
  return std::min(most, tier_bytes / kTierParts) / heads;
}

// The thread has the usual priority, though its work can wait: it holds locks that steps want, and
// mostly waits for the disk.
Prefetcher::Prefetcher() : worker_(WorkPriority::kStep, [this] { return Take(); }) {}

void Prefetcher::Stop() {
  {
    std::lock_guard lock(worker_.mutex());
    closed_ = stop_ = true;
  }
  worker_.Stop();
}

uint64_t Prefetcher::queued() const {
  std::lock_guard lock(worker_.mutex());
  uint64_t heads = running_.session ? 1 : 0;
  for (const SessionPrefetch* session : sessions_) heads += session->wishes_.size();
  return heads;
}

Worker::Next Prefetcher::Take() {
  if (sessions_.empty()) return {};
  SessionPrefetch* const session = sessions_.front();
  const size_t head = session->wishes_.front().head;
  auto wish = std::make_shared<std::list<SessionPrefetch::Wish>>();
  Worker::Next next{[this, session, wish](const std::stop_token&) {
    const SessionPrefetch::Wish& now = wish->front();
    // The step that needs an unreadable row meets the error itself.
    static_cast<void>(CaptureErrors([&] { return session->Read(now.head, now.ids, stop_); }));
    std::lock_guard lock(worker_.mutex());
    running_ = {};
  }};
  // Nothing below allocates: what counts as running does run.
  wish->splice(wish->end(), session->wishes_, session->wishes_.begin());
  if (session->wishes_.empty()) {
    sessions_.pop_front();
  } else {
    sessions_.splice(sessions_.end(), sessions_, sessions_.begin());
  }
  running_ = {session, head};
  stop_ = closed_;
  return next;
}

SessionPrefetch::SessionPrefetch(Prefetcher& rows, PreparedPrefix& prefix, const StepPolicy& policy,
                                 uint64_t head_bytes)
    : rows_(rows),
      prefix_(prefix),
      policy_(policy),
      head_bytes_(head_bytes),
      read_(prefix.heads()),
      given_up_(prefix.heads()) {}

void SessionPrefetch::Withdraw(size_t head) {
  std::erase_if(wishes_, [&](const Wish& wish) { return wish.head == head; });
  if (wishes_.empty()) std::erase(rows_.sessions_, this);
}

uint64_t SessionPrefetch::Begin(size_t head) {
  std::lock_guard lock(rows_.worker_.mutex());
  Withdraw(head);
  if (rows_.running_.session == this && rows_.running_.head == head) rows_.stop_ = true;
  return TakeUncharged(head);
}

void SessionPrefetch::Want(size_t head, std::vector<uint32_t> ids) {
  if (ids.empty()) return;
  // Lack of memory must not fail a step, so it is ignored here; nothing is allocated under the
  // lock.
  static_cast<void>(CaptureErrors([&]() -> Status {
    const size_t row_bytes = prefix_.row(head).value_bytes();
    const size_t n = ids.size(), most = std::max<size_t>(1, head_bytes_ / row_bytes);
    if (n > most) {
      for (size_t i = 0; i < most; ++i) ids[i] = ids[i * n / most];
      ids.resize(most);
      ids.shrink_to_fit();
    }
    std::list<SessionPrefetch*> session(1, this);
    std::list<Wish> wish;
    wish.push_back({head, std::move(ids)});
    std::lock_guard lock(rows_.worker_.mutex());
    if (ended_ || rows_.closed_) return {};
    Withdraw(head);
    if (wishes_.empty()) rows_.sessions_.splice(rows_.sessions_.end(), session);
    wishes_.splice(wishes_.end(), wish);
    rows_.worker_.changed().notify_all();
    return {};
  }));
}

void SessionPrefetch::End() {
  std::unique_lock lock(rows_.worker_.mutex());
  ended_ = true;
  wishes_.clear();
  std::erase(rows_.sessions_, this);
  if (rows_.running_.session != this) return;
  rows_.stop_ = true;
  rows_.worker_.changed().wait(lock, [&] { return rows_.running_.session != this; });
}

Status SessionPrefetch::Read(size_t head, std::span<const uint32_t> ids,
                             const std::atomic<bool>& stop) {
  // Steps read whole rows until the keys are in memory, and the load of the keys waits in the same
  // queue for the disk.
  if (given_up_[head] || prefix_.loads_keys(head)) return {};
  const StepPolicy::Prefetch& prefetch = policy_.prefetch;
  const uint32_t layer = prefix_.layer_of(head);
  const TokenRange within = prefix_.partition().mid;
  // Steps read values alone where the keys are in memory.
  const auto part = prefix_.holds_keys(head) ? storage::RowPart::kValue : storage::RowPart::kRow;
  uint64_t left = head_bytes_;
  const uint32_t reach = std::max(prefetch.forward, prefetch.back);
  for (uint32_t distance = 1; distance <= reach && left >= storage::kPageBytes; ++distance) {
    if (stop) break;
    storage::ReadStats reads;
    const auto near = NeighboursAt(ids, distance, prefetch, within);
    const Status read =
        prefix_.stored().Prefetch(layer, prefix_.kv_head_of(head), near, part, left, stop, &reads);
    const uint64_t bytes = reads.bytes[static_cast<size_t>(Tier::kSsd)];
    read_[head] += bytes;
    left -= std::min(left, bytes);
    if (read.ok()) continue;
    const Code code = read.error().code;
    given_up_[head] = code == Code::kCorrupt || code == Code::kIo;
    return read;
  }
  return {};
}

}  // namespace prefixd
