// A store whose sessions only step, without memory or disk, and whose steps, matches, waits for
// prefixes, removals, writes and commits of puts a test can hold. For tests of what carries calls.
// A prefix "a/b" is of tenant "a".
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "base/session_arguments.h"
#include "prefixd/store.h"

namespace prefixd::testing {

// y is q plus the layer, and lse the session's id; both layers are alike, but steps of the second
// can be held.
class SteppingStore : public Store {
 public:
  static constexpr uint32_t kHeads = 4, kDim = 16, kHeldLayer = 1;

  // What the test keeps: the daemon owns the store.
  struct Control {
    std::mutex mutex;
    std::condition_variable changed;
    bool holding = false;
    std::atomic<bool> throws{false};  // std::bad_alloc, in place of statistics
    bool heeds = false;               // whether steps that are held end when their call is to end
    uint32_t held = 0, let_go = 0;    // steps that wait, and that may go on all the same
    std::vector<uint64_t> order;      // sessions of the steps that were held, as they came
    std::atomic<int> attached{0};
    std::atomic<int> described{0};  // prefixes that were asked for
    std::atomic<uint32_t> largest_batch{0};

    void Hold() {
      std::lock_guard lock(mutex);
      holding = true;
    }
    void AwaitHeld(uint32_t n) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return held >= n; });
    }
    uint32_t Held() {
      std::lock_guard lock(mutex);
      return held;
    }
    std::vector<uint64_t> Order() {
      std::lock_guard lock(mutex);
      return order;
    }
    void LetGo(uint32_t n) {
      std::lock_guard lock(mutex);
      let_go += n;
      changed.notify_all();
    }
    void Release() {
      std::lock_guard lock(mutex);
      holding = false;
      changed.notify_all();
    }
    Status Pass(uint64_t session) {
      std::unique_lock lock(mutex);
      if (!holding) return {};
      order.push_back(session);
      ++held;
      changed.notify_all();
      const auto goes_on = [&] { return !holding || let_go > 0; };
      Status ended;
      if (heeds) {
        ended = AwaitInCall(changed, lock, goes_on);
      } else {
        changed.wait(lock, goes_on);
      }
      if (holding && ended.ok()) --let_go;
      --held;
      return ended;
    }
  };

  class SteppingSession final : public Session {
   public:
    SteppingSession(std::shared_ptr<Control> control, SessionInfo info)
        : control_(std::move(control)), info_(std::move(info)) {
      ++control_->attached;
    }
    ~SteppingSession() override { --control_->attached; }
    const SessionInfo& info() const override { return info_; }
    StepPolicy policy() const override { return {}; }
    Status SetPolicy(const StepPolicy&) override { return {}; }
    void Cancel() override {}
    Status Step(uint32_t layer, HeadRange heads, std::span<const float> q, std::span<float> y,
                std::span<float> lse, StepInfo* info) override {
      PREFIXD_ASSIGN(heads, CheckQueries(info_.geometry, layer, heads, 1, q, y, lse));
      if (layer == kHeldLayer) {
        PREFIXD_TRY(control_->Pass(info_.id));
      }
      for (size_t i = 0; i < y.size(); ++i) y[i] = q[i] + float(layer);
      for (float& x : lse) x = float(info_.id);
      if (info != nullptr) {
        info->k = static_cast<uint32_t>(info_.id);
        info->ledger.steps = 7, info->ledger.compute_ns = 9, info->ledger.rho_z_sum = 0.5;
        info->k_per_head.assign(heads.n, 3);
        info->rho_z.assign(lse.size(), 0.25f);
        info->missing.assign(lse.size(), {0.125, true});
      }
      return {};
    }
    Status AttendExact(uint32_t, HeadRange, uint32_t, uint32_t, std::span<const float>,
                       std::span<float>, std::span<float>) override {
      return Not();
    }
    Status Append(uint32_t, HeadRange, uint32_t, std::span<const std::byte>,
                  std::span<const std::byte>) override {
      return Not();
    }
    Status StepAppend(uint32_t, HeadRange, std::span<const float>, std::span<const std::byte>,
                      std::span<const std::byte>, std::span<float>, std::span<float>,
                      StepInfo*) override {
      return Not();
    }
    Status Truncate(uint32_t) override { return Not(); }
    Result<std::shared_ptr<Session>> Fork() override { return Not(); }
    Result<PutResult> Persist(std::span<const uint32_t>, const PersistSpec&) override {
      return Not();
    }
    Result<std::shared_ptr<Session>> ForkPersisted(uint32_t) override { return Not(); }
    Status ReadRows(uint32_t, uint32_t, std::span<const uint32_t>, std::span<std::byte>) override {
      return Not();
    }
    Result<RowsInPlace> ReadInPlace(uint32_t, uint32_t, std::span<const uint32_t>) override {
      return Not();
    }
    Status ReadRange(uint32_t, uint32_t, TokenRange, std::span<std::byte>) override {
      return Not();
    }
    Status ReadLayers(std::span<const LayerRead>, const std::function<bool(size_t)>&) override {
      return Not();
    }
    Status ReadTokens(TokenRange, std::span<uint32_t>) override { return Not(); }
    Result<Selection> Select(uint32_t, uint32_t, std::span<const float>, uint32_t) override {
      return Not();
    }
    Result<std::vector<std::byte>> SummaryBytes(uint32_t, uint32_t,
                                                const EstimatorVariant&) override {
      return Not();
    }
    Result<SessionReport> report() const override { return SessionReport{info_, {}, {}}; }
    Result<SessionReport> Detach() override { return report(); }

   private:
    const std::shared_ptr<Control> control_;
    const SessionInfo info_;
  };

  class HeldPut final : public PutStream {
   public:
    explicit HeldPut(std::shared_ptr<Control> control) : control_(std::move(control)) {}
    TokenRange missing() const override { return {0, 1}; }
    Status Write(uint32_t, uint32_t, uint32_t, std::span<const std::byte>,
                 std::span<const std::byte>) override {
      return control_->Pass(0);
    }
    Status WriteQueries(uint32_t, uint32_t, uint32_t, std::span<const float>) override {
      return Not();
    }
    PutProgress progress() const override { return {}; }
    Result<PutResult> Commit() override {
      PREFIXD_TRY(control_->Pass(0));
      return PutResult();
    }
    void Abort() override {}

   private:
    const std::shared_ptr<Control> control_;
  };

  explicit SteppingStore(std::shared_ptr<Control> control) : control_(std::move(control)) {}

  Result<std::shared_ptr<Session>> Attach(const AttachSpec& spec) override {
    SessionInfo info;
    info.id = ++attached_;
    info.model = spec.model;
    info.tenant = spec.tenant;
    info.prefix = "prefix";
    info.n_tokens = 1;
    info.geometry = {2, kHeads, 2, kDim, kDim, DType::kBf16, {{0.25f, 0, 0}, {0.25f, 0, 0}}};
    return std::shared_ptr<Session>(std::make_shared<SteppingSession>(control_, std::move(info)));
  }
  void StepBatch(std::span<StepRequest> requests) override {
    const auto n = static_cast<uint32_t>(requests.size());
    uint32_t most = control_->largest_batch;
    while (most < n && !control_->largest_batch.compare_exchange_weak(most, n)) {
    }
    for (StepRequest& r : requests) {
      r.status = r.session == nullptr ? Status(NotOfThisStore())
                                      : r.session->Step(r.layer, r.heads, r.q, r.y, r.lse, r.info);
    }
  }

  Status RegisterModel(const ModelSpec&) override { return Not(); }
  Result<ModelSpec> Model(std::string_view) override { return ModelSpec(); }
  Result<ModelPage> ListModels(const ListSpec&) override { return ModelPage(); }
  Status RemoveModel(std::string_view) override { return Not(); }
  Result<std::unique_ptr<PutStream>> BeginPut(const PutSpec&) override {
    return std::unique_ptr<PutStream>(std::make_unique<HeldPut>(control_));
  }
  // In place of a session's id, a held match has the number of its tokens.
  Result<PrefixMatch> Match(const MatchSpec& spec) override {
    PREFIXD_TRY(control_->Pass(spec.tokens.size()));
    return PrefixMatch();
  }
  Result<std::unique_ptr<PendingMatch>> MatchAsync(const MatchSpec&,
                                                   std::chrono::milliseconds) override {
    return Not();
  }
  Result<Explanation> Explain(const ExplainSpec&) override { return Not(); }
  Result<RewriteResult> Rewrite(std::string_view, RewriteKind, const ProgressFn&) override {
    return Not();
  }
  Result<CompressReport> Compress(std::string_view, const CompressSpec&,
                                  const ProgressFn&) override {
    return Not();
  }
  Result<std::unique_ptr<Snapshot>> TakeSnapshot() override { return Not(); }
  Status WaitReady(std::string_view, const ProgressFn& progress) override {
    progress(1, 2, "step");
    return control_->Pass(0);
  }
  Result<PrefixPage> ListPrefixes(const ListSpec&) override { return Not(); }
  Result<PrefixDetail> Prefix(std::string_view id) override {
    ++control_->described;
    PrefixDetail detail;
    detail.summary.id = id;
    detail.summary.tenant = *TenantOf(id);
    return detail;
  }
  Result<std::string> TenantOf(std::string_view id) override {
    const size_t end = id.find('/');
    return std::string(end == id.npos ? "" : id.substr(0, end));
  }
  Status Remove(std::string_view) override { return control_->Pass(0); }
  Status SetLifetime(std::string_view, const Lifetime&) override { return Not(); }
  Result<VerifySummary> Verify(std::string_view, const ProgressFn&) override {
    return VerifySummary();
  }
  Result<VerifySummary> VerifyTenant(std::string_view, const ProgressFn&) override { return Not(); }
  Result<RuntimeStats> Stats() override {
    if (control_->throws) throw std::bad_alloc();
    return RuntimeStats();
  }

 private:
  static Error Not() { return {Code::kFailedPrecondition, "this store only steps"}; }

  const std::shared_ptr<Control> control_;
  std::atomic<uint64_t> attached_{0};
};

}  // namespace prefixd::testing
