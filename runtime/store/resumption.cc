#include "runtime/store/resumption.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <set>
#include <thread>
#include <utility>

#include "base/call_scope.h"
#include "base/capture_errors.h"
#include "runtime/ingest/ingest.h"
#include "runtime/store/core.h"
#include "storage/io/together.h"

namespace prefixd {

using storage::SegmentId;

namespace {

constexpr size_t kSegmentsAtOnce = 256;

}  // namespace

Resumption::Resumption(Core& core)
    : core_(core),
      left_(core.storage->stats().segments),
      worker_(WorkPriority::kBackground, [this]() -> Worker::Next {
        if (std::exchange(begun_, true)) return {};
        return {[this](const std::stop_token& stop) { LookAtAll(stop); }};
      }) {}

std::vector<SegmentId> Resumption::Segments(const std::string* only_model) const {
  std::set<std::pair<size_t, SegmentId>> by_depth;
  for (const storage::PrefixInfo& info : core_.storage->ListPrefixes()) {
    if (only_model && info.model != *only_model) continue;
    for (size_t depth = 0; depth < info.chain.size(); ++depth) {
      by_depth.emplace(depth, info.chain[depth]);
    }
  }
  std::vector<SegmentId> segments;
  segments.reserve(by_depth.size());
  for (const auto& [depth, id] : by_depth) segments.push_back(id);
  return segments;
}

void Resumption::Look(std::span<const SegmentId> segments) {
  while (!segments.empty()) {
    const auto some = segments.first(std::min(segments.size(), kSegmentsAtOnce));
    segments = segments.subspan(some.size());
    std::list<std::vector<SegmentId>> look(1);
    std::vector<SegmentId>& ids = look.front();
    ids.reserve(some.size());
    {
      std::lock_guard lock(worker_.mutex());
      std::ranges::copy_if(some, std::back_inserter(ids),
                           [&](const SegmentId& id) { return !removed_.contains(id); });
      looked_at_.splice(looked_at_.begin(), look);
    }
    // What there was no memory for is looked at when somebody asks for it.
    static_cast<void>(CaptureErrors([&]() -> Status {
      LookAtSome(ids);
      return {};
    }));
    std::lock_guard lock(worker_.mutex());
    looked_at_.remove_if([&](const std::vector<SegmentId>& other) { return &other == &ids; });
    worker_.changed().notify_all();
  }
}

Status Resumption::Undisturbed(const SegmentId& segment, const std::function<Status()>& remove) {
  std::unique_lock lock(worker_.mutex());
  const auto mark = removed_.insert(segment);
  const auto looked_at = [&] {
    return std::ranges::any_of(looked_at_, [&](const std::vector<SegmentId>& ids) {
      return std::ranges::find(ids, segment) != ids.end();
    });
  };
  Status status;
  while (status.ok() && looked_at()) {
    status = CheckCall();
    if (status.ok()) worker_.changed().wait_for(lock, std::chrono::milliseconds(20));
  }
  lock.unlock();
  if (status.ok()) status = CaptureErrors(remove);
  lock.lock();
  removed_.erase(mark);
  return status;
}

void Resumption::LookAtSome(std::span<const SegmentId> segments) {
  enum : uint8_t { kNot, kIncomplete, kComplete };
  // What is not known to be complete is queued.
  std::vector<uint8_t> found(segments.size(), kNot);
  static_cast<void>(
      storage::Together(segments.size(), storage::kReadsAtOnce, [&](size_t i) -> Status {
        const auto info = core_.storage->GetPrefix(segments[i]);
        if (!info.ok() || info->quarantined) return {};
        const auto model = core_.models.Find(info->model);
        found[i] =
            model.ok() && IngestComplete(core_.derived, **model, *info) ? kComplete : kIncomplete;
        return {};
      }));
  for (size_t i = 0; i < segments.size(); ++i) {
    if (found[i] == kIncomplete && core_.Derives(segments[i])) core_.ingest->Enqueue(segments[i]);
    if (found[i] != kComplete) continue;
    core_.ingest->MarkReady(segments[i]);
    if (core_.options.recluster) core_.rewrites->Enqueue(segments[i]);
  }
}

void Resumption::LookAt(std::span<const SegmentId> segments) {
  {
    std::lock_guard lock(worker_.mutex());
    if (done_) return;
  }
  std::vector<SegmentId> unknown;
  std::ranges::copy_if(segments, std::back_inserter(unknown),
                       [&](const SegmentId& id) { return !core_.ingest->Knows(id); });
  Look(unknown);
}

void Resumption::LookAgain(const std::string& model) {
  const std::vector<SegmentId> segments = Segments(&model);
  std::span<const SegmentId> left = segments;
  while (!left.empty() && CheckCall().ok() && !worker_.stopping()) {
    const auto some = left.first(std::min(left.size(), kSegmentsAtOnce));
    Look(some);
    left = left.subspan(some.size());
  }
  // The caller waits no longer: whoever makes derived data finds out what is there.
  for (const SegmentId& id : left) {
    if (core_.Derives(id)) core_.ingest->Enqueue(id);
  }
}

void Resumption::LookAtAll(const std::stop_token& stop) {
  std::vector<SegmentId> segments;
  const auto list = [&]() -> Status {
    segments = Segments(nullptr);
    return {};
  };
  while (!CaptureErrors(list).ok() && !stop.stop_requested()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // memory is short for a while
  }
  for (size_t begin = 0; begin < segments.size() && !stop.stop_requested();) {
    const auto some = std::span(segments).subspan(begin).first(
        std::min(segments.size() - begin, kSegmentsAtOnce));
    static_cast<void>(CaptureErrors([&]() -> Status {
      std::vector<SegmentId> next;
      std::ranges::copy_if(some, std::back_inserter(next),
                           [&](const SegmentId& id) { return !core_.ingest->Knows(id); });
      Look(next);
      return {};
    }));
    begin += some.size();
    std::lock_guard lock(worker_.mutex());
    left_ = segments.size() - begin;
  }
  std::lock_guard lock(worker_.mutex());
  left_ = 0;
  done_ = true;
}

uint64_t Resumption::left() const {
  std::lock_guard lock(worker_.mutex());
  return left_;
}

Status Resumption::Wait(const ProgressFn& progress) {
  std::unique_lock lock(worker_.mutex());
  while (!done_) {
    PREFIXD_TRY(CheckCall());
    if (worker_.stopping()) return Error{Code::kCancelled, "the store is closing"};
    if (progress) {
      const uint64_t left = left_;
      lock.unlock();
      const bool go_on = progress(0, left, "segments");
      lock.lock();
      if (!go_on) return Error{Code::kCancelled, "waiting was stopped by the caller"};
    }
    worker_.changed().wait_for(lock, std::chrono::milliseconds(20));
  }
  return {};
}

}  // namespace prefixd
