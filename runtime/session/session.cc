#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/capture_errors.h"
#include "base/check.h"
#include "base/session_arguments.h"
#include "prefixd/store.h"
#include "runtime/session/session_impl.h"
#include "runtime/session/step_batch.h"
#include "runtime/step/charges.h"
#include "runtime/step/step.h"
#include "runtime/summaries/head_choice.h"
#include "storage/segment/stored_part.h"

namespace prefixd {

SessionImpl::SessionImpl(std::shared_ptr<SessionServices> services, SessionInfo info,
                         MemoryAccount account)
    : services_(std::move(services)),
      info_(std::move(info)),
      heads_(info_.geometry.heads()),
      own_(info_.geometry, std::move(account)) {}

SessionImpl::~SessionImpl() { Leave(); }

void SessionImpl::Leave() {
  if (!counted_.exchange(false)) return;
  const uint64_t before = services_->open.fetch_sub(1);
  PREFIXD_CHECK(before > 0);
}

Result<std::shared_ptr<Session>> SessionImpl::Attach(std::shared_ptr<SessionServices> services,
                                                     const SessionStart& start) {
  const std::shared_ptr<PreparedPrefix>& prefix = start.prefix;
  const Model& model = *prefix->model();
  const storage::PrefixInfo& stored = prefix->stored().info();
  SessionInfo info;
  if (start.of != nullptr) {
    info = *start.of;
  } else {
    info.model = model.spec.name;
    info.tenant = stored.tenant;
    info.prefix = stored.id.ToString();
    info.n_tokens = prefix->n_tokens();
    info.exact_tokens = std::min(stored.exact_tokens, info.n_tokens);
    info.geometry = model.spec.geometry;
    info.compressed = prefix->compressed();
    info.parts.assign(prefix->stored().parts().begin(), prefix->stored().parts().end());
  }
  info.id = services->attached + 1;
  info.anchors = services->options.anchors;
  info.estimate = start.estimate;
  info.own_memory_tokens = start.own_memory_tokens;
  auto session = std::shared_ptr<SessionImpl>(
      new SessionImpl(std::move(services), std::move(info), prefix->account()),
      [](const SessionImpl* ended) {  // a child of fork() leaves its copy as it is
        if (ended->services_->opened.holds()) delete ended;
      });
  SessionServices& s = *session->services_;
  const uint64_t already = s.open.fetch_add(1);
  session->counted_ = true;
  if (already >= s.options.max_sessions) {
    return Error{Code::kResourceExhausted,
                 "there are " + std::to_string(already) +
                     " sessions already (max_sessions); detach some and try again"};
  }
  session->call_timeout_ms_ = start.call_timeout_ms;
  session->own_memory_tokens_ = start.own_memory_tokens;
  session->memory_ = prefix->account().Charge(MemoryKind::kSessions);
  PREFIXD_TRY(session->TakeMemory(start.policy));
  session->ledgers_.resize(prefix->heads());
  session->charged_.resize(prefix->heads());
  std::vector<storage::ReadStats> reads(prefix->heads());
  PREFIXD_ASSIGN(auto plan, MakePlan(s.options, s.prefetcher, prefix, start.policy, &reads));
  plan->moved = start.moved;
  plan->moved_name = start.moved_name;
  plan->retained = start.retained;
  PREFIXD_TRY(session->BringScorers(*plan));
  session->info_.id = s.attached.fetch_add(1) + 1;
  session->info_.estimator = plan->estimator;
  session->info_.d_phi = prefix->has_phi_caches() ? prefix->maps()->d_phi : 0;
  PREFIXD_TRY(session->Adopt(nullptr, std::move(plan), reads));
  if (session->seen_ && start.seen != nullptr) session->seen_->CopyFrom(*start.seen);
  if (start.policy.mode != StepMode::kFull) s.store.derive(stored.chain);
  session->info_.attach_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start.begun).count();
  return std::shared_ptr<Session>(std::move(session));
}

Status SessionImpl::TakeMemory(const StepPolicy& policy) {
  constexpr uint64_t kNode = 64 + sizeof(EstimatorVariant);  // of a set
  const uint64_t heads = heads_.count();
  return memory_.Resize(
      sizeof(*this) + sizeof(SessionPlan) + charged_count_ * kNode +
      heads * (sizeof(ledgers_[0]) + sizeof(decltype(charged_)::value_type) + sizeof(HeadPlan)) +
      policy.fixed.size() * sizeof(policy.fixed[0]) +
      (Observes(policy) ? SeenQueries::Bytes(info_.geometry) : 0));
}

