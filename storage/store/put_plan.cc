#include "storage/store/put_plan.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "storage/io/errors.h"
#include "storage/io/file.h"
#include "storage/store/store_match.h"

namespace prefixd::storage {
namespace {

constexpr size_t kMaxLabelBytes = 4096;
constexpr int kPinAttempts = 16;
constexpr uint64_t kMaxTtlMs = 1000ull * 365 * 24 * 3600 * 1000;

// Matches and pins the match; tries again when a removal or a compression comes between.
Status MatchAndPin(StoreCore& core, PutPlan& plan) {
  for (int attempt = 0; attempt < kPinAttempts; ++attempt) {
    PREFIXD_ASSIGN(plan.match,
                   FindLongest(core, plan.scope, plan.hashes, plan.tokens, plan.options.accept));
    // A few common tokens (BOS, a chat header) must not chain unrelated prompts to one another: the
    // first could never be removed, and damage to it would take all of them away.
    if (plan.match.n_tokens < core.catalog->meta().block_tokens &&
        plan.match.n_tokens < plan.tokens.size()) {
      plan.match = {};
    }
    if (plan.match.n_tokens == 0) return {};
    auto pin = core.tree.Pin(plan.match.id);
    if (!pin.ok()) continue;
    // Compressing may have come between.
    const auto taken = [&](const SegmentRecord& segment) {
      return plan.options.accept.TakesSegment(segment);
    };
    if (std::ranges::all_of(pin->chain(), taken)) {
      plan.pin = std::move(*pin);
      return {};
    }
  }
  return Error{Code::kUnavailable, "the stored prefix keeps changing; try again"};
}

// Matches, as MatchAndPin does, and enters the put among those under way; waits for one that stores
// the same blocks, as far as the options say.
Status MatchAmongPuts(StoreCore& core, PutPlan& plan) {
  const auto until = OpenPuts::Clock::now() + std::chrono::milliseconds(plan.options.wait_ms);
  const uint32_t block = core.catalog->meta().block_tokens;
  while (true) {
    const uint64_t seen = core.open_puts.ended();
    PREFIXD_TRY(MatchAndPin(core, plan));
    PREFIXD_ASSIGN(auto entry, core.open_puts.Enter(plan.hashes, plan.match.n_tokens / block, seen,
                                                    until, plan.options.alone));
    if (entry) {
      plan.open = *std::move(entry);
      return {};
    }
    plan.pin.Release();
  }
}

}  // namespace

Result<PutPlan> PlanPut(StoreCore& core, std::string_view model, std::string_view tenant,
                        std::span<const uint32_t> tokens, std::string_view label,
                        const PutOptions& options) {
  if (tokens.empty()) return InvalidArgument("a prefix needs at least one token");
  if (tokens.size() > 1u << 31) return InvalidArgument("a prefix has at most 2^31 tokens");
  if (label.size() > kMaxLabelBytes) return InvalidArgument("a label has at most 4096 bytes");
  if (options.ttl_ms > kMaxTtlMs) return InvalidArgument("a prefix lives at most 1000 years");
  PutPlan plan;
  plan.options = options;
  PREFIXD_ASSIGN(plan.model, core.models->Hold(model));
  PREFIXD_ASSIGN(plan.scope, core.models->Resolve(model, tenant));
  plan.tokens.assign(tokens.begin(), tokens.end());
  plan.hashes = core.HashesOf(plan.scope.model.fingerprint, tenant, tokens);
  plan.label = label;
  PREFIXD_TRY(MatchAmongPuts(core, plan));
  if (!plan.pin.empty()) plan.lineage = plan.pin.chain().back().lineage;
  if (plan.lineage == Lineage{} && options.derived) {
    plan.lineage = options.accept.lineage;
    if (plan.lineage == Lineage{}) RandomBytes(plan.lineage);
  }
  return plan;
}

}  // namespace prefixd::storage
