// Implements a session of this process. Steps work on a snapshot of its plan, so that SetPolicy and
// Detach may be called at any time.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "base/call_scope.h"
#include "prefixd/session.h"
#include "runtime/session/session_services.h"
#include "runtime/step/adaptive_budget.h"
#include "runtime/step/own_tokens.h"
#include "runtime/step/plan.h"

namespace prefixd {

class SessionImpl : public Session {
 public:
  // kResourceExhausted beyond max_sessions.
  // call_timeout_ms: bounds each call of the session; 0: none.
  static Result<std::shared_ptr<Session>> Attach(std::shared_ptr<SessionServices> services,
                                                 std::shared_ptr<PreparedPrefix> prefix,
                                                 const StepPolicy& policy, uint32_t call_timeout_ms,
                                                 std::chrono::steady_clock::time_point begun,
                                                 const ReuseEstimate& estimate);
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
  Status ReadLayer(const LayerSlice& slice, std::span<std::byte> k,
                   std::span<std::byte> v) override;
  Status ReadTokens(TokenRange range, std::span<uint32_t> out) override;
  Result<Selection> Select(uint32_t layer, uint32_t kv_head, std::span<const float> q,
                           uint32_t k) override;
  Result<std::vector<std::byte>> SummaryBytes(uint32_t layer, uint32_t kv_head,
                                              const EstimatorVariant& variant) override;
  void Cancel() override { canceller_.Cancel(); }
  SessionReport report() const override;
  Result<SessionReport> Detach() override;

  // The limits of a call of this session that begins now.
  CallLimits Limits() const { return CallLimits::Of(call_timeout_ms_, &canceller_); }
  const std::shared_ptr<SessionServices>& services() const { return services_; }
  // kFailedPrecondition after Detach.
  Result<std::shared_ptr<const SessionPlan>> plan() const;
  OwnTokens& own() { return own_; }
  // Adds to the ledger of a head (Model::heads).
  void Charge(size_t head, const Ledger& ledger);
  // TakeTokens returns how many tokens each of these KV heads of `layer` (n above 0) retrieves in a
  // step of `plan`: as planned, or spread by missing mass. NoteMissing records what a head's step
  // missed (rho_z [G]).
  std::vector<uint32_t> TakeTokens(const SessionPlan& plan, uint32_t layer, HeadRange heads);
  void NoteMissing(const SessionPlan& plan, size_t head, uint32_t k, std::span<const float> rho_z);
  // Charges what was read, also when the read failed.
  void ChargeRows(size_t head, const storage::ReadStats& reads, uint64_t tokens, uint64_t bytes);

 private:
  SessionImpl(std::shared_ptr<SessionServices> services, SessionInfo info, MemoryAccount account);
  Status Adopt(std::shared_ptr<const SessionPlan> plan,
               const std::vector<storage::ReadStats>& reads);
  Status Replace(std::shared_ptr<const SessionPlan> plan,
                 const std::vector<storage::ReadStats>& reads,
                 std::shared_ptr<const SessionPlan>& last);
  void EndPrefetch(const SessionPlan& plan);
  // Does what Persist does.
  Result<PutResult> Store(std::span<const uint32_t> tokens, const PersistSpec& spec);
  // Charges once per head and estimator; mutex_ is held. summary: what is charged; null: nothing is
  // kept for the head.
  void ChargeSummary(size_t head, const EstimatorVariant& estimator, const KeptSummary* summary);
  size_t HeadOf(uint32_t layer, uint32_t kv_head) const { return heads_.of(layer, kv_head); }
  void Leave();  // gives up its place in SessionServices::open, once
  // Counts what the session keeps, with what its policy lists; mutex_ is held.
  Status TakeMemory(const StepPolicy& policy);
  void AddReads(const std::vector<storage::ReadStats>& reads);

  const std::shared_ptr<SessionServices> services_;  // keeps the store open
  SessionInfo info_;                                 // constant once attached
  const HeadIndex heads_;                            // of info_.geometry
  uint32_t call_timeout_ms_ = 0;                     // likewise
  CallCanceller canceller_;
  OwnTokens own_;

  std::atomic<bool> counted_{false};  // in SessionServices::open

  mutable std::mutex mutex_;
  bool detached_ = false;
  StepPolicy last_policy_;                           // set by Detach
  std::shared_ptr<const SessionPlan> plan_;          // null after Detach
  std::shared_ptr<AdaptiveBudget> adaptive_;         // for plan_, if its policy is adaptive
  std::vector<Ledger> ledgers_;                      // [heads_]
  std::vector<std::set<EstimatorVariant>> charged_;  // per head, by Kept()
  uint64_t charged_count_ = 0;                       // of all heads
  MemoryCharge memory_;
};

}  // namespace prefixd
