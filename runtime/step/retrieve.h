// Retrieves for steps: selects mid tokens and finds their rows.
#pragma once

#include <span>
#include <vector>

#include "prefixd/ledger.h"
#include "prefixd/selection.h"
#include "runtime/step/plan.h"
#include "runtime/work/scratch.h"

namespace prefixd {

// Holds the rows of `ids` in place, pinned for as long as this object lives.
class RetrievedRows {
 public:
  explicit RetrievedRows(storage::RowViews& views) : views_(views) {}
  ~RetrievedRows() { views_.hold.reset(); }
  RetrievedRows(const RetrievedRows&) = delete;
  RetrievedRows& operator=(const RetrievedRows&) = delete;

  // Reads values alone where the keys are in memory, or where selection has just read them
  // (`selected_keys`, densely; empty: it has not). Borrows these keys.
  Status Read(PreparedPrefix& prefix, size_t head, std::span<const uint32_t> ids,
              std::span<const std::byte> selected_keys, storage::ReadStats& reads);
  RowsView rows(RowShape shape) const { return ScatteredRows(views_.rows, shape); }

 private:
  storage::RowViews& views_;
};

// One group's search, by its plan's selector, over the tokens that its head may retrieve.
struct GroupSearch {
  const SessionPlan* plan = nullptr;
  std::span<const float> q;  // [G][key_dim]
  uint32_t k = 0;
  Ledger* ledger = nullptr;
  // Further outputs; either may be null (index::SearchRequest).
  std::vector<float>* scores = nullptr;
  std::vector<std::byte>* selected_keys = nullptr;
  Result<Selection> found = Selection{};  // out
};
// Searches for one head of one prefix with one kind of index: codes and keys are read once for all
// searches, and each search is charged its share of reads and time. scratch: the calling thread's.
void SearchGroups(size_t head, std::span<GroupSearch> searches, index::SearchScratch& scratch);

// Returns what later steps may share of a set that was searched for: the set, the neighbours of its
// best third by score, and its cuts relative to its scores.
//   scores: [G][set.size()]
RetrievedSet SetToShare(const SessionPlan& plan, size_t head, std::span<const uint32_t> set,
                        std::span<const Cut> cuts, std::span<const float> scores);

}  // namespace prefixd
