#include "runtime/rows_ahead.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "runtime/caught.h"
#include "runtime/prepared_prefix.h"
#include "runtime/shared_sets.h"
#include "runtime/thread_pool.h"

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

RowsAhead::RowsAhead() {
  thread_ = std::thread([this] {
    YieldToOthers();
    Loop();
  });
}

void RowsAhead::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = stop_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

uint64_t RowsAhead::queued() const {
  std::lock_guard lock(mutex_);
  uint64_t heads = running_.session ? 1 : 0;
  for (const SessionAhead* session : sessions_) heads += session->wishes_.size();
  return heads;
}

void RowsAhead::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !sessions_.empty(); });
    if (stopping_) return;
    SessionAhead* const session = sessions_.front();
    sessions_.pop_front();
    const SessionAhead::Wish now = std::move(session->wishes_.front());
    session->wishes_.pop_front();
    if (!session->wishes_.empty()) sessions_.push_back(session);
    running_ = {session, now.head};
    stop_ = false;
    lock.unlock();
    // The step that needs what could not be read meets the reason itself.
    static_cast<void>(Caught([&] { return session->Read(now.head, now.ids, stop_); }));
    lock.lock();
    running_ = {};
    changed_.notify_all();
  }
}

SessionAhead::SessionAhead(RowsAhead& rows, PreparedPrefix& prefix, const StepPolicy& policy,
                           uint64_t tier_bytes)
    : rows_(rows),
      prefix_(prefix),
      policy_(policy),
      head_bytes_(std::min(uint64_t{policy.prefetch.max_mib} << 20, tier_bytes / 10) /
                  prefix.heads()),
      read_(prefix.heads()) {}

void SessionAhead::Withdraw(size_t head) {
  std::erase_if(wishes_, [&](const Wish& wish) { return wish.head == head; });
  if (wishes_.empty()) std::erase(rows_.sessions_, this);
}

uint64_t SessionAhead::Begin(size_t head) {
  std::lock_guard lock(rows_.mutex_);
  Withdraw(head);
  if (rows_.running_.session == this && rows_.running_.head == head) rows_.stop_ = true;
  return TakeUncharged(head);
}

void SessionAhead::Want(size_t head, std::vector<uint32_t> ids) {
  if (ids.empty()) return;
  std::lock_guard lock(rows_.mutex_);
  if (ended_ || rows_.stopping_) return;
  Withdraw(head);
  if (wishes_.empty()) rows_.sessions_.push_back(this);
  wishes_.push_back({head, std::move(ids)});
  rows_.changed_.notify_all();
}

void SessionAhead::End() {
  std::unique_lock lock(rows_.mutex_);
  ended_ = true;
  wishes_.clear();
  std::erase(rows_.sessions_, this);
  if (rows_.running_.session != this) return;
  rows_.stop_ = true;
  rows_.changed_.wait(lock, [&] { return rows_.running_.session != this; });
}

Status SessionAhead::Read(size_t head, std::span<const uint32_t> ids,
                          const std::atomic<bool>& stop) {
  const KvGeometry& geometry = prefix_.model()->spec.geometry;
  const StepPolicy::Prefetch& prefetch = policy_.prefetch;
  const uint32_t layer = prefix_.layer_of(head);
  const TokenRange within =
      VisibleMid(policy_.window, layer, geometry.n_layers, prefix_.partition());
  // Steps read values alone where the keys are in memory.
  const auto part = prefix_.holds_keys(head) ? storage::RowPart::kValue : storage::RowPart::kRow;
  uint64_t left = head_bytes_;
  const uint32_t reach = std::max(prefetch.forward, prefetch.back);
  for (uint32_t distance = 1; distance <= reach && left > 0; ++distance) {
    storage::ReadStats reads;
    const auto near = NeighboursAt(ids, distance, prefetch, within);
    const Status read =
        prefix_.stored().ReadAhead(layer, prefix_.kv_head_of(head), near, part, left, stop, &reads);
    const uint64_t bytes = reads.bytes[static_cast<size_t>(Tier::kSsd)];
    read_[head] += bytes;
    left -= std::min(left, bytes);
    PREFIXD_TRY(read);
  }
  return {};
}

}  // namespace prefixd
