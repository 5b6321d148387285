#include "runtime/step/retrieve.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "index/ranking/group_ranking.h"
#include "runtime/prefix/head_keys.h"
#include "runtime/step/charges.h"

namespace prefixd {
Status RetrievedRows::Read(PreparedPrefix& prefix, size_t head, std::span<const uint32_t> ids,
                           std::span<const std::byte> selected_keys, storage::ReadStats& reads) {
  const size_t key_bytes = prefix.row(head).key_bytes();
  PREFIXD_ASSIGN(const HeadKeys keys, HeadKeys::Of(prefix, head, Bring::kLater, &reads));
  const bool selected = selected_keys.size() == ids.size() * key_bytes;
  const bool known = keys.resident() || selected;
  PREFIXD_TRY(prefix.stored().ViewRows(prefix.layer_of(head), prefix.kv_head_of(head), ids,
                                       known ? storage::RowPart::kValue : storage::RowPart::kRow,
                                       views_, &reads));
  for (size_t i = 0; known && i < ids.size(); ++i) {
    views_.rows[i].key = keys.resident() ? keys.key(ids[i]) : selected_keys.data() + i * key_bytes;
  }
  return {};
}

void SearchGroups(size_t head, std::span<GroupSearch> searches, index::SearchScratch& scratch) {
  if (searches.empty()) return;
  const SessionPlan& first = *searches.front().plan;
  PreparedPrefix& prefix = *first.prefix;
  const KvGeometry& geometry = prefix.model()->spec.geometry;
  const uint32_t layer = prefix.layer_of(head);
  Ledger spent;  // all searches together
  storage::ReadStats reads;
  std::vector<index::SearchRequest> requests;
  const Status status = [&]() -> Status {
    const index::KeyIndex* index = nullptr;
    std::optional<HeadKeys> keys;
    {
      StageTimer timer(spent.read_ns);
      // The index is loaded first: it stays in memory in any case, keys only where room is left.
      PREFIXD_ASSIGN(index, prefix.Index(head, first.selector, &reads));
      // A search by codes reads few exact keys, so a prompt's first step does not wait for all of
      // them.
      const bool few = index->kind() == index::IndexKind::kCodes;
      PREFIXD_ASSIGN(keys, HeadKeys::Of(prefix, head, few ? Bring::kLater : Bring::kNow, &reads));
    }
    StageTimer timer(spent.select_ns);
    for (const GroupSearch& search : searches) {
      index::SearchRequest& request = requests.emplace_back();
      keys->Into(request);
      request.scratch = &scratch;
      request.queries = search.q;
      request.group = geometry.group_size(layer);
      request.layer = geometry.layers[layer];
      request.candidates = keys->Searched(prefix.partition().mid);
      request.k = search.k;
      request.scores = search.scores;
      request.selected_keys = search.selected_keys;
    }
    std::vector<Result<Selection>> found = index->SearchMany(requests);
    for (size_t i = 0; i < searches.size(); ++i) {
      if (found[i].ok()) keys->ToTokens(*found[i]);
      searches[i].found = std::move(found[i]);
    }
    return {};
  }();
  for (size_t i = 0; i < searches.size(); ++i) {
    GroupSearch& search = searches[i];
    Ledger& ledger = *search.ledger;
    // Reads are charged also when the search failed.
    ChargeReads(ShareOf(reads, searches.size(), i), ledger);
    ledger.read_ns += ShareOf(spent.read_ns, searches.size(), i);
    ledger.select_ns += ShareOf(spent.select_ns, searches.size(), i);
    if (!status.ok()) search.found = status.error();
    if (!search.found.ok()) continue;
    ledger.selections += 1;
    ledger.retrievals += 1;
    ledger.keys_scanned += search.found->keys_scanned;
    ledger.scan_bytes += search.found->bytes_scanned;
  }
}

RetrievedSet SetToShare(const SessionPlan& plan, size_t head, std::span<const uint32_t> set,
                        std::span<const Cut> cuts, std::span<const float> scores) {
  const auto third = static_cast<uint32_t>(set.size() / 3);
  const uint32_t reach = plan.policy.sharing.dilation;
  std::vector<uint32_t> best;
  if (third > 0 && reach > 0) {
    best = SelectByGroupMax(scores, static_cast<uint32_t>(cuts.size()),
                            static_cast<uint32_t>(set.size()), third, 0,
                            /*scores_complete=*/false)
               .ids;
    for (uint32_t& id : best) id = set[id];
  }
  std::vector<uint32_t> ids = Dilated(set, best, reach, plan.prefix->partition().mid);
  plan.prefix->DropMissing(head, ids);
  return {std::move(ids), MakeCutOffsets(cuts, scores), std::make_shared<GatheredRowsSlot>()};
}

}  // namespace prefixd
