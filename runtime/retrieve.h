// The retrieved part of a group's step: which mid tokens, and their rows.
#pragma once

#include <span>
#include <vector>

#include "attention/ledger.h"
#include "attention/selection.h"
#include "runtime/plan.h"
#include "runtime/scratch.h"

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

// What else a search may hand out; either may be null (index::SearchRequest).
struct SelectMore {
  std::vector<float>* scores = nullptr;
  std::vector<std::byte>* selected_keys = nullptr;
};
// A search of the plan's selector over what the head may retrieve. scratch: of the calling thread.
Result<Selection> SelectGroup(const SessionPlan& plan, size_t head, std::span<const float> q,
                              uint32_t k, const SelectMore& more, index::SearchScratch& scratch,
                              Ledger& ledger);

// The set of a step: an earlier step's that it shares, or a search's, with what shares its pages
// where the policy says so; `rows` are then its rows. Reads are added to `reads`.
Result<Selection> Retrieve(const SessionPlan& plan, size_t head, std::span<const float> q,
                           uint32_t k, const SelectMore& more, Scratch& scratch,
                           RetrievedRows& rows, storage::ReadStats& reads, Ledger& ledger);

}  // namespace prefixd
