#include "runtime/store/attach_session.h"

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/call_scope.h"
#include "base/session_arguments.h"
#include "runtime/session/session_impl.h"
#include "runtime/store/estimate.h"
#include "runtime/store/lookup.h"
#include "storage/segment/records.h"
#include "storage/segment/unix_time.h"

namespace prefixd {
namespace {

constexpr int kAttempts = 16;

struct Attachable {
  storage::PrefixInfo info;
  uint32_t n_tokens = 0;
};

// nullopt: what was found is gone already.
Result<std::optional<Attachable>> Find(const Core& core, const AttachSpec& spec) {
  storage::PrefixInfo info;
  uint32_t n_tokens = 0;
  PREFIXD_ASSIGN(const auto accept, AcceptanceOf(spec));
  if (!spec.tokens.empty()) {
    PREFIXD_TRY(KnownModel(core, spec.model));
    PREFIXD_ASSIGN(const auto match,
                   core.storage->LongestMatch(spec.model, spec.tenant, spec.tokens, accept));
    if (match.n_tokens == 0) {
      return Error{Code::kNotFound, "no stored prefix of model '" + spec.model +
                                        "' and this tenant begins these tokens; put it first"};
    }
    n_tokens = match.n_tokens;
    auto matched = core.storage->GetPrefix(match.id);
    if (!matched.ok() && matched.error().code == Code::kNotFound)
      return std::optional<Attachable>();
    if (!matched.ok()) return matched.error();
    info = *std::move(matched);
  } else if (!spec.prefix.empty()) {
    PREFIXD_ASSIGN(info, FindPrefix(core, spec.prefix));
    if (info.tenant != spec.tenant) return NoSuchPrefix(spec.prefix);
    if (!spec.model.empty() && info.model != spec.model) {
      return InvalidArgument("prefix " + spec.prefix + " is of model '" + info.model + "', not '" +
                             spec.model + "'");
    }
    // Even where an open session still holds it.
    if (storage::Expired(info.expires_unix_ms, storage::NowUnixMs())) {
      return Error{Code::kNotFound, "prefix " + info.id.ToString() + " has expired; put it again"};
    }
    n_tokens = info.n_tokens;
  } else {
    return InvalidArgument("attach needs tokens or a prefix id");
  }
  if (spec.n_tokens > n_tokens) {
    return InvalidArgument("the prefix has " + std::to_string(n_tokens) +
                           " tokens; it cannot be cut at " + std::to_string(spec.n_tokens));
  }
  if (spec.n_tokens > 0) n_tokens = spec.n_tokens;
  if (n_tokens > info.exact_tokens && !accept.Takes(info.lineage, info.live)) {
    return Error{Code::kFailedPrecondition,
                 "the tokens of prefix " + info.id.ToString() + " from " +
                     std::to_string(info.exact_tokens) +
                     " on are derived: computed behind an approximate step. Attach with the "
                     "lineage that their put returned or with accept_approximate, or cut the "
                     "prefix there"};
  }
  if (info.kept_rows > 0 && n_tokens > info.n_tokens - info.own_tokens &&
      (n_tokens < info.n_tokens || spec.policy.mode == StepMode::kFull ||
       spec.own_memory_tokens > 0)) {
    return storage::Compressed(info.id);
  }
  // Attaching fails even where an open session still holds the prefix: no new session may use
  // damaged data.
  if (info.quarantined) {
    return Error{Code::kCorrupt, "prefix " + info.id.ToString() +
                                     " is quarantined, put the prompt again: " + info.quarantine};
  }
  return std::optional(Attachable{std::move(info), n_tokens});
}

// Sessions on the same tokens share what they load, so prefixes are named by the segment they end
// in.
Result<std::shared_ptr<PreparedPrefix>> Prepare(Core& core,
                                                const std::shared_ptr<const Model>& model,
                                                const Attachable& found) {
  PREFIXD_ASSIGN(const auto parts, ChainParts(*core.storage, found.info, found.n_tokens));
  const storage::SegmentId id = parts.empty() ? found.info.id : parts.back().id;
  return core.prepared.Get(model, id, found.n_tokens);
}

}  // namespace

Result<std::shared_ptr<Session>> AttachSession(const std::shared_ptr<Core>& core,
                                               const AttachSpec& spec) {
  const auto begun = std::chrono::steady_clock::now();
  const CallScope scope(CallLimits::Of(spec.call_timeout_ms, nullptr));
  PREFIXD_TRY(CheckEngineSpeed(spec.engine));
  PREFIXD_TRY(CheckOwnMemory(spec.own_memory_tokens));
  // A compaction may replace a segment at any time before the prefix is open, which then has
  // another chain.
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    PREFIXD_TRY(CheckCall());
    PREFIXD_ASSIGN(const auto found, Find(*core, spec));
    if (!found) continue;
    PREFIXD_ASSIGN(const auto model, core->models.Find(found->info.model));
    auto prepared = Prepare(*core, model, *found);
    if (!prepared.ok() && prepared.error().code == Code::kNotFound) continue;
    if (!prepared.ok()) return prepared.error();
    const ReuseEstimate estimate =
        EstimateReuse(*core, spec.engine,
                      {model->spec, found->info.tenant, found->info.id, found->n_tokens, true});
    auto session =
        SessionImpl::Attach({core, &core->services}, {.prefix = *std::move(prepared),
                                                      .policy = spec.policy,
                                                      .call_timeout_ms = spec.call_timeout_ms,
                                                      .own_memory_tokens = spec.own_memory_tokens,
                                                      .begun = begun,
                                                      .estimate = estimate});
    // Engines that restore attach with mode full; the others load what steps need, too.
    if (session.ok() && spec.policy.mode == StepMode::kFull) {
      core->rates.NoteOpen((*session)->info().attach_seconds);
    }
    return session;
  }
  return Error{Code::kUnavailable, "the stored prefix keeps changing; try again"};
}

}  // namespace prefixd
