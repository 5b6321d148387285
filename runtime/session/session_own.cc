// Appends own tokens to a session, attends over them, and shares them with forks.
#include <algorithm>
#include <chrono>
#include <map>
#include <utility>
#include <vector>

#include "base/session_arguments.h"
#include "prefixd/store.h"
#include "runtime/session/session_impl.h"
#include "runtime/session/step_batch.h"

namespace prefixd {

Status SessionImpl::AttendExact(uint32_t layer, HeadRange heads, uint32_t n, uint32_t own_after,
                                std::span<const float> q, std::span<float> y,
                                std::span<float> lse) {
  const CallScope scope(Limits());
  PREFIXD_TRY(plan());
  PREFIXD_ASSIGN(heads, CheckQueries(info_.geometry, layer, heads, n, q, y, lse));
  if (n == 0) return {};
  PREFIXD_TRY(services_->opened.Check());
  const LayerShape shape = info_.geometry.layer(layer);
  const size_t group = shape.group_size();
  Plan plan;
  std::vector<OwnRows> own(heads.n);
  {
    std::lock_guard lock(mutex_);
    if (detached_) return SessionDetached(info_.id);
    plan = plan_;
    for (uint32_t h = 0; h < heads.n; ++h) own[h] = own_.rows(HeadOf(layer, heads.first + h));
  }
  for (uint32_t h = 0; h < heads.n; ++h) {
    PREFIXD_TRY(CheckOwnBlock(layer, heads.first + h, own[h].size(), n, own_after));
  }
  const auto of_token = [&](size_t t, size_t h) { return (t * heads.n + h) * group; };
  // Each KV head's queries of all tokens lie side by side, and its outputs likewise.
  const size_t n_q = n * group * shape.key_dim, n_y = n * group * shape.value_dim;
  const uint64_t floats = heads.n * (n_q + n_y + n * group);
  PREFIXD_ASSIGN(const MemoryCharge memory,
                 plan->prefix->account().Take(MemoryKind::kScratch, floats * sizeof(float)));
  std::vector<float> all_q(heads.n * n_q), all_y(heads.n * n_y), all_lse(heads.n * n * group);
  StepQueue::Call call;
  call.tenant = info_.tenant;
  call.tasks.resize(heads.n);
  std::map<uint32_t, Plan> plans;
  std::vector<uint32_t> seen(heads.n);  // own tokens that the first queries see; 0: none are asked
  for (size_t h = 0; h < heads.n; ++h) {
    const auto head_q = std::span(all_q).subspan(h * n_q, n_q);
    for (size_t t = 0; t < n; ++t) {
      std::ranges::copy(q.subspan(of_token(t, h) * shape.key_dim, group * shape.key_dim),
                        head_q.begin() + static_cast<ptrdiff_t>(t * group * shape.key_dim));
    }
    GroupTask& task = call.tasks[h];
    task.plan = plan;
    task.head = HeadOf(layer, heads.first) + h;
    task.n_queries = static_cast<uint32_t>(n * group);
    task.q = head_q;
    task.y = std::span(all_y).subspan(h * n_y, n_y);
    task.lse = std::span(all_lse).subspan(h * n * group, n * group);
    task.own = std::move(own[h]);
    task.own_after = own_after;
    task.limits = *CarriedScope::Current();
    if (task.own.size() == 0) continue;
    seen[h] = task.own.size() - own_after - n + 1;
    const uint32_t block = task.own.size() - own_after - n;
    if (block < plan->moved) PREFIXD_TRY(TakeBack(block, task, plans));
  }
  services_->steps.Run(call);
  Status status;
  for (size_t h = 0; h < heads.n; ++h) {
    GroupTask& task = call.tasks[h];
    const bool of_own = task.status.ok() && seen[h] > 0;
    for (size_t t = n - std::min(n, kObservedQueries); of_own && t < n; ++t) {
      const size_t each = group * shape.key_dim;
      NoteQueries(*plan, task.head, seen[h] + static_cast<uint32_t>(t),
                  task.q.subspan(t * each, each));
    }
    Charge(task.head, task.ledger);
    if (!task.status.ok() && status.ok()) status = std::move(task.status);
    for (size_t t = 0; t < n && status.ok(); ++t) {
      std::ranges::copy(task.y.subspan(t * group * shape.value_dim, group * shape.value_dim),
                        y.begin() + static_cast<ptrdiff_t>(of_token(t, h) * shape.value_dim));
      std::ranges::copy(task.lse.subspan(t * group, group),
                        lse.begin() + static_cast<ptrdiff_t>(of_token(t, h)));
    }
  }
  return status;
}

Status SessionImpl::TakeBack(uint32_t first, GroupTask& task, std::map<uint32_t, Plan>& plans) {
  const Plan whole = task.plan;
  Plan& cut = plans[first];
  if (!cut) {
    PREFIXD_ASSIGN(auto prefix, CutBehind(*whole, first));
    PREFIXD_ASSIGN(cut,
                   PlanWith(*whole, std::move(prefix), {.mode = StepMode::kFull}, first, nullptr));
  }
  const uint32_t chunk = first / OwnChunk::kRows * OwnChunk::kRows;
  PREFIXD_ASSIGN(task.own,
                 own_.Restored(task.head, chunk, whole->moved, task.own, MovedReader(*whole)));
  task.plan = cut;
  return {};
}

Status SessionImpl::Append(uint32_t layer, HeadRange heads, uint32_t n,
                           std::span<const std::byte> k, std::span<const std::byte> v) {
  const CallScope scope(Limits());
  PREFIXD_TRY(plan());
  PREFIXD_ASSIGN(heads, CheckOwnRows(info_.geometry, layer, heads, n, k.size(), v.size()));
  PREFIXD_ASSIGN(OwnTokens::Growth growth, own_.Grow(layer, heads, n, k, v));
  growth.Commit();
  NoteGrown(HeadOf(layer, heads.first));
  return {};
}

Status SessionImpl::StepAppend(uint32_t layer, HeadRange heads, std::span<const float> q,
                               std::span<const std::byte> k, std::span<const std::byte> v,
                               std::span<float> y, std::span<float> lse, StepInfo* info) {
  StepRequest request{this, layer, q, y, lse, info, {}, heads, true, k, v};
  StepBatch(*services_, {&request, 1});
  return std::move(request.status);
}

Status SessionImpl::Truncate(uint32_t n) {
  PREFIXD_TRY(services_->opened.Check());
  const CallScope scope(Limits());
  {
    std::lock_guard lock(mutex_);
    if (detached_) return SessionDetached(info_.id);
    if (n >= plan_->moved) {
      PREFIXD_TRY(own_.Truncate(n));
      if (seen_) seen_->Truncate(n);
      return {};
    }
  }
  return TruncateMoved(n);
}

// The prefix ends where a chunk of own rows begins, so that those behind are appended to.
Status SessionImpl::TruncateMoved(uint32_t n) {
  while (true) {
    PREFIXD_ASSIGN(const Plan old, plan());
    if (n >= old->moved) return Truncate(n);  // another call has truncated further
    const uint32_t moved = n / OwnChunk::kRows * OwnChunk::kRows;
    PREFIXD_ASSIGN(auto prefix, CutBehind(*old, moved));
    std::vector<storage::ReadStats> reads(old->prefix->heads());
    PREFIXD_ASSIGN(auto cut, PlanWith(*old, std::move(prefix), old->policy, moved, &reads));
    std::vector<OwnRows> rows(heads_.count());
    for (size_t h = 0; h < rows.size(); ++h) {
      PREFIXD_ASSIGN(rows[h],
                     own_.Restored(h, moved, n, OwnRows(OwnChunkRef(), n), MovedReader(*old)));
    }
    const auto truncate = [&]() -> Result<bool> {
      PREFIXD_TRY(own_.Truncate(n, moved, std::move(rows)));
      if (seen_) seen_->Truncate(n);
      return true;
    };
    PREFIXD_ASSIGN(const bool truncated, Adopt(old, std::move(cut), reads, truncate));
    if (truncated) return {};
  }
}

Result<std::shared_ptr<Session>> SessionImpl::Fork() {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(const State now, TakeState());
  PREFIXD_ASSIGN(auto fork, Attach(services_, {.prefix = now.plan->prefix,
                                               .policy = now.plan->policy,
                                               .call_timeout_ms = call_timeout_ms_,
                                               .own_memory_tokens = own_memory_tokens_,
                                               .begun = std::chrono::steady_clock::now(),
                                               .estimate = info_.estimate,
                                               .of = &info_,
                                               .moved = now.plan->moved,
                                               .moved_name = now.plan->moved_name,
                                               .retained = now.plan->retained,
                                               .seen = now.seen.get()}));
  auto& other = static_cast<SessionImpl&>(*fork);
  other.own_.Share(now.own);
  if (other.seen_) other.seen_->Truncate(other.own_.size());  // the branch of `now`, and no more
  // Rows that moved, and that a move has not let go of yet, are not the fork's to keep.
  if (now.plan->moved > 0) static_cast<void>(other.own_.Cut());
  other.NoteGrown(0);
  return fork;
}

}  // namespace prefixd
