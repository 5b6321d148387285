#include "runtime/ingest/compress.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "attention/reference/diagnostics.h"
#include "attention/step/budget.h"
#include "attention/step/step.h"
#include "index/ranking/group_ranking.h"
#include "prefixd/policy.h"
#include "runtime/retention/rank_tokens.h"
#include "runtime/retention/redundancy.h"
#include "runtime/retention/scorer_file.h"
#include "runtime/step/estimator_input.h"
#include "runtime/summaries/head_choice.h"
#include "runtime/summaries/materialised_summaries.h"
#include "storage/segment/stored_part.h"
#include "tensors/safetensors.h"

namespace prefixd {
namespace {

// What a step retrieves where the default budget cannot pay for its anchors and its summary.
constexpr uint32_t kLeastRetrieved = 32;

// What all heads of one compression have in common.
struct CompressInputs {
  const DerivedContext& context;
  const Model& model;
  const storage::StoredPrefix& prefix;
  const QuerySamples* samples;
  RetentionPolicy policy;
  std::span<const TokenScorer> scorers;  // [heads], of policy kKvPop
  TokenRange own;                        // of the last segment
  TokenRange region;                     // of them, between sinks and tail
  uint32_t n_kept = 0;                   // of the region
  Partition measured;                    // what all sampled queries saw
  KeptSummaries kept;                    // of its mid region
};

// The kept queries are dealt out in turn: the policy sees those at even places, and what it did is
// measured with the others.
bool ForPolicy(size_t sample) { return sample % 2 == 0; }

struct HeadErrors {
  double before = 0, after = 0;  // sums over queries and query heads
  size_t count = 0;
  uint32_t k = 0;
};

// Compresses one head. All of its rows are in memory meanwhile.
class HeadCompression {
 public:
  HeadCompression(const CompressInputs& in, size_t head)
      : in_(in),
        head_(head),
        layer_(in.model.heads.layer_of(head)),
        kv_head_(in.model.heads.head_of(head)),
        shape_(in.model.spec.geometry.layer(layer_)),
        row_(shape_.row()),
        geometry_(in.model.spec.geometry.layers[layer_]) {}

  Status Run(std::vector<uint32_t>& kept, HeadErrors& errors) {
    const uint32_t n = in_.prefix.n_tokens();
    if (in_.samples == nullptr && in_.scorers.empty()) {
      Choose(kept);
      return {};
    }
    PREFIXD_ASSIGN(
        const MemoryCharge memory,
        in_.context.MemoryOf(in_.prefix.info().tenant).Take(MemoryKind::kIngest, Bytes()));
    rows_.resize(size_t{n} * row_.bytes());
    for (uint32_t at = 0, end = 0; at < n; at = end) {
      end = std::min(n, RunEnd(in_.prefix.parts(), at, kRunTokens));
      PREFIXD_TRY(in_.prefix.ReadRange(
          layer_, kv_head_, {at, end},
          std::span(rows_).subspan(at * row_.bytes(), (end - at) * row_.bytes()), nullptr));
    }
    Choose(kept);
    return in_.samples == nullptr ? Status() : Measure(kept, errors);
  }

 private:
  // Rows, scores of one query, what the policy's queries saw, and how alike keys are.
  uint64_t Bytes() const {
    const uint64_t n = in_.prefix.n_tokens();
    const uint64_t queries =
        NeedsQueries(in_.policy) ? (in_.samples->layers[layer_].positions.size() + 1) / 2 : 0;
    return n * (row_.bytes() + 2 * shape_.group_size() * sizeof(float)) +
           queries * in_.region.size() * sizeof(double) +
           (in_.policy == RetentionPolicy::kGkv ? RedundancyBytes(in_.region, row_) : 0);
  }
  RowsView Rows(TokenRange tokens) const {
    return {rows_.data() + tokens.begin * row_.bytes(), tokens.size(), row_.bytes(), row_};
  }
  std::span<const float> Queries(size_t sample) const {
    const QuerySamples::Layer& layer = in_.samples->layers[layer_];
    const size_t group = shape_.group_size();
    return std::span(layer.q).subspan((sample * shape_.n_q_heads + kv_head_ * group) * row_.key_dim,
                                      group * row_.key_dim);
  }

