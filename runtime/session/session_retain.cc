// Chooses which own tokens of a session keep their rows in memory when they move, for each KV head
// by the retention policy of the session's plan.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "base/capture_errors.h"
#include "runtime/retention/rank_tokens.h"
#include "runtime/session/session_impl.h"

namespace prefixd {
namespace {

constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

// The rows of one KV head that are in memory, by ascending position in the prefix.
struct Held {
  std::vector<RowRef> rows;
  std::vector<uint32_t> positions;
  std::vector<double> memory;  // what the policy remembers of each; kNothing: nothing
  MemoryCharge charge;

  Status Reserve(const MemoryAccount& account, size_t n) {
    constexpr uint64_t kEach = sizeof(RowRef) + sizeof(uint32_t) + sizeof(double);
    PREFIXD_ASSIGN(charge, account.Take(MemoryKind::kScratch, n * kEach));
    rows.reserve(n), positions.reserve(n), memory.reserve(n);
    return {};
  }
  void Add(uint32_t position, RowRef row, double remembered = kNothing) {
    positions.push_back(position);
    rows.push_back(row);
    memory.push_back(remembered);
  }
  void Add(TokenRange at, const RowsView& view) {
    for (uint32_t i = 0; i < at.size(); ++i) Add(at.begin + i, {view.key(i), view.value(i)});
  }
  // Own tokens [moved, own.size()), of which the first lies at `position`.
  void Add(const OwnRows& own, uint32_t moved, uint32_t position, const RowShape& row) {
    const size_t first = rows.size();
    uint32_t left = own.size() - moved;
    for (uint32_t i = 0; i < left; ++i) Add(position + i, {});
    own.Visit(moved, own.size(), row, [&](const RowsView& run) {  // the last run comes first
      left -= static_cast<uint32_t>(run.count);
      for (size_t i = 0; i < run.count; ++i) rows[first + left + i] = {run.key(i), run.value(i)};
      return true;
    });
  }
  // The first row at or behind a position.
  uint32_t At(uint32_t position) const {
    return static_cast<uint32_t>(std::ranges::lower_bound(positions, position) - positions.begin());
  }
};

// What a policy ranks the own tokens of one KV head by when those before `to` move.
struct HeadMove {
  const SessionPlan& plan;
  const OwnRows& own;
  size_t head = 0;
  uint32_t n_tokens = 0;  // of the prefix that was attached
  TokenRange mid;         // of the prefix once they have moved
};

Result<Held> Gather(const HeadMove& move, storage::ReadStats& reads) {
  PreparedPrefix& prefix = *move.plan.prefix;
  const Partition& partition = prefix.partition();
  const RowShape row = prefix.row(move.head);
  PREFIXD_ASSIGN(const AnchorRows anchors, prefix.Anchors(move.head, &reads));
  const RetainedTokens* retained = move.plan.retained.get();
  TokenRange earlier;
  if (retained) earlier = retained->In(move.head, partition.mid);
  Held held;
  PREFIXD_TRY(held.Reserve(prefix.account(), partition.anchor_count() + earlier.size() +
                                                 move.own.size() - move.plan.moved));
  held.Add(partition.sink, anchors.sinks);
  if (retained) {
    const RetainedHead& of = retained->heads[move.head];
    const bool remembers = !of.memory.empty() && retained->by == move.plan.policy.retain.by;
    for (uint32_t i = earlier.begin; i < earlier.end; ++i) {
      held.Add(of.tokens[i], of.ref(i, row), remembers ? of.memory[i] : kNothing);
    }
  }
  held.Add(partition.tail, anchors.tail);
  held.Add(move.own, move.plan.moved, move.n_tokens + move.plan.moved, row);
  return held;
}

Result<RetainedHead> Choose(const HeadMove& move, const Held& held,
                            std::span<const SeenQueries::Query> queries) {
  const PreparedPrefix& prefix = *move.plan.prefix;
  const KvGeometry& geometry = prefix.model()->spec.geometry;
  const uint32_t layer = prefix.layer_of(move.head);
  const RowShape row = geometry.row(layer);
  const StepPolicy::Retain& retain = move.plan.policy.retain;
  PREFIXD_ASSIGN(const RetentionPolicy policy, RetentionPolicyFromName(retain.by));
  const uint32_t first = held.At(std::max(move.mid.begin, move.n_tokens));
  const TokenRange region{first, std::max(first, held.At(move.mid.end))};
  std::vector<SeenQuery> seen;
  for (const SeenQueries::Query& query : queries) {
    const uint32_t rows = held.At(move.n_tokens + query.own);
    if (rows > 0) seen.push_back({rows - 1, query.q});
  }
  const ShelvedScorers* scorers = move.plan.scorers.get();
  const RankInput in{.policy = policy,
                     .layer = geometry.layers[layer],
                     .group = geometry.group_size(layer),
                     .rows = ScatteredRows(held.rows, row),
                     .region = region,
                     .queries = seen,
                     .scorer = scorers ? &scorers->heads[move.head] : nullptr,
                     .past = std::span(held.memory).subspan(region.begin, region.size()),
                     .positions = held.positions};
  PREFIXD_ASSIGN(const MemoryCharge scratch,
                 prefix.account().Take(MemoryKind::kScratch, RankBytes(in)));
  const Ranking ranking = RankTokens(in);
  RetainedHead out;
  const std::vector<uint32_t> kept = HighestScored(ranking.scores, region, retain.tokens);
  PREFIXD_ASSIGN(out.charge, prefix.account().Take(MemoryKind::kOwnTokens,
                                                   RetainedHead::Bytes(kept.size(), row)));
  out.tokens.reserve(kept.size());
  if (!ranking.memory.empty()) out.memory.reserve(kept.size());
  out.rows.reserve(kept.size() * row.bytes());
  for (const uint32_t i : kept) {
    out.tokens.push_back(held.positions[i]);
    if (!ranking.memory.empty()) out.memory.push_back(ranking.memory[i - region.begin]);
    const RowRef& at = held.rows[i];
    out.rows.insert(out.rows.end(), at.key, at.key + row.key_bytes());
    out.rows.insert(out.rows.end(), at.value, at.value + row.value_bytes());
  }
  return out;
}

}  // namespace

void SessionImpl::NoteQueries(const SessionPlan& plan, size_t head, uint32_t own,
                              std::span<const float> q) {
  if (!Retains(plan.policy) || own == 0) return;
  std::shared_ptr<SeenQueries> seen;
  {
    std::lock_guard lock(mutex_);
    seen = seen_;
  }
  if (seen) seen->Note(head, own, q);
}

bool SessionImpl::Observes(const StepPolicy& policy) const {
  if (!Retains(policy)) return false;
  const auto by = RetentionPolicyFromName(policy.retain.by);
  return by.ok() && NeedsQueries(*by);
}

Status SessionImpl::BringScorers(SessionPlan& plan) {
  const StepPolicy::Retain& retain = plan.policy.retain;
  if (!Retains(plan.policy) || retain.by != "kvpop") return {};
  PREFIXD_ASSIGN(plan.scorers, services_->scorers->For(plan.prefix->model()->spec));
  return {};
}

Result<std::shared_ptr<const RetainedTokens>> SessionImpl::Retain(const State& state, uint32_t to,
                                                                  const std::stop_token& stop) {
  using Retained = std::shared_ptr<const RetainedTokens>;
  if (!Retains(state.plan->policy)) return Retained();
  auto retained = std::make_shared<RetainedTokens>();
  retained->by = state.plan->policy.retain.by;
  retained->heads.resize(heads_.count());
  const TokenRange mid = Partition::Of(info_.n_tokens + to, services_->options.anchors).mid;
  std::vector<storage::ReadStats> reads(heads_.count());
  const auto retain = [&](size_t head) -> Status {
    if (info_.geometry.layers[heads_.layer_of(head)].sliding_window > 0) return {};
    const OwnRows& own = state.own.heads[head];
    const HeadMove move{*state.plan, own, head, info_.n_tokens, mid};
    if (stop.stop_requested() || !plan().ok()) return Error{Code::kCancelled, "nobody needs it"};
    const Status chosen = CaptureErrors([&]() -> Status {
      PREFIXD_ASSIGN(const Held held, Gather(move, reads[head]));
      std::vector<SeenQueries::Query> queries;
      if (state.seen) queries = state.seen->Of(head, own.size());
      PREFIXD_ASSIGN(retained->heads[head], Choose(move, held, queries));
      return {};
    });
    // Moving gives memory back: it goes on all the same.
    return !chosen.ok() && chosen.error().code == Code::kResourceExhausted ? Status() : chosen;
  };
  const Status done =
      services_->pool.ParallelFor(heads_.count(), retain, WorkPriority::kBackground);
  {
    std::lock_guard lock(mutex_);
    AddReads(reads);
  }
  if (!done.ok()) return done.error();
  return Retained(std::move(retained));
}

}  // namespace prefixd
