#include "demo/evaluate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "attention/reference/diagnostics.h"
#include "attention/step/step.h"
#include "decoder/model/generate.h"
#include "demo/events.h"

namespace prefixd::demo {

using Clock = std::chrono::steady_clock;

const std::vector<Method>& Methods() {
  static const std::vector<Method> methods = {
      {"full", StepMode::kFull, EstimatorKind::kNone},
      {"sink_tail", StepMode::kAnchors, EstimatorKind::kNone},
      {"topk", StepMode::kRetrieve, EstimatorKind::kNone},
      {"topk_phi", StepMode::kRetrieve, EstimatorKind::kPhi},
      {"topk_moment", StepMode::kRetrieve, EstimatorKind::kMoment},
      {"topk_auto", StepMode::kRetrieve, EstimatorKind::kAuto},
  };
  return methods;
}

Result<StepPolicy> PolicyOf(const Reading& reading) {
  for (const Method& method : Methods()) {
    if (method.name != reading.method) continue;
    StepPolicy policy{.mode = method.mode, .estimator = method.estimator};
    if (reading.budget) policy.budget = *reading.budget;
    return policy;
  }
  return InvalidArgument("there is no method '" + reading.method + "'");
}

Evaluator::Evaluator(const decoder::Model& model, const Request& request,
                     std::shared_ptr<Session> session)
    : model_(model),
      request_(request),
      session_(session),
      attention_(session, decoder::BlockMode::kStep) {}

Status Evaluator::RecordTruth() {
  PREFIXD_TRY(session_->SetPolicy({.mode = StepMode::kFull}));
  // The queries of evenly spaced tokens of the continuation are recorded while the decoder reads
  // everything.
  const KvGeometry& geometry = session_->info().geometry;
  const uint32_t n = session_->info().n_tokens;
  const std::vector<uint32_t>& continuation = request_.continuation;
  const size_t spacing =
      std::max<size_t>(1, continuation.size() / std::max(1u, request_.recorded_tokens));
  decoder::ObservedAttention observed(
      attention_, [&](uint32_t layer, uint32_t first, uint32_t, std::span<const float> q) {
        if ((first - n) % spacing != 0) return;
        if (layer == 0) recorded_.emplace_back();
        recorded_.back().q.emplace_back(q.begin(), q.end());
      });
  for (size_t i = 0; i < continuation.size(); ++i) {
    PREFIXD_TRY(
        model_.Forward({&continuation[i], 1}, n + static_cast<uint32_t>(i), observed, 0, {}));
  }
  attention_.TruncateTo(n);
  std::vector<float> lse(geometry.n_q_heads);
  for (Recorded& token : recorded_) {
    for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
      std::vector<float> y(size_t{geometry.n_q_heads} * geometry.value_dim);
      PREFIXD_TRY(session_->Step(layer, token.q[layer], y, lse, nullptr));
      token.y.push_back(std::move(y));
    }
  }
  return MeasureEntropy();
}

Status Evaluator::MeasureEntropy() {
  const KvGeometry& geometry = session_->info().geometry;
  const Partition partition = Partition::Of(session_->info().n_tokens, session_->info().anchors);
  const uint32_t group = geometry.group_size(0);
  std::vector<std::byte> rows(partition.mid.size() * geometry.row(0).bytes());
  std::vector<float> scores(size_t{group} * partition.mid.size());
  entropy_.assign(size_t{geometry.n_layers} * geometry.n_q_heads, 0);
  for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
    for (uint32_t head = 0; head < geometry.n_kv_heads; ++head) {
      PREFIXD_TRY(session_->ReadRange(layer, head, partition.mid, rows));
      const RowsView view{rows.data(), partition.mid.size(), geometry.row(0).bytes(),
                          geometry.row(0)};
      for (const Recorded& token : recorded_) {
        const std::span<const float> q =
            std::span(token.q[layer])
                .subspan(size_t{head} * group * geometry.key_dim, size_t{group} * geometry.key_dim);
        Scores(q, group, geometry.layers[layer], view, scores);
        for (uint32_t g = 0; g < group; ++g) {
          entropy_[size_t{layer} * geometry.n_q_heads + head * group + g] +=
              NormalizedEntropy(std::span(scores).subspan(g * view.count, view.count)) /
              static_cast<double>(recorded_.size());
        }
      }
    }
  }
  return {};
}

Result<std::vector<double>> Evaluator::Errors() {
  const KvGeometry& geometry = session_->info().geometry;
  const size_t dim = geometry.value_dim;
  std::vector<double> errors(size_t{geometry.n_layers} * geometry.n_q_heads, 0);
  std::vector<float> y(geometry.n_q_heads * dim), lse(geometry.n_q_heads);
  for (const Recorded& token : recorded_) {
    for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
      PREFIXD_TRY(session_->Step(layer, token.q[layer], y, lse, nullptr));
      for (uint32_t head = 0; head < geometry.n_q_heads; ++head) {
        errors[size_t{layer} * geometry.n_q_heads + head] +=
            RelativeL1(std::span(y).subspan(head * dim, dim),
                       std::span(token.y[layer]).subspan(head * dim, dim)) /
            static_cast<double>(recorded_.size());
      }
    }
  }
  return errors;
}

