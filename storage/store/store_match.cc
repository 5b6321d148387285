#include "storage/store/store_match.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "storage/io/errors.h"
#include "storage/segment/stored_part.h"
#include "storage/segment/unix_time.h"

namespace prefixd::storage {
namespace {

// Returns how many token ids `stored` and the prompt (from position `begin`) have in common, from
// the start.
uint32_t CommonTokens(std::span<const uint32_t> stored, std::span<const uint32_t> tokens,
                      uint32_t begin) {
  const auto rest = tokens.subspan(begin);
  const size_t n = std::min(stored.size(), rest.size());
  const auto at =
      std::mismatch(stored.begin(), stored.begin() + static_cast<ptrdiff_t>(n), rest.begin());
  return static_cast<uint32_t>(at.first - stored.begin());
}

class Matcher {
 public:
  Matcher(StoreCore& core, std::span<const uint32_t> tokens, const Acceptance& accept,
          int64_t now_unix_ms)
      : core_(core), tokens_(tokens), accept_(accept), now_unix_ms_(now_unix_ms) {}

  // Compares the whole chain of `id`; if the prompt agrees up to `at_least`, goes on into the
  // segments that branch off behind that point, and remembers the longest match.
  Status Consider(const SegmentId& id, uint32_t at_least) {
    auto pin = core_.tree.Pin(id);
    if (!pin.ok()) return {};  // removed or quarantined meanwhile: no match
    if (!core_.tree.Alive(id, now_unix_ms_)) return {};
    const auto& chain = pin->chain();
    uint32_t matched = 0, exact = UINT32_MAX;
    for (size_t i = 0; i < chain.size(); ++i) {
      if (!accept_.TakesSegment(chain[i])) return {};
      if (chain[i].lineage != Lineage{}) exact = std::min(exact, chain[i].tokens.begin);
      if (core_.unreadable.Holds(chain[i].id)) return PassOver();
      auto file = core_.segments->Open(chain[i].id, Need::kIds);
      if (!file.ok()) return Skip(chain[i].id, file.error());
      const uint32_t begin = chain[i].tokens.begin;
      const uint32_t end = i + 1 < chain.size() ? chain[i + 1].tokens.begin : chain[i].tokens.end;
      matched = begin + CommonTokens((*file)->tokens().first(end - begin), tokens_, begin);
      if (matched < end && i + 1 < chain.size()) return {};
    }
    const SegmentRecord& own = chain.back();
    if (matched < at_least || matched <= own.tokens.begin) return {};
    // A part of a compressed segment would end where rows have been dropped.
    if (own.compressed() && matched < own.tokens.end) return {};
    exact = std::min(exact, matched);
    // Derived, compressed and exact rows of the same tokens may all be stored: the exact ones
    // serve, and of equals those that are all there.
    if (std::tuple(matched, exact, !own.compressed()) >
        std::tuple(best_.n_tokens, best_.exact_tokens, !best_.compressed)) {
      best_ = {own.id, matched, own.tokens.end, exact, own.compressed()};
    }
    const uint32_t first = std::max(own.tokens.begin + 1, at_least);
    for (uint32_t b = first; b <= matched && b < tokens_.size(); ++b) {
      for (const SegmentId& child : core_.tree.ChildrenOf(own.id, b, tokens_[b])) {
        PREFIXD_TRY(Consider(child, b + 1));
      }
    }
    return {};
  }

  const Match& best() const { return best_; }
  // Returns whether the disk could not read something since the last call.
  bool TakeUnreadable() { return std::exchange(unreadable_, false); }
  // Returns whether no match of at most `n` tokens is better.
  bool Beats(uint32_t n) const {
    return best_.n_tokens > n ||
           (best_.n_tokens == n && best_.exact_tokens == n && !best_.compressed);
  }

 private:
  // A damaged segment is a miss, and so is one that the disk cannot read: its prompts can be stored
  // anew. The caller learns of any other error, such as that the disk does not answer.
  Status Skip(const SegmentId& id, const Error& error) {
    if (error.code == Code::kCorrupt) return {};
    if (error.code != Code::kIo) return error;
    LogWarning("a stored prompt is passed over for a minute: " + error.message);
    core_.unreadable.Note(id);
    return PassOver();
  }
  Status PassOver() {
    unreadable_ = true;
    return {};
  }

