// Implements a session of this process. Steps work on a snapshot of its plan, so that SetPolicy and
// Detach may be called at any time.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "base/call_scope.h"
#include "prefixd/session.h"
#include "runtime/session/seen_queries.h"
#include "runtime/session/session_services.h"
#include "runtime/step/adaptive_budget.h"
#include "runtime/step/own_tokens.h"
#include "runtime/step/plan.h"
#include "runtime/step/retained_tokens.h"
#include "runtime/step/step.h"

namespace prefixd {

// What a session begins with.
struct SessionStart {
  std::shared_ptr<PreparedPrefix> prefix;
  StepPolicy policy;
  uint32_t call_timeout_ms = 0;    // bounds each call of the session; 0: none
  uint32_t own_memory_tokens = 0;  // as in AttachSpec
  std::chrono::steady_clock::time_point begun;
  ReuseEstimate estimate;
  // Of a fork: what it is a fork of, whose prefix ends with so many own tokens that were moved.
  const SessionInfo* of = nullptr;
  uint32_t moved = 0;
  std::shared_ptr<const void> moved_name = nullptr;
  std::shared_ptr<const RetainedTokens> retained = nullptr;
  const SeenQueries* seen = nullptr;
};

class PutStream;

class SessionImpl : public Session, public std::enable_shared_from_this<SessionImpl> {
 public:
  // kResourceExhausted beyond max_sessions.
  static Result<std::shared_ptr<Session>> Attach(std::shared_ptr<SessionServices> services,
                                                 const SessionStart& start);
  ~SessionImpl() override;