std::vector<double> Evaluator::ByQuartile(const std::vector<double>& errors) const {
  std::vector<size_t> order(errors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return entropy_[a] < entropy_[b]; });
  std::vector<double> means(4, 0);
  for (size_t quartile = 0; quartile < 4; ++quartile) {
    const size_t begin = quartile * order.size() / 4, end = (quartile + 1) * order.size() / 4;
    for (size_t i = begin; i < end; ++i) {
      means[quartile] += errors[order[i]] / static_cast<double>(end - begin);
    }
  }
  return means;
}

Result<Row> Evaluator::Run(const Reading& reading) {
  Row row;
  row.reading = reading;
  PREFIXD_ASSIGN(const StepPolicy policy, PolicyOf(reading));
  if (policy.estimator.kind == EstimatorKind::kPhi && session_->info().d_phi == 0) {
    row.feasible = false;
    row.reason = "the model has no feature maps";
    return row;
  }
  if (Status set = session_->SetPolicy(policy); !set.ok()) {
    if (set.error().code != Code::kInfeasible) return std::move(set).error();
    row.feasible = false;
    row.reason = set.error().message;
    return row;
  }
  PREFIXD_ASSIGN(row.rel_l1_by_head, Errors());
  row.rel_l1 = std::accumulate(row.rel_l1_by_head.begin(), row.rel_l1_by_head.end(), 0.0) /
               static_cast<double>(row.rel_l1_by_head.size());
  row.rel_l1_by_quartile = ByQuartile(row.rel_l1_by_head);

  PREFIXD_ASSIGN(const Continuation run, Continue(request_.continuation.size()));
  row.nll = run.nll;
  row.ms_per_token = run.ms_per_token;
  row.ssd_bytes_per_step = run.ssd_bytes;
  row.host_bytes_per_step = run.host_bytes;
  row.bytes_per_step = run.ssd_bytes + run.host_bytes;
  row.scan_bytes_per_step = run.scan_bytes;
  row.tokens_per_step = run.tokens;
  row.k = static_cast<uint32_t>(std::lround(run.retrieved_tokens));
  return row;
}

Result<Evaluator::Continuation> Evaluator::Continue(size_t max_tokens) {
  const uint32_t n = session_->info().n_tokens;
  const std::vector<uint32_t>& continuation = request_.continuation;
  const size_t count = std::min(max_tokens, continuation.size()) - 1;  // the last is only scored
  PREFIXD_ASSIGN(const SessionReport report_before, session_->report());
  const Ledger& before = report_before.total;
  const auto start = Clock::now();
  Continuation run;
  std::vector<float> logits(model_.config().vocab_size);
  for (size_t i = 0; i < count; ++i) {
    PREFIXD_TRY(
        model_.Forward({&continuation[i], 1}, n + static_cast<uint32_t>(i), attention_, 1, logits));
    run.nll += decoder::NegativeLogLikelihood(logits, continuation[i + 1]);
  }
  const double seconds = SecondsSince(start);
  attention_.TruncateTo(n);
  PREFIXD_ASSIGN(const SessionReport report_after, session_->report());
  const Ledger& after = report_after.total;

  const auto tokens = static_cast<double>(count);
  const auto per_token = [&](uint64_t end, uint64_t begin) {
    return static_cast<double>(end - begin) / tokens;
  };
  const auto head_steps = static_cast<double>(after.steps - before.steps);
  run.nll /= tokens;
  run.ms_per_token = 1e3 * seconds / tokens;
  run.ssd_bytes = per_token(after.physical_bytes[size_t(Tier::kSsd)],
                            before.physical_bytes[size_t(Tier::kSsd)]);
  run.host_bytes = per_token(after.physical_bytes[size_t(Tier::kHost)],
                             before.physical_bytes[size_t(Tier::kHost)]);
  run.scan_bytes = per_token(after.scan_bytes, before.scan_bytes);
  run.tokens = (after.tokens_per_step() * static_cast<double>(after.steps) -
                before.tokens_per_step() * static_cast<double>(before.steps)) /
               head_steps;
  run.retrieved_tokens =
      static_cast<double>(after.retrieved_tokens - before.retrieved_tokens) / head_steps;
  return run;
}

Result<Evaluator::Timing> Evaluator::TimeAtK(const EstimatorVariant& estimator, uint32_t k) {
  const KvGeometry& geometry = session_->info().geometry;
  PREFIXD_TRY(session_->SetPolicy({.estimator = estimator, .k = k}));
  std::vector<float> y(size_t{geometry.n_q_heads} * geometry.value_dim), lse(geometry.n_q_heads);
  Ledger before;
  for (const bool warm : {false, true}) {  // the first round loads the rows into memory
    if (warm) {
      PREFIXD_ASSIGN(const SessionReport report, session_->report());
      before = report.total;
    }
    for (const Recorded& token : recorded_) {
      for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
        PREFIXD_TRY(session_->Step(layer, token.q[layer], y, lse, nullptr));
      }
    }
  }
  PREFIXD_ASSIGN(const SessionReport report_after, session_->report());
  const Ledger& after = report_after.total;
  const auto ms = [&](uint64_t end, uint64_t begin) {
    return static_cast<double>(end - begin) / 1e6 / static_cast<double>(recorded_.size());
  };
  return Timing{ms(after.read_ns, before.read_ns), ms(after.compute_ns, before.compute_ns),
                ms(after.select_ns, before.select_ns)};
}

}  // namespace prefixd::demo
