// Appends own tokens to a session, attends over them, and shares them with forks.
#include <algorithm>
#include <chrono>
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
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_ASSIGN(heads, CheckQueries(info_.geometry, layer, heads, n, q, y, lse));
  if (n == 0) return {};
  const LayerShape shape = info_.geometry.layer(layer);
  const size_t group = shape.group_size();
  std::vector<OwnRows> own(heads.n);
  for (uint32_t h = 0; h < heads.n; ++h) {
    own[h] = own_.rows(HeadOf(layer, heads.first + h));
    PREFIXD_TRY(CheckOwnBlock(layer, heads.first + h, own[h].size(), n, own_after));
  }
  return services_->pool.ParallelFor(heads.n, [&](size_t h) -> Status {
    const size_t head = HeadOf(layer, heads.first) + h;
    const auto of_token = [&](size_t t) { return (t * heads.n + h) * group; };
    // Gathers this KV head's queries of all tokens side by side, and its outputs likewise.
    std::vector<float> head_q(n * group * shape.key_dim);
    std::vector<float> head_y(n * group * shape.value_dim), head_lse(n * group);
    for (size_t t = 0; t < n; ++t) {
      std::copy_n(q.data() + of_token(t) * shape.key_dim, group * shape.key_dim,
                  head_q.data() + t * group * shape.key_dim);
    }
    Ledger ledger;
    Status status = services_->steps.AttendExact(*plan, head, static_cast<uint32_t>(n * group),
                                                 head_q, head_y, head_lse, ledger);
    if (status.ok() && own[h].size() > 0) {
      status = services_->steps.AttendOwn(*plan, head, own[h], n, own_after, head_q, head_y,
                                          head_lse, ledger);
    }
    Charge(head, ledger);
    PREFIXD_TRY(status);
    for (size_t t = 0; t < n; ++t) {
      std::copy_n(head_y.data() + t * group * shape.value_dim, group * shape.value_dim,
                  y.data() + of_token(t) * shape.value_dim);
      std::copy_n(head_lse.data() + t * group, group, lse.data() + of_token(t));
    }
    return {};
  });
}

Status SessionImpl::Append(uint32_t layer, HeadRange heads, uint32_t n,
                           std::span<const std::byte> k, std::span<const std::byte> v) {
  const CallScope scope(Limits());
  PREFIXD_TRY(plan());
  PREFIXD_ASSIGN(heads, CheckOwnRows(info_.geometry, layer, heads, n, k.size(), v.size()));
  PREFIXD_ASSIGN(OwnTokens::Growth growth, own_.Grow(layer, heads, n, k, v));
  growth.Commit();
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
  PREFIXD_TRY(plan());
  return own_.Truncate(n);
}

Result<std::shared_ptr<Session>> SessionImpl::Fork() {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_ASSIGN(auto fork, Attach(services_, plan->prefix, plan->policy, call_timeout_ms_,
                                   std::chrono::steady_clock::now()));
  static_cast<SessionImpl&>(*fork).own_.Share(own_);
  return fork;
}

}  // namespace prefixd
