// Moves own tokens of a session to the store while its steps go on.
//
// The oldest tokens become a segment behind the prefix, and the session goes on over the longer
// prefix: one plan takes the place of another, and the rows go from memory. The new plan is made
// and what its steps need is loaded before; what a step waits for is the exchange of two pointers.
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "base/capture_errors.h"
#include "base/check.h"
#include "prefixd/store.h"
#include "runtime/ingest/put_stream.h"
#include "runtime/prefix/head_keys.h"
#include "runtime/session/own_mover.h"
#include "runtime/session/session_impl.h"
#include "runtime/session/standstill.h"
#include "storage/store/prefix_store.h"

namespace prefixd {
namespace {

using std::chrono::steady_clock;

// After a failure the next attempt waits so long, and longer after each further one: it writes all
// of its rows again.
constexpr std::chrono::seconds kMoveAgain{1}, kMoveAgainAtMost{60};
// What was moved is given up when making it ready to be searched stands still for so long: other
// sessions wait. How long all of it takes depends on how much was moved.
constexpr std::chrono::seconds kStandsStill{30};
// Heads that grow now are cut after so long, and other sessions do not wait for it for ever.
constexpr std::chrono::milliseconds kCutAgain{1};
constexpr int kCutTries = 1000;
// The ids of moved tokens: no vocabulary has them, and no two of a store are equal.
constexpr uint32_t kLiveIds = 3u << 30;

int64_t Nanoseconds(steady_clock::time_point at) {
  return std::chrono::nanoseconds(at.time_since_epoch()).count();
}

Error Stopped() { return {Code::kCancelled, "the store closes"}; }

// Where the segment of own tokens up to `to` begins. If it `joins`, it takes the place of those
// before it that are no larger, so that each token is written a logarithmic number of times, and
// the chain has as many segments.
uint32_t SegmentBegin(const SessionPlan& plan, uint32_t n_tokens, uint32_t to, bool joins) {
  uint32_t from = plan.moved;
  if (!joins) return from;
  const auto parts = plan.prefix->parts();
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
    if (part->used.begin < n_tokens || part->used.size() > to - from) break;
    from = part->used.begin - n_tokens;
  }
  return from;
}

}  // namespace

void SessionImpl::NoteGrown(size_t head) {
  if (own_memory_tokens_ == 0 || moving_.load(std::memory_order_relaxed)) return;
  if (!own_.Exceeds(head, own_memory_tokens_)) return;
  if (Nanoseconds(steady_clock::now()) < move_after_ns_) return;
  if (moving_.exchange(true)) return;
  const Status queued = CaptureErrors([&]() -> Status {
    services_->mover->Want(weak_from_this());
    return {};
  });
  if (!queued.ok()) moving_ = false;
}

void SessionImpl::NoteMoved(bool moved) {
  if (moved) {
    failed_moves_ = 0;
  } else {
    const int doublings = std::min(failed_moves_++, 6);
    const auto pause =
        std::min<std::chrono::seconds>(kMoveAgain * (1 << doublings), kMoveAgainAtMost);
    move_after_ns_ = Nanoseconds(steady_clock::now() + pause);
  }
  moving_ = false;
  NoteGrown(0);  // what came meanwhile
}

Result<std::shared_ptr<PreparedPrefix>> SessionImpl::CutBehind(const SessionPlan& plan,
                                                               uint32_t moved) {
  const uint32_t n = info_.n_tokens + moved;
  const auto ends = [n](const SegmentPart& part) { return n <= part.used.end; };
  const auto parts = plan.prefix->parts();
  const auto part = std::ranges::find_if(parts, ends);
  PREFIXD_CHECK(part != parts.end());
  return services_->store.prepare(plan.prefix->model(), part->id, n);
}

Status SessionImpl::ReadMoved(const SessionPlan& plan, size_t head, TokenRange tokens,
                              std::span<std::byte> out) {
  const TokenRange at{info_.n_tokens + tokens.begin, info_.n_tokens + tokens.end};
  storage::ReadStats reads;
  const Status read =
      plan.prefix->stored().ReadRange(heads_.layer_of(head), heads_.head_of(head), at, out, &reads);
  ChargeRows(head, reads, 0, read.ok() ? out.size() : 0);
  return read;
}

OwnTokens::ReadForgotten SessionImpl::MovedReader(const SessionPlan& plan) {
  return [this, &plan](size_t head, TokenRange tokens, std::span<std::byte> out) {
    return ReadMoved(plan, head, tokens, out);
  };
}

Result<storage::SegmentId> SessionImpl::StoreMoved(const State& state, TokenRange own) {
  const storage::StoredPrefix& prefix = state.plan->prefix->stored();
  const size_t n = size_t{info_.n_tokens} + own.end;
  PREFIXD_ASSIGN(const MemoryCharge ids,
                 state.plan->prefix->account().Take(MemoryKind::kPuts, n * sizeof(uint32_t)));
  PutSpec put;
  put.model = info_.model;
  put.tenant = info_.tenant;
  put.label = "own tokens of a session";
  put.pinned = true;                     // it is removed with its session, and not before
  put.encoding = RowEncoding::kAsGiven;  // exact steps stay exact
  put.lineage = storage::LineageName(prefix.info().lineage);
  put.tokens.reserve(n);
  const auto before = prefix.tokens().first(info_.n_tokens + own.begin);
  put.tokens.assign(before.begin(), before.end());
  while (put.tokens.size() < n) {
    put.tokens.push_back(kLiveIds | (services_->live_ids.fetch_add(1) & ~kLiveIds));
  }
  PREFIXD_ASSIGN(const auto stream, services_->store.begin_live_put(put));
  if (stream->missing().begin > before.size()) {
    return Error{Code::kInternal, "ids of moved tokens came again; others are taken next time"};
  }
  PREFIXD_TRY(WriteMissing(*stream, state, WorkPriority::kBackground));
  PREFIXD_ASSIGN(const PutResult done, stream->Commit());
  return storage::SegmentId::Parse(done.prefix);
}