Result<std::shared_ptr<const SessionPlan>> SessionImpl::plan() const {
  PREFIXD_TRY(services_->opened.Check());  // before a lock that the parent may have held
  std::lock_guard lock(mutex_);
  if (detached_) return SessionDetached(info_.id);
  return plan_;
}

StepPolicy SessionImpl::policy() const {
  std::lock_guard lock(mutex_);
  return plan_ ? plan_->policy : last_policy_;
}

Result<SessionImpl::State> SessionImpl::TakeState() const {
  PREFIXD_TRY(services_->opened.Check());
  Result<State> state = State();
  const Status taken = CaptureErrors([&]() -> Status {
    std::lock_guard lock(mutex_);
    if (detached_) return SessionDetached(info_.id);
    state = State{plan_, own_.Take(), seen_};
    return {};
  });
  if (!taken.ok()) return taken.error();
  return state;
}

Status SessionImpl::SetPolicy(const StepPolicy& policy) {
  const CallScope scope(Limits());
  // Again where own tokens were moved meanwhile, behind which the policy would be another plan's.
  while (true) {
    PREFIXD_ASSIGN(const Plan old, plan());
    {
      std::lock_guard lock(mutex_);
      PREFIXD_TRY(TakeMemory(policy));
    }
    std::vector<storage::ReadStats> reads(old->prefix->heads());
    auto replacement = PlanWith(*old, old->prefix, policy, old->moved, &reads);
    if (replacement.ok()) {
      PREFIXD_ASSIGN(const bool adopted, Adopt(old, *std::move(replacement), reads));
      if (!adopted) continue;
      if (policy.mode != StepMode::kFull) {
        services_->store.derive(old->prefix->stored().info().chain);
      }
      return {};
    }
    std::lock_guard lock(mutex_);
    AddReads(reads);
    static_cast<void>(TakeMemory(plan_ ? plan_->policy : last_policy_));  // no more than before
    return std::move(replacement).error();
  }
}

Result<std::shared_ptr<SessionPlan>> SessionImpl::PlanWith(const SessionPlan& like,
                                                           std::shared_ptr<PreparedPrefix> prefix,
                                                           const StepPolicy& policy, uint32_t moved,
                                                           std::vector<storage::ReadStats>* reads,
                                                           WorkPriority priority) {
  PREFIXD_ASSIGN(auto plan, MakePlan(services_->options, services_->prefetcher, std::move(prefix),
                                     policy, reads, priority));
  plan->moved = moved;
  // A segment of moved tokens may hold a part of the prompt, too.
  if (moved > 0 || plan->prefix->stored().info().live) plan->moved_name = like.moved_name;
  const TokenRange mid = plan->prefix->partition().mid;
  if (Retains(policy) && like.retained && like.retained->Most(mid) > 0) {
    plan->retained = like.retained;
  }
  PREFIXD_TRY(BringScorers(*plan));
  return plan;
}

Result<bool> SessionImpl::Adopt(const Plan& expected, Plan plan,
                                const std::vector<storage::ReadStats>& reads,
                                const std::function<Result<bool>()>& change) {
  // What there may be no memory for is made before anything changes.
  std::vector<std::set<EstimatorVariant>> kept(plan->heads.size());
  for (size_t head = 0; head < kept.size(); ++head) {
    kept[head].insert(plan->heads[head].reads().Kept());
  }
  std::shared_ptr<AdaptiveBudget> adaptive;
  if (plan->policy.adaptive && !plan->heads.empty()) {
    std::vector<uint32_t> k;
    for (const HeadPlan& head : plan->heads) k.push_back(head.k);
    adaptive = std::make_shared<AdaptiveBudget>(std::move(k), plan->prefix->partition().mid.size());
  }
  const bool observes = Observes(plan->policy);
  std::shared_ptr<SeenQueries> seen;  // then what is destroyed after the lock, with the last plan
  if (observes && (!expected || !Observes(expected->policy))) {
    seen = std::make_shared<SeenQueries>(info_.geometry);
  }
  Plan last;
  {
    std::lock_guard lock(mutex_);
    if (detached_) return SessionDetached(info_.id);
    if (plan_ != expected) return false;
    if (change) {
      PREFIXD_ASSIGN(const bool changed, change());
      if (!changed) return false;
    }
    last = std::exchange(plan_, std::move(plan));
    if (!observes || !seen_) seen_.swap(seen);
    adaptive_.swap(adaptive);
    AddReads(reads);
    for (size_t head = 0; head < plan_->heads.size(); ++head) {
      const HeadPlan& of = plan_->heads[head];
      ChargeSummary(head, of.reads(), of.summary.get(), kept[head]);
    }
  }
  if (last) EndPrefetch(*last);
  return true;
}