  StoreCore& core_;
  const std::span<const uint32_t> tokens_;
  const Acceptance accept_;
  const int64_t now_unix_ms_;
  Match best_;
  bool unreadable_ = false;
};

}  // namespace

Result<Match> FindLongest(StoreCore& core, const RequestScope& scope,
                          std::span<const BlockHash> hashes, std::span<const uint32_t> tokens,
                          const Acceptance& accept) {
  if (tokens.empty()) return Match{};
  const int64_t now = NowUnixMs();
  // A compressed segment holds each of its blocks and serves whole alone: those that did not are
  // left out, or there would be a round for each block. So are those that the disk cannot read.
  std::set<SegmentId> in_vain;
  const auto usable_holders = [&](size_t count) -> Result<std::vector<SegmentId>> {
    PREFIXD_ASSIGN(std::vector<SegmentId> ids, core.catalog->FindBlock(hashes[count - 1]));
    std::erase_if(ids, [&](const SegmentId& id) {
      return in_vain.contains(id) || !core.tree.Usable(id, now, accept);
    });
    return ids;
  };
  const uint32_t block = core.catalog->meta().block_tokens;
  size_t high = hashes.size();
  while (true) {
    // Usable chains are closed under taking prefixes (a segment that others continue is never
    // removed, lives as long as they, and is exact or of their lineage), so "some usable chain
    // holds this block" is monotone: binary search.
    size_t low = 0;
    std::vector<SegmentId> candidates;
    while (low < high) {
      const size_t middle = (low + high + 1) / 2;
      PREFIXD_ASSIGN(std::vector<SegmentId> holders, usable_holders(middle));
      if (holders.empty()) {
        high = middle - 1;
      } else {
        low = middle;
        candidates = std::move(holders);
      }
    }
    Matcher matcher(core, tokens, accept, now);
    if (low == 0) {
      // Thousands of prompts may share a first token, or a chat's header, so only those that could
      // match most are looked at, and fewer opened.
      size_t limit = 32;
      for (size_t skip = 0;; skip += limit, limit *= 4) {
        const auto roots = core.tree.Roots(scope.id, tokens, skip, limit);
        for (const auto& [id, at_most] : roots) {
          if (!matcher.Beats(at_most)) PREFIXD_TRY(matcher.Consider(id, 0));
        }
        if (roots.empty() || matcher.Beats(roots.back().at_most)) break;
      }
      return matcher.best();
    }
    for (const SegmentId& id : candidates) {
      PREFIXD_TRY(matcher.Consider(id, static_cast<uint32_t>(low * block)));
      if (matcher.TakeUnreadable()) in_vain.insert(id);
    }
    if (matcher.best().n_tokens > 0) return matcher.best();
    for (const SegmentId& id : candidates) {
      const auto record = core.tree.Record(id);
      if (record.ok() && record->compressed()) in_vain.insert(id);
    }
    high = low - 1;  // the holders vanished, were damaged, or their ids differ: try shorter
  }
}

Result<RowsHeld> FindHeldRows(StoreCore& core, const SegmentId& id, TokenRange tokens) {
  const SegmentId segment = core.tree.Resolve(id).first;
  PREFIXD_ASSIGN(const ChainPin pin, core.tree.Pin(segment, tokens.end));
  const auto& chain = pin.chain();
  PREFIXD_ASSIGN(const RequestScope scope,
                 core.models->Resolve(chain.back().model, chain.back().tenant));
  const KvGeometry& geometry = scope.model.geometry;
  const auto tier = core.tier->Find(chain.back().tenant);
  RowsHeld held;
  for (size_t i = 0; i < chain.size(); ++i) {
    const uint32_t next = i + 1 < chain.size() ? chain[i + 1].tokens.begin : chain[i].tokens.end;
    const TokenRange used{std::max(tokens.begin, chain[i].tokens.begin),
                          std::min(tokens.end, next)};
    if (used.begin >= used.end) continue;
    PREFIXD_ASSIGN(const auto file, core.segments->Open(chain[i].id, Need::kIds));
    const StoredPart part{used, file->header().encoding, 0};
    uint64_t bytes = 0;
    for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
      const uint32_t heads = geometry.layer(layer).n_kv_heads;
      if (heads > 0) bytes += heads * RowsBytes({&part, 1}, geometry.row(layer), used);
    }
    // The rows lie behind the header's page and before the ids.
    const double share =
        tier ? tier->ShareOf(file->record().sequence, 1, file->layout().token_page) : 0;
    const auto here = static_cast<uint64_t>(std::llround(share * double(bytes)));
    held.memory_bytes += here;
    held.disk_bytes += bytes - here;
  }
  return held;
}

}  // namespace prefixd::storage