  const SessionInfo& info() const override { return info_; }
  StepPolicy policy() const override;
  Status SetPolicy(const StepPolicy& policy) override;
  Status Step(uint32_t layer, HeadRange heads, std::span<const float> q, std::span<float> y,
              std::span<float> lse, StepInfo* info) override;
  Status AttendExact(uint32_t layer, HeadRange heads, uint32_t n, uint32_t own_after,
                     std::span<const float> q, std::span<float> y, std::span<float> lse) override;
  Status Append(uint32_t layer, HeadRange heads, uint32_t n, std::span<const std::byte> k,
                std::span<const std::byte> v) override;
  Status StepAppend(uint32_t layer, HeadRange heads, std::span<const float> q,
                    std::span<const std::byte> k, std::span<const std::byte> v, std::span<float> y,
                    std::span<float> lse, StepInfo* info) override;
  Status Truncate(uint32_t n) override;
  Result<std::shared_ptr<Session>> Fork() override;
  Result<PutResult> Persist(std::span<const uint32_t> tokens, const PersistSpec& spec) override;
  Result<std::shared_ptr<Session>> ForkPersisted(uint32_t window) override;
  Status ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                  std::span<std::byte> out) override;
  Result<RowsInPlace> ReadInPlace(uint32_t layer, uint32_t kv_head,
                                  std::span<const uint32_t> ids) override;
  Status ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range,
                   std::span<std::byte> out) override;
  Status ReadLayers(std::span<const LayerRead> reads,
                    const std::function<bool(size_t)>& done) override;
  Result<LayerInPlace> FindLayerInPlace(const LayerRead& read) override;
  Status ReadTokens(TokenRange range, std::span<uint32_t> out) override;
  Result<Selection> Select(uint32_t layer, uint32_t kv_head, std::span<const float> q,
                           uint32_t k) override;
  Result<std::vector<std::byte>> SummaryBytes(uint32_t layer, uint32_t kv_head,
                                              const EstimatorVariant& variant) override;
  void Cancel() override { canceller_.Cancel(); }
  Result<SessionReport> report() const override;
  Result<SessionReport> Detach() override;

  // The limits of a call of this session that begins now.
  CallLimits Limits() const { return CallLimits::Of(call_timeout_ms_, &canceller_); }
  const std::shared_ptr<SessionServices>& services() const { return services_; }
  // kFailedPrecondition after Detach.
  Result<std::shared_ptr<const SessionPlan>> plan() const;
  OwnTokens& own() { return own_; }
  size_t HeadOf(uint32_t layer, uint32_t kv_head) const { return heads_.of(layer, kv_head); }
  // kFailedPrecondition where own tokens move and there are some: a call of the prefix alone has no
  // answer then.
  Status CheckPrefixAlone(const SessionPlan& plan) const;
  // Tells the mover when these heads (by HeadIndex) have more own tokens than memory is to hold.
  void NoteGrown(size_t head);
  // Moves own tokens to the store, if there are too many; for the mover. Ends early when asked to.
  Status MoveOwn(const std::stop_token& stop);
  // Whether tokens that MoveOwn could not move are to wait now.
  void NoteMoved(bool moved);
  // Adds to the ledger of a head (Model::heads).
  void Charge(size_t head, const Ledger& ledger);
  // TakeTokens returns how many tokens each of these KV heads of `layer` (n above 0) retrieves in a
  // step of `plan`: as planned, or spread by missing mass. NoteMissing records what a head's step
  // missed (rho_z [G]).
  std::vector<uint32_t> TakeTokens(const SessionPlan& plan, uint32_t layer, HeadRange heads);
  void NoteMissing(const SessionPlan& plan, size_t head, uint32_t k, std::span<const float> rho_z);
  // Remembers queries of one token for the policy that decides what of its own tokens the session
  // retains, if there is one: q [G][key_dim], which saw the first `own` own tokens.
  void NoteQueries(const SessionPlan& plan, size_t head, uint32_t own, std::span<const float> q);
  // Charges what was read, also when the read failed.
  void ChargeRows(size_t head, const storage::ReadStats& reads, uint64_t tokens, uint64_t bytes);

 private:
  SessionImpl(std::shared_ptr<SessionServices> services, SessionInfo info, MemoryAccount account);
  using Plan = std::shared_ptr<const SessionPlan>;
  // Puts `plan` in the place of `expected`, and whatever `change` changes with it; false: another
  // plan came meanwhile, or `change` would not, and nothing has changed.
  Result<bool> Adopt(const Plan& expected, Plan plan, const std::vector<storage::ReadStats>& reads,
                     const std::function<Result<bool>()>& change = nullptr);
  // Plan and own tokens of one moment.
  struct State {
    Plan plan;
    OwnTokens::Snapshot own;
    std::shared_ptr<const SeenQueries> seen;
  };
  Result<State> TakeState() const;
  // A plan of the same policy as `like` whose prefix ends with `moved` of its own tokens. priority:
  // kStep where a call waits.
  Result<std::shared_ptr<SessionPlan>> PlanWith(const SessionPlan& like,
                                                std::shared_ptr<PreparedPrefix> prefix,
                                                const StepPolicy& policy, uint32_t moved,
                                                std::vector<storage::ReadStats>* reads,
                                                WorkPriority priority = WorkPriority::kStep);
  // Opens the plan's prefix, cut behind `moved` own tokens.
  Result<std::shared_ptr<PreparedPrefix>> CutBehind(const SessionPlan& plan, uint32_t moved);
  // Reads rows of own tokens that the plan's prefix has.
  Status ReadMoved(const SessionPlan& plan, size_t head, TokenRange tokens,
                   std::span<std::byte> out);
  OwnTokens::ReadForgotten MovedReader(const SessionPlan& plan);
  Status TruncateMoved(uint32_t n);
  // Lets exact passes that begin at own token `first`, which was moved, attend over what is before
  // it as the prefix, and over the others as over rows in memory.
  Status TakeBack(uint32_t first, GroupTask& task, std::map<uint32_t, Plan>& plans);
  // Reads rows of the plan's prefix, which may end with moved tokens, as ReadLayers does. priority:
  // kBackground where no call waits; how long that took says nothing of a restore.
  Status ReadStored(const SessionPlan& plan, std::span<const LayerRead> reads,
                    const std::function<bool(size_t)>& done, WorkPriority priority);
  // Writes what a put lacks of the prefix and the own tokens behind it.
  Status WriteMissing(PutStream& put, const State& state, WorkPriority priority);
  Status ReadAnywhere(const State& state, uint32_t layer, TokenRange at, std::span<std::byte> k,
                      std::span<std::byte> v, WorkPriority priority);
  // Stores own tokens behind the state's prefix, cut where they begin; returns the new prefix.
  Result<storage::SegmentId> StoreMoved(const State& state, TokenRange own);
  // Loads what steps of `plan` need of own tokens that were just moved, as those in memory are.
  Status Bring(const SessionPlan& plan, const PreparedPrefix& last, TokenRange own,
               std::vector<storage::ReadStats>& reads);
  // Chooses which of the first `to` own tokens keep their rows in memory when they move; null where
  // the state's policy wants none. A head that memory has no room for retains nothing.
  Result<std::shared_ptr<const RetainedTokens>> Retain(const State& state, uint32_t to,
                                                       const std::stop_token& stop);
  // Whether a policy decides what of the session's own tokens stays.
  bool Retains(const StepPolicy& policy) const {
    return own_memory_tokens_ > 0 && policy.retain.on();
  }
  bool Observes(const StepPolicy& policy) const;  // by what queries attend to
  // Sets what a plan ranks its retained tokens by.
  Status BringScorers(SessionPlan& plan);
  void EndPrefetch(const SessionPlan& plan);
  // Does what Persist does.
  Result<PutResult> Store(std::span<const uint32_t> tokens, const PersistSpec& spec);
  // Charges once per head and estimator; mutex_ is held. summary: what is charged; null: nothing is
  // kept for the head. kept: the estimator's Kept() alone, so that nothing is allocated.
  void ChargeSummary(size_t head, const EstimatorVariant& estimator, const KeptSummary* summary,
                     std::set<EstimatorVariant>& kept);
  void Leave();  // gives up its place in SessionServices::open, once
  // Counts what the session keeps, with what its policy lists; mutex_ is held.
  Status TakeMemory(const StepPolicy& policy);
  void AddReads(const std::vector<storage::ReadStats>& reads);

  const std::shared_ptr<SessionServices> services_;  // keeps the store open
  SessionInfo info_;                                 // constant once attached
  const HeadIndex heads_;                            // of info_.geometry
  uint32_t call_timeout_ms_ = 0;                     // likewise
  uint32_t own_memory_tokens_ = 0;                   // likewise; 0: own tokens never move
  CallCanceller canceller_;
  OwnTokens own_;
  std::atomic<bool> moving_{false};        // the mover knows of it
  int failed_moves_ = 0;                   // the mover's: since the last that did not fail
  std::atomic<int64_t> move_after_ns_{0};  // of the steady clock: no sooner, after a failure

  std::atomic<bool> counted_{false};  // in SessionServices::open
  // When a layer was last read, by this session; of rows in place, which may outlive it, until
  // when.
  using LastRead = std::atomic<std::chrono::steady_clock::time_point>;
  const std::shared_ptr<LastRead> last_read_ = std::make_shared<LastRead>();

  mutable std::mutex mutex_;
  bool detached_ = false;
  StepPolicy last_policy_;                           // set by Detach
  std::shared_ptr<const SessionPlan> plan_;          // null after Detach
  std::shared_ptr<AdaptiveBudget> adaptive_;         // for plan_, if its policy is adaptive
  std::shared_ptr<SeenQueries> seen_;                // of policies that retain; else null
  std::vector<Ledger> ledgers_;                      // [heads_]
  std::vector<std::set<EstimatorVariant>> charged_;  // per head, by Kept()
  uint64_t charged_count_ = 0;                       // of all heads
  MemoryCharge memory_;
};

}  // namespace prefixd
