// The retrieved part of steps: which mid tokens, and their rows.
#pragma once

#include <span>
#include <vector>

#include "prefixd/ledger.h"
#include "prefixd/selection.h"
#include "runtime/step/plan.h"
#include "runtime/work/scratch.h"

namespace prefixd {

// Rows of `ids` where they lie, until this goes.
class RetrievedRows {
 public:
  explicit RetrievedRows(storage::RowViews& views) : views_(views) {}
  ~RetrievedRows() { views_.hold.reset(); }
  RetrievedRows(const RetrievedRows&) = delete;
  RetrievedRows& operator=(const RetrievedRows&) = delete;

  // Where their keys are in memory, or selection has just read them (`selected_keys`, densely;
  // empty: it has not), values alone are read. Borrows them.
  Status Read(PreparedPrefix& prefix, size_t head, std::span<const uint32_t> ids,
              std::span<const std::byte> selected_keys, storage::ReadStats& reads);
  RowsView rows(RowShape shape) const { return ScatteredRows(views_.rows, shape); }

 private:
  storage::RowViews& views_;
};

// One group's search, by its plan's selector, over what its head may retrieve.
struct GroupSearch {
  const SessionPlan* plan = nullptr;
  std::span<const float> q;  // [G][key_dim]
  uint32_t k = 0;
  Ledger* ledger = nullptr;
  // What else it hands out; either may be null (index::SearchRequest).
  std::vector<float>* scores = nullptr;
  std::vector<std::byte>* selected_keys = nullptr;
  Result<Selection> found = Selection{};  // out
};
// Searches of one head of one prefix with one kind of index: codes and keys are read once for all
// of them, and each is charged its share of reads and of time. scratch: of the calling thread.
void SearchGroups(size_t head, std::span<GroupSearch> searches, index::SearchScratch& scratch);

// What later steps may share of a set that was searched for: it, and the neighbours of its best
// third by score; and how far its cuts reach beyond it.
//   scores: [G][set.size()]
RetrievedSet SetToShare(const SessionPlan& plan, size_t head, std::span<const uint32_t> set,
                        std::span<const Cut> cuts, std::span<const float> scores);

}  // namespace prefixd