  std::vector<double> TokenScores() const {
    std::vector<SeenQuery> seen;
    if (NeedsQueries(in_.policy)) {
      const auto& positions = in_.samples->layers[layer_].positions;
      for (size_t s = 0; s < positions.size(); ++s) {
        if (ForPolicy(s)) seen.push_back({positions[s], Queries(s)});
      }
    }
    return RankTokens({.policy = in_.policy,
                       .layer = geometry_,
                       .group = shape_.group_size(),
                       .rows = rows_.empty() ? RowsView{} : Rows({0, in_.prefix.n_tokens()}),
                       .region = in_.region,
                       .queries = seen,
                       .scorer = in_.scorers.empty() ? nullptr : &in_.scorers[head_]})
        .scores;
  }

  void Choose(std::vector<uint32_t>& kept) const {
    const auto best = HighestScored(TokenScores(), in_.region, in_.n_kept);
    for (uint32_t t = in_.own.begin; t < in_.region.begin; ++t) kept.push_back(t);
    kept.insert(kept.end(), best.begin(), best.end());
    for (uint32_t t = in_.region.end; t < in_.own.end; ++t) kept.push_back(t);
  }

  Status Measure(std::span<const uint32_t> kept, HeadErrors& errors) {
    const TokenRange mid = in_.measured.mid;
    if (mid.size() == 0) return {};
    const auto of = in_.kept.find(EstimatorVariant(EstimatorKind::kMoment));
    if (of == in_.kept.end() || !of->second.contains(head_)) return {};
    const EstimatorSummary& summary = of->second.at(head_)->summary;
    // What steps may retrieve: all of the mid region, and what is left of it.
    std::vector<uint32_t> all, left;
    for (uint32_t t = mid.begin; t < mid.end; ++t) all.push_back(t);
    for (uint32_t t = mid.begin; t < std::min(mid.end, in_.own.begin); ++t) left.push_back(t);
    std::ranges::copy_if(kept, std::back_inserter(left),
                         [&](uint32_t t) { return mid.contains(t); });
    const double row_bytes = storage::MeanRowBytes(in_.prefix.parts(), row_);
    const auto plan = PlanBudget(
        in_.measured.tail.end, in_.context.options.anchors, StepPolicy().budget,
        EstimatorTokens(in_.context.options, row_, EstimatorKind::kMoment, nullptr, row_bytes));
    errors.k = std::min(plan.ok() && plan->k > 0 ? plan->k : kLeastRetrieved, mid.size());
    const uint32_t group = shape_.group_size();
    const TokenRange seen{0, in_.measured.tail.end};
    std::vector<float> exact(size_t{group} * row_.value_dim), lse(group), scores;
    const size_t samples = in_.samples->layers[layer_].positions.size();
    for (size_t s = 0; s < samples; ++s) {
      if (ForPolicy(s) || in_.samples->layers[layer_].positions[s] + 1 < seen.end) continue;
      const auto q = Queries(s);
      PREFIXD_TRY(ExactAttention(q, group, geometry_, Rows(seen), exact, lse));
      scores.resize(size_t{group} * mid.size());
      Scores(q, group, geometry_, Rows(mid), scores);
      PREFIXD_ASSIGN(const double before, ErrorOf(q, scores, all, errors.k, summary, exact));
      PREFIXD_ASSIGN(const double after, ErrorOf(q, scores, left, errors.k, summary, exact));
      errors.before += before;
      errors.after += after;
      errors.count += group;
    }
    return {};
  }

  // Returns the sum over the group of a step's errors, where it retrieves the k best of
  // `candidates`. scores: [G][mid].
  Result<double> ErrorOf(std::span<const float> q, std::span<const float> scores,
                         std::span<const uint32_t> candidates, uint32_t k,
                         const EstimatorSummary& summary, std::span<const float> exact) {
    const TokenRange mid = in_.measured.mid;
    const uint32_t group = shape_.group_size();
    const auto n = static_cast<uint32_t>(candidates.size());
    std::vector<float> own(size_t{group} * n);
    for (uint32_t g = 0; g < group; ++g) {
      for (uint32_t i = 0; i < n; ++i) {
        own[size_t{g} * n + i] = scores[size_t{g} * mid.size() + (candidates[i] - mid.begin)];
      }
    }
    const bool whole = n == mid.size();
    Selection found = SelectByGroupMax(own, group, n, k, 0, whole);
    if (!whole && found.ids.size() == n) found.cuts.assign(group, Cut{});
    std::vector<RowRef> retrieved;
    for (const uint32_t i : found.ids) {
      const std::byte* row = rows_.data() + candidates[i] * row_.bytes();
      retrieved.push_back({row, row + row_.key_bytes()});
    }
    GroupStepInput step;
    step.queries = q;
    step.group = group;
    step.layer = geometry_;
    step.sinks = Rows(in_.measured.sink);
    step.tail = Rows(in_.measured.tail);
    if (!retrieved.empty()) step.retrieved = ScatteredRows(retrieved, row_);
    step.mid_count = mid.size();
    step.cuts = found.cuts;
    EstimatorInput estimator;
    if (found.ids.size() < mid.size()) {
      estimator.Attach(EstimatorKind::kMoment, summary, nullptr, head_, step);
    }
    std::vector<float> y(exact.size()), lse(group), rho(group);
    PREFIXD_TRY(GroupStep(step, {y, lse, rho}));
    double sum = 0;
    for (uint32_t g = 0; g < group; ++g) {
      const size_t at = size_t{g} * row_.value_dim;
      sum += RelativeL1(std::span<const float>(y).subspan(at, row_.value_dim),
                        exact.subspan(at, row_.value_dim));
    }
    return sum;
  }

