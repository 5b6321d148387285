#include "storage/store/explain_match.h"

#include <optional>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "storage/segment/unix_time.h"
#include "storage/store/store_match.h"

namespace prefixd::storage {
namespace {

// Returns the token that the matched prefix has behind the match.
Result<std::optional<uint32_t>> TokenBehind(StoreCore& core, const Match& match) {
  const std::optional<uint32_t> none;
  if (match.n_tokens == 0 || match.stored_tokens <= match.n_tokens) return none;
  const auto pin = core.tree.Pin(match.id);
  if (!pin.ok()) return none;  // it went meanwhile
  const auto& chain = pin->chain();
  for (size_t i = chain.size(); i-- > 0;) {
    if (chain[i].tokens.begin > match.n_tokens) continue;
    PREFIXD_ASSIGN(const auto file, core.segments->Open(chain[i].id, Need::kIds));
    return std::optional(file->tokens()[match.n_tokens - chain[i].tokens.begin]);
  }
  return none;
}

// Finds the stored segments that hold the most blocks of the prompt and may not be used. Segments
// that others continue are never removed, so "some segment holds this block" is monotone.
Status FindUnusable(StoreCore& core, std::span<const BlockHash> hashes, uint32_t block,
                    MatchExplanation* out) {
  const int64_t now = NowUnixMs();
  size_t low = out->match.n_tokens / block, high = hashes.size();
  std::vector<SegmentId> holders;
  while (low < high) {
    const size_t middle = (low + high + 1) / 2;
    PREFIXD_ASSIGN(std::vector<SegmentId> ids, core.catalog->FindBlock(hashes[middle - 1]));
    if (ids.empty()) {
      high = middle - 1;
    } else {
      low = middle;
      holders = std::move(ids);
    }
  }
  for (const SegmentId& id : holders) {
    const auto info = core.tree.Info(id);
    if (!info.ok() || info->live) continue;
    const auto n_tokens = static_cast<uint32_t>(low * block);
    if (info->quarantined) {
      out->unusable.push_back({id, n_tokens, info->quarantine, 0});
    } else if (!core.tree.Alive(id, now)) {
      out->unusable.push_back({id, n_tokens, "", info->expires_unix_ms});
    }
  }
  return {};
}

// A record names some of the blocks that it stands for, so the longest known one is searched for.
Status FindGone(StoreCore& core, const RequestScope& scope, std::span<const BlockHash> hashes,
                uint32_t block, MatchExplanation* out) {
  constexpr size_t kCheckEvery = 1024;
  for (size_t count = hashes.size(); count * block > out->match.n_tokens; --count) {
    if (count % kCheckEvery == 0) PREFIXD_TRY(CheckCall());
    PREFIXD_ASSIGN(auto gone, core.catalog->FindGone(scope.tenant, hashes[count - 1]));
    if (!gone) continue;
    out->gone = std::move(gone);
    out->gone_tokens = static_cast<uint32_t>(count * block);
    break;
  }
  return {};
}

}  // namespace

Result<MatchExplanation> ExplainLongest(StoreCore& core, const RequestScope& scope,
                                        std::span<const uint32_t> tokens,
                                        const Acceptance& accept) {
  const uint32_t block = core.catalog->meta().block_tokens;
  const auto hashes = core.HashesOf(scope.model.fingerprint, scope.tenant, tokens);
  MatchExplanation out;
  PREFIXD_ASSIGN(out.match, FindLongest(core, scope, hashes, tokens, accept));
  if (out.match.n_tokens == tokens.size()) return out;
  PREFIXD_ASSIGN(out.stored_token, TokenBehind(core, out.match));
  Acceptance more = accept;
  more.approximate = true;
  PREFIXD_ASSIGN(const Match derived, FindLongest(core, scope, hashes, tokens, more));
  if (derived.n_tokens > out.match.n_tokens) out.derived_tokens = derived.n_tokens;
  more = accept;
  more.compressed = true;
  PREFIXD_ASSIGN(const Match compressed, FindLongest(core, scope, hashes, tokens, more));
  if (compressed.n_tokens > out.match.n_tokens) {
    out.compressed_tokens = compressed.n_tokens;
    out.compressed = compressed.id;
  }
  PREFIXD_TRY(FindUnusable(core, hashes, block, &out));
  PREFIXD_TRY(FindGone(core, scope, hashes, block, &out));
  return out;
}

}  // namespace prefixd::storage
