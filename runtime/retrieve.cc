#include "runtime/retrieve.h"

#include <algorithm>
#include <optional>

#include "attention/step.h"
#include "runtime/charges.h"
#include "runtime/head_keys.h"

namespace prefixd {
namespace {

// The tokens of the mid region whose values lie in the pages that reading `ids` takes anyway.
Status AddPageNeighbours(PreparedPrefix& prefix, size_t head, std::vector<uint32_t>& ids) {
  PREFIXD_ASSIGN(ids, prefix.stored().SharingPages(prefix.layer_of(head), prefix.kv_head_of(head),
                                                   ids, storage::RowPart::kValue));
  const TokenRange mid = prefix.partition().mid;
  std::erase_if(ids, [&](uint32_t id) { return id < mid.begin || id >= mid.end; });
  return {};
}

// What later steps may share of a retrieved set: it, and the neighbours of its best third by score.
//   chosen: the set. read, rows: what was read of the mid region, the set among it
std::vector<uint32_t> SetToShare(const SessionPlan& plan, size_t head, std::span<const float> q,
                                 std::span<const uint32_t> chosen, std::span<const uint32_t> read,
                                 const RowsView& rows, std::vector<float>& buffer) {
  const KvGeometry& geometry = plan.prefix->model()->spec.geometry;
  const auto third = static_cast<uint32_t>(chosen.size() / 3);
  const uint32_t reach = plan.policy.sharing.dilation;
  std::vector<uint32_t> best;
  if (third > 0 && reach > 0) {
    const auto scores = Scratch::Take(buffer, geometry.group_size() * rows.count);
    Scores(q, geometry.group_size(), geometry.layers[plan.prefix->layer_of(head)], rows, scores);
    const auto n = static_cast<uint32_t>(rows.count);
    const GroupRanking ranking = RankByGroupMax(scores, geometry.group_size(), n, third);
    for (uint32_t i = 0; i < third; ++i) best.push_back(read[ranking.best[i]]);
  }
  return Dilated(chosen, best, reach, plan.Candidates(head));
}

}  // namespace

Status RetrievedRows::Read(PreparedPrefix& prefix, size_t head, std::span<const uint32_t> ids,
                           std::span<const std::byte> selected_keys, storage::ReadStats& reads) {
  const size_t key_bytes = prefix.model()->spec.geometry.row().key_bytes();
  PREFIXD_ASSIGN(const HeadKeys keys, HeadKeys::Of(prefix, head, &reads));
  const bool selected = selected_keys.size() == ids.size() * key_bytes;
  const bool known = keys.resident() || selected;
  PREFIXD_TRY(prefix.stored().ViewRows(prefix.layer_of(head), prefix.kv_head_of(head), ids,
                                       known ? storage::RowPart::kValue : storage::RowPart::kRow,
                                       views_, &reads));
  for (size_t i = 0; known && i < ids.size(); ++i) {
    views_.rows[i].key = keys.resident()
                             ? keys.resident()->key(ids[i] - prefix.partition().mid.begin)
                             : selected_keys.data() + i * key_bytes;
  }
  return {};
}

Result<Selection> SelectGroup(const SessionPlan& plan, size_t head, std::span<const float> q,
                              uint32_t k, const SelectMore& more, index::SearchScratch& scratch,
                              Ledger& ledger) {
  PreparedPrefix& prefix = *plan.prefix;
  const KvGeometry& geometry = prefix.model()->spec.geometry;
  ReadCharge charge(ledger);
  index::SearchRequest request;
  const index::KeyIndex* index = &prefix.exact();
  std::optional<HeadKeys> keys;
  {
    StageTimer timer(ledger.read_ns);
    // The index first: it is in memory in any case, keys only where there is room beside it.
    PREFIXD_ASSIGN(index, prefix.Index(head, plan.selector, &charge.reads));
    PREFIXD_ASSIGN(keys, HeadKeys::Of(prefix, head, &charge.reads));
  }
  keys->Into(request);
  request.scratch = &scratch;
  StageTimer timer(ledger.select_ns);
  request.queries = q;
  request.group = geometry.group_size();
  request.layer = geometry.layers[prefix.layer_of(head)];
  request.candidates = plan.Candidates(head);
  request.k = k;
  request.rule = plan.policy.group_rule;
  request.scores = more.scores;
  request.selected_keys = more.selected_keys;
  PREFIXD_ASSIGN(auto selection, index->Search(request));
  // Of what a window hides nothing is known.
  if (request.candidates != prefix.partition().mid) {
    selection.cuts.assign(request.group, Cut{});
  }
  ledger.selections += 1;
  ledger.retrievals += 1;
  ledger.keys_scanned += selection.keys_scanned;
  ledger.scan_bytes += selection.bytes_scanned;
  return selection;
}

Result<Selection> Retrieve(const SessionPlan& plan, size_t head, std::span<const float> q,
                           uint32_t k, const SelectMore& more, Scratch& scratch,
                           RetrievedRows& rows, storage::ReadStats& reads, Ledger& ledger) {
  Selection selection;
  const SharedSet shared = plan.shared ? plan.shared->Find(head, q) : nullptr;
  const KvGeometry& geometry = plan.prefix->model()->spec.geometry;
  if (shared) {
    selection.ids = *shared;
    selection.cuts.resize(geometry.group_size());  // none: nobody has looked for this query
    ledger.selections += 1;
  } else {
    PREFIXD_ASSIGN(selection, SelectGroup(plan, head, q, k, more, scratch.search, ledger));
  }
  std::span<const std::byte> selected_keys;
  if (!shared && more.selected_keys) selected_keys = *more.selected_keys;
  const std::vector<uint32_t> chosen = selection.ids;
  {
    StageTimer timer(ledger.read_ns);
    if (plan.policy.page_granular) {
      PREFIXD_TRY(AddPageNeighbours(*plan.prefix, head, selection.ids));
    }
    PREFIXD_TRY(rows.Read(*plan.prefix, head, selection.ids, selected_keys, reads));
  }
  if (plan.shared && !shared) {
    StageTimer timer(ledger.select_ns);
    plan.shared->Keep(head, q,
                      SetToShare(plan, head, q, chosen, selection.ids, rows.rows(geometry.row()),
                                 scratch.scores));
  }
  return selection;
}

}  // namespace prefixd
