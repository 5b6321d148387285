#include "runtime/step/exact_pass.h"

#include <algorithm>
#include <utility>

#include "prefixd/merge.h"
#include "runtime/step/charges.h"
#include "storage/segment/stored_part.h"

namespace prefixd {
namespace {

// Bounds the queries of an exact pass that are attended with between two looks at the call's end:
// by products of elements, but at least so many, as fewer cost more each.
struct Piece {
  size_t products;
  uint32_t least;
};
constexpr Piece kPiece{1u << 28, 128};
constexpr Piece kSharedPiece{1u << 25, 16};  // where other tenants wait

// Computes exact attention of a task's queries over the whole prefix, streamed once, or the part of
// it that the turn allows.
class ExactVisit {
 public:
  ExactVisit(const StepParts& parts, GroupTask& task, uint32_t n_queries, StepTurn& turn)
      : parts_(parts),
        task_(task),
        pass_(task.exact),
        n_(n_queries),
        turn_(turn),
        prefix_(*task.plan->prefix),
        layer_(prefix_.layer_of(task.head)),
        row_(prefix_.row(task.head)),
        scratch_(parts.scratch.Acquire()),
        run_y_(Scratch::Take(scratch_->y, task.y.size())),
        run_lse_(Scratch::Take(scratch_->lse, task.lse.size())) {}

  // Returns whether the pass has ended. Charges bytes and time, not steps.
  Result<bool> Run() {
    if (pass_.queries > 0 && !pass_.first) {
      std::ranges::copy(pass_.y, run_y_.begin());
      std::ranges::copy(pass_.lse, run_lse_.begin());
    }
    const Times times{task_.ledger, compute_ns_};
    ReadCharge charge(task_.ledger);
    StageTimer timer(times.all_ns);
    const auto visit = [this](std::span<const RowRef> refs) { return Attend(refs); };
    const Status status =
        prefix_.stored().VisitRows(layer_, prefix_.kv_head_of(task_.head), scratch_->retrieved,
                                   visit, pass_.place, &charge.reads);
    if (stopped_) return false;
    PREFIXD_TRY(status);
    task_.ledger.logical_bytes +=
        storage::RowsBytes(prefix_.stored().parts(), row_, TokenRange{0, prefix_.n_tokens()});
    return true;
  }

 private:
  struct Times {  // charges also when something throws
    Ledger& ledger;
    const uint64_t& compute_ns;
    mutable uint64_t all_ns = 0;
    ~Times() {
      ledger.compute_ns += compute_ns;
      ledger.read_ns += all_ns - compute_ns;
    }
  };

  // Ends the visit, which goes on from here.
  Status Stop() {
    if (pass_.queries > 0 && !pass_.first) {
      pass_.y.assign(run_y_.begin(), run_y_.end());
      pass_.lse.assign(run_lse_.begin(), run_lse_.end());
    }
    stopped_ = true;
    return Error{Code::kCancelled, "another tenant's turn"};
  }

  Status Attend(std::span<const RowRef> refs) {
    StageTimer timer(compute_ns_);
    const RowsView rows = ScatteredRows(refs, row_);
    const size_t products = std::max<size_t>(1, rows.count * (row_.key_dim + row_.value_dim));
    while (pass_.queries < n_) {
      // The first piece of a turn is done in any case.
      if (std::exchange(worked_, true) && !turn_.GoesOn()) return Stop();
      PREFIXD_TRY(CheckCall());
      const Piece piece = turn_.shared() ? kSharedPiece : kPiece;
      const uint32_t least = std::max(piece.least, parts_.compute.queries_at_once());
      const auto run = static_cast<uint32_t>(std::max<size_t>(least, piece.products / products));
      const uint32_t some = std::min(run, n_ - pass_.queries);
      PREFIXD_TRY(AttendSome(rows, pass_.queries, some));
      pass_.queries += some;
    }
    pass_.queries = 0;
    if (std::exchange(pass_.first, false)) return {};
    for (uint32_t i = 0; i < n_; ++i) {
      const size_t at = size_t{i} * row_.value_dim;
      MergeStates(task_.y.subspan(at, row_.value_dim), &task_.lse[i],
                  run_y_.subspan(at, row_.value_dim), run_lse_[i]);
    }
    return {};
  }

  // Attends with queries [begin, begin + n): their sums do not depend on others'.
  Status AttendSome(const RowsView& rows, uint32_t begin, uint32_t n) {
    const auto to_y = pass_.first ? task_.y : run_y_;
    const auto to_lse = pass_.first ? task_.lse : run_lse_;
    return parts_.compute.AttendExact(
        task_.q.subspan(size_t{begin} * row_.key_dim, size_t{n} * row_.key_dim), n,
        prefix_.model()->spec.geometry.layers[layer_], rows,
        to_y.subspan(size_t{begin} * row_.value_dim, size_t{n} * row_.value_dim),
        to_lse.subspan(begin, n));
  }

  const StepParts& parts_;
  GroupTask& task_;
  PassState& pass_;
  const uint32_t n_;
  StepTurn& turn_;
  const PreparedPrefix& prefix_;
  const uint32_t layer_;
  const RowShape row_;
  const ScratchPool::Lease scratch_;
  const std::span<float> run_y_, run_lse_;  // states over one batch
  uint64_t compute_ns_ = 0;
  bool worked_ = false, stopped_ = false;
};

}  // namespace

bool IsExact(const GroupTask& task) {
  return task.n_queries > 0 || task.plan->policy.mode == StepMode::kFull;
}

Result<bool> RunExactPass(const StepParts& parts, GroupTask& task, StepTurn& turn) {
  const bool step = task.n_queries == 0;
  const uint32_t group = task.group();
  PREFIXD_ASSIGN(const bool ended,
                 ExactVisit(parts, task, step ? group : task.n_queries, turn).Run());
  if (!ended || !step) return ended;
  const Partition& partition = task.plan->prefix->partition();
  task.rho_z.assign(group, 0);
  if (task.plan->policy.report_missing) task.missing.assign(group, {0, true});
  task.ledger.anchor_tokens += partition.anchor_count();
  task.ledger.retrieved_tokens += partition.mid.size();
  return true;
}

}  // namespace prefixd