Status SessionImpl::Bring(const SessionPlan& plan, const PreparedPrefix& last, TokenRange own,
                          std::vector<storage::ReadStats>& reads) {
  constexpr uint32_t kAtOnce = 1024;
  PreparedPrefix& prefix = *plan.prefix;
  std::vector<std::byte> rows;
  for (size_t head = 0; head < prefix.heads(); ++head) {
    const uint32_t layer = prefix.layer_of(head);
    if (info_.geometry.layers[layer].sliding_window > 0) continue;
    if (plan.policy.mode == StepMode::kRetrieve) {
      PREFIXD_TRY(prefix.Extend(last, head, plan.selector, &reads[head]));
      const HeadPlan& of = plan.heads[head];
      if (of.estimator.kind == EstimatorKind::kPhi) {
        PREFIXD_TRY(prefix.Features(head, &reads[head]));
      }
      if (of.summary && of.summary->clusters) {
        PREFIXD_ASSIGN(HeadKeys keys, HeadKeys::Of(prefix, head, Bring::kLater, &reads[head]));
        PREFIXD_TRY(of.summary->clusters->OfMid(head, keys));
      }
    }
    PREFIXD_TRY(prefix.Anchors(head, &reads[head]));
    // Into the host tier, where it has room.
    for (uint32_t at = info_.n_tokens + own.begin; at < info_.n_tokens + own.end;) {
      const uint32_t end = std::min(at + kAtOnce, info_.n_tokens + own.end);
      rows.resize((end - at) * prefix.row(head).bytes());
      PREFIXD_TRY(
          prefix.stored().ReadRange(layer, prefix.kv_head_of(head), {at, end}, rows, &reads[head]));
      at = end;
    }
  }
  return {};
}

Status SessionImpl::MoveOwn(const std::stop_token& stop) {
  PREFIXD_ASSIGN(State state, TakeState());
  const uint32_t moved = state.plan->moved;
  const uint32_t whole = state.own.heads[state.own.shortest()].size();
  if (whole <= moved + uint64_t{own_memory_tokens_}) return {};
  const uint32_t to =
      (whole - own_memory_tokens_ / 2) / OwnChunk::kRows * OwnChunk::kRows;  // above `moved`
  // After a failure with as little as possible: a larger segment would rather fail again.
  const bool joins = failed_moves_ == 0;
  std::shared_ptr<const RetainedTokens> retained;
  // While all of its rows are here. Memory that was too short for the last move is left to this
  // one.
  if (joins) {
    PREFIXD_ASSIGN(retained, Retain(state, to, stop));
  }
  const TokenRange segment{SegmentBegin(*state.plan, info_.n_tokens, to, joins), to};
  PREFIXD_ASSIGN(const storage::SegmentId id, StoreMoved(state, segment));
  const auto name = std::make_shared<const MovedName>(*services_->mover, id);
  const OwnTokens::LeastTruncated least_truncated = state.own.least_truncated;
  state.own = {};  // what is truncated or detached meanwhile is freed
  Standstill standstill(kStandsStill);
  bool late = false;
  const auto told = [&](uint64_t done, uint64_t, std::string_view) {
    late = standstill.Note(done);
    return !late && !stop.stop_requested() && plan().ok();
  };
  const Status ready = services_->store.wait_ready(id, told);
  if (late && !ready.ok()) {
    return Error{Code::kUnavailable, "making what was moved ready to be searched stood still for " +
                                         std::to_string(kStandsStill.count()) + " s"};
  }
  PREFIXD_TRY(ready);
  PREFIXD_ASSIGN(const auto prefix,
                 services_->store.prepare(state.plan->prefix->model(), id, info_.n_tokens + to));
  Plan last = std::move(state.plan);
  while (true) {
    if (stop.stop_requested()) return Stopped();
    PREFIXD_ASSIGN(Plan now, plan());
    if (now->prefix != last->prefix) return {};  // truncated: there is less to move
    last = std::move(now);
    std::vector<storage::ReadStats> reads(prefix->heads());
    PREFIXD_ASSIGN(auto plan,
                   PlanWith(*last, prefix, last->policy, to, &reads, WorkPriority::kBackground));
    plan->moved_name = name;
    plan->retained = Retains(plan->policy) ? retained : nullptr;
    PREFIXD_TRY(Bring(*plan, *last->prefix, segment, reads));
    bool truncated = false;
    const auto forget = [&]() -> Result<bool> {
      truncated = !own_.Forget(to, least_truncated);
      if (truncated) return false;
      // Whoever sees the move in a report of the session finds it in the store's figures.
      ++services_->mover->counters().moves;
      services_->mover->counters().tokens += to - moved;
      return true;
    };
    PREFIXD_ASSIGN(const bool adopted, Adopt(last, std::move(plan), reads, forget));
    if (truncated) return {};
    if (adopted) break;  // else there is another policy
  }
  // A head that grows all that time is cut after the next move. Steps that began with the last plan
  // end before it does, or they would free what it alone has.
  for (int i = 0; i < kCutTries && !stop.stop_requested(); ++i) {
    PREFIXD_ASSIGN(const bool cut, own_.Cut());
    if (cut && last.use_count() == 1) break;
    std::this_thread::sleep_for(kCutAgain);
  }
  return {};
}

}  // namespace prefixd