// Charges the session with prefetched bytes that no step was charged with.
void SessionImpl::EndPrefetch(const SessionPlan& plan) {
  if (!plan.ahead) return;
  plan.ahead->End();
  std::lock_guard lock(mutex_);
  for (size_t head = 0; head < ledgers_.size(); ++head) {
    ledgers_[head].prefetched_bytes += plan.ahead->TakeUncharged(head);
  }
}

std::vector<uint32_t> SessionImpl::TakeTokens(const SessionPlan& plan, uint32_t layer,
                                              HeadRange heads) {
  std::vector<uint32_t> k(heads.n);
  if (plan.heads.empty()) return k;
  std::shared_ptr<AdaptiveBudget> adaptive;
  {
    std::lock_guard lock(mutex_);
    if (plan_.get() == &plan) adaptive = adaptive_;
  }
  const size_t first = HeadOf(layer, heads.first);
  if (adaptive) return adaptive->Take(first, heads.n);
  for (uint32_t h = 0; h < heads.n; ++h) k[h] = plan.heads[first + h].k;
  return k;
}

void SessionImpl::NoteMissing(const SessionPlan& plan, size_t head, uint32_t k,
                              std::span<const float> rho_z) {
  std::shared_ptr<AdaptiveBudget> adaptive;
  {
    std::lock_guard lock(mutex_);
    if (plan_.get() == &plan) adaptive = adaptive_;
  }
  if (!adaptive) return;
  double mean = 0;
  for (float rho : rho_z) mean += rho / double(rho_z.size());
  adaptive->Note(head, mean, k);
}

void SessionImpl::AddReads(const std::vector<storage::ReadStats>& reads) {
  for (size_t head = 0; head < reads.size(); ++head) ChargeReads(reads[head], ledgers_[head]);
}

void SessionImpl::ChargeSummary(size_t head, const EstimatorVariant& estimator,
                                const KeptSummary* summary, std::set<EstimatorVariant>& kept) {
  if (estimator.kind == EstimatorKind::kNone || plan_->prefix->partition().mid.size() == 0) return;
  charged_[head].merge(kept);
  if (!kept.empty()) return;  // it was charged before
  ++charged_count_;
  const RowShape row = plan_->prefix->row(head);
  const double row_bytes = storage::MeanRowBytes(plan_->prefix->stored().parts(), row);
  const double tokens =
      EstimatorTokens(services_->options, row, estimator, plan_->prefix->maps(), row_bytes) +
      (summary ? ApartTokens(summary->summary, row_bytes) : 0);
  const auto bytes = static_cast<uint64_t>(std::llround(tokens * row_bytes));
  Ledger& ledger = ledgers_[head];
  ledger.summary_tokens += tokens;
  ledger.logical_bytes += bytes;
  ledger.summary_bytes[static_cast<size_t>(estimator.kind)] += bytes;
}

void SessionImpl::Charge(size_t head, const Ledger& ledger) {
  std::lock_guard lock(mutex_);
  ledgers_[head] += ledger;
}

Status SessionImpl::Step(uint32_t layer, HeadRange heads, std::span<const float> q,
                         std::span<float> y, std::span<float> lse, StepInfo* info) {
  StepRequest request{this, layer, q, y, lse, info, {}, heads};
  StepBatch(*services_, {&request, 1});
  return std::move(request.status);
}

Result<SessionReport> SessionImpl::report() const {
  PREFIXD_TRY(services_->opened.Check());
  std::lock_guard lock(mutex_);
  SessionReport report{info_, {}, ledgers_, own_.size(), plan_ ? plan_->moved : 0, 0};
  if (plan_ && plan_->retained) {
    report.own_retained = plan_->retained->Most(plan_->prefix->partition().mid);
  }
  for (size_t head = 0; plan_ && plan_->ahead && head < ledgers_.size(); ++head) {
    report.per_head[head].prefetched_bytes += plan_->ahead->Uncharged(head);
  }
  for (const Ledger& ledger : report.per_head) report.total += ledger;
  return report;
}

Result<SessionReport> SessionImpl::Detach() {
  PREFIXD_TRY(services_->opened.Check());
  std::shared_ptr<const SessionPlan> last;  // destroyed after the lock
  {
    std::lock_guard lock(mutex_);
    if (detached_) return SessionDetached(info_.id);
    detached_ = true;
    last_policy_ = plan_->policy;
    last.swap(plan_);
    seen_.reset();
  }
  EndPrefetch(*last);
  own_.Close();
  last.reset();  // steps in flight hold the plan themselves
  Leave();
  return report();
}

}  // namespace prefixd