  const CompressInputs& in_;
  const size_t head_;
  const uint32_t layer_, kv_head_;
  const LayerShape shape_;
  const RowShape row_;
  const LayerGeometry geometry_;
  std::vector<std::byte> rows_;
};

Status CheckSpec(const Model& model, const CompressSpec& spec, RetentionPolicy policy,
                 const QuerySamples* samples) {
  if (!(spec.keep > 0 && spec.keep < 1) || !(spec.max_error >= 0)) {
    return InvalidArgument("keep is a fraction between 0 and 1, and max_error at least 0");
  }
  const KvGeometry& g = model.spec.geometry;
  for (uint32_t l = 0; l < g.n_layers; ++l) {
    if (g.layer(l).n_kv_heads == 0 || model.Summarised(l)) continue;
    return Error{Code::kFailedPrecondition,
                 "layer " + std::to_string(l) + " of model '" + model.spec.name +
                     "' has a sliding window or a softcap, and therefore no summaries: rows that "
                     "are dropped would be lost"};
  }
  if ((policy == RetentionPolicy::kKvPop) == spec.scorers.empty()) {
    return InvalidArgument(spec.scorers.empty()
                               ? "policy kvpop needs the file of its scorers; python -m "
                                 "prefixd.retention --train makes one"
                               : "scorers are of policy kvpop alone, not of " + spec.policy);
  }
  const bool queries = samples != nullptr && !samples->empty();
  if (!queries && NeedsQueries(policy)) {
    return Error{Code::kFailedPrecondition,
                 "policy " + spec.policy +
                     " ranks tokens by queries of the prefill, and the put of this prefix kept "
                     "none; use policy window or kvpop, or put the prompt with its queries"};
  }
  if (!queries && spec.max_error > 0) {
    return Error{Code::kFailedPrecondition,
                 "the put of this prefix kept no queries, so no error can be measured; leave out "
                 "max_error"};
  }
  return {};
}

CompressReport SumErrors(const CompressInputs& in, std::span<const HeadErrors> errors) {
  CompressReport report;
  double before = 0, after = 0;
  size_t count = 0;
  for (size_t head = 0; head < errors.size(); ++head) {
    const HeadErrors& e = errors[head];
    if (e.count == 0) continue;
    const uint32_t layer = in.model.heads.layer_of(head);
    if (report.layers.empty() || report.layers.back().layer != layer) {
      report.layers.push_back({layer});
    }
    CompressReport::Layer& of = report.layers.back();
    const auto n = static_cast<double>(e.count);
    const double heads = in.model.heads.heads_in(layer);
    of.error_before += e.before / n / heads;
    of.error_after += e.after / n / heads;
    of.worst_after = std::max(of.worst_after, e.after / n);
    before += e.before;
    after += e.after;
    count += e.count;
    report.retrieved_tokens = std::max(report.retrieved_tokens, e.k);
    const uint32_t group = in.model.spec.geometry.group_size(layer);
    report.queries_measured =
        std::max(report.queries_measured, static_cast<uint32_t>(e.count / group));
  }
  if (count == 0) return report;
  report.measured_tokens = in.measured.tail.end;
  report.error_before = before / static_cast<double>(count);
  report.error_after = after / static_cast<double>(count);
  return report;
}

}  // namespace

Result<Compression> PlanCompression(const DerivedContext& context, const Model& model,
                                    const storage::StoredPrefix& prefix, const CompressSpec& spec,
                                    const QuerySamples* samples, WorkProgress& progress) {
  PREFIXD_ASSIGN(const RetentionPolicy policy, RetentionPolicyFromName(spec.policy));
  PREFIXD_TRY(CheckSpec(model, spec, policy, samples));
  if (samples != nullptr && samples->empty()) samples = nullptr;
  const Anchors anchors = context.options.anchors;
  const uint32_t n = prefix.n_tokens();
  const storage::PrefixInfo& info = prefix.info();
  MemoryCharge scorers_memory;
  std::vector<TokenScorer> scorers;
  if (policy == RetentionPolicy::kKvPop) {
    PREFIXD_ASSIGN(const SafetensorsFile file, SafetensorsFile::Open(spec.scorers));
    PREFIXD_ASSIGN(scorers_memory,
                   context.MemoryOf(info.tenant).Take(MemoryKind::kIngest, ScorerBytes(file)));
    PREFIXD_ASSIGN(scorers, LoadScorers(file, model.spec));
  }
  CompressInputs in{context, model, prefix, samples, policy, scorers, {n - info.own_tokens, n},
                    {},      0,     {},     {}};
  const TokenRange mid = Partition::Of(n, anchors).mid;
  in.region = {std::max(in.own.begin, mid.begin), std::max(in.own.begin, mid.end)};
  in.region.end = std::max(in.region.begin, in.region.end);
  in.n_kept = static_cast<uint32_t>(std::ceil(spec.keep * in.region.size()));
  if (in.n_kept >= in.region.size()) {
    return Error{Code::kFailedPrecondition,
                 "the segment in which the prefix ends has " + std::to_string(info.own_tokens) +
                     " tokens, of which none would be dropped; join it with the one before "
                     "(prefixctl prefixes compact), or keep less"};
  }
  if (!scorers.empty()) {
    const uint32_t window = scorers.front().window;
    const uint32_t scored = std::clamp(n - std::min(n, window), in.region.begin, in.region.end);
    if (in.n_kept <= in.region.end - scored) {
      return Error{Code::kFailedPrecondition,
                   "all " + std::to_string(in.n_kept) + " tokens that would stay are among the " +
                       std::to_string(window) +
                       " newest ones, which scorers do not rank; keep more, or use policy window"};
    }
  }
  const size_t heads = HeadCount(model);
  progress.total = heads;
  if (samples != nullptr) {
    const uint32_t seen = std::min(n, LastQuarterBegin(samples->prompt_tokens));
    // Where all own tokens are newer than what the queries have in common, nothing can be measured.
    if (seen > in.region.begin) in.measured = Partition::Of(seen, anchors);
  }
  if (in.measured.mid.size() > 0) {
    PREFIXD_ASSIGN(const auto parts, ChainParts(context.segments, info, in.measured.tail.end));
    HeadsOfVariants wanted;
    for (size_t head = 0; head < heads; ++head) wanted[EstimatorKind::kMoment].push_back(head);
    PREFIXD_ASSIGN(in.kept, LoadMaterialised({context, model, prefix, parts, in.measured.mid,
                                              nullptr, std::numeric_limits<uint64_t>::max(),
                                              WorkPriority::kBackground, nullptr},
                                             wanted));
  }
  if (spec.max_error > 0 && in.measured.mid.size() == 0) {
    return Error{
        Code::kFailedPrecondition,
        "the queries that the put kept have not seen the rows that would be dropped, so no "
        "error can be measured; leave out max_error"};
  }
  Compression out;
  out.kept.resize(heads);
  std::vector<HeadErrors> errors(heads);
  const auto compress = [&](size_t head) -> Status {
    PREFIXD_TRY(progress.Check());
    PREFIXD_TRY(HeadCompression(in, head).Run(out.kept[head], errors[head]));
    ++progress.done;
    return {};
  };
  PREFIXD_TRY(context.pool.ParallelFor(heads, compress, WorkPriority::kBackground));
  out.report = SumErrors(in, errors);
  out.report.own_tokens = info.own_tokens;
  out.report.kept_tokens = static_cast<uint32_t>(out.kept.front().size());
  if (NeedsQueries(policy)) {
    for (const QuerySamples::Layer& layer : samples->layers) {
      const auto scored = static_cast<uint32_t>((layer.positions.size() + 1) / 2);
      out.report.queries_scored = std::max(out.report.queries_scored, scored);
    }
  }
  return out;
}

}  // namespace prefixd
