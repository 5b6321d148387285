#include "demo/decode.h"

#include <cmath>
#include <cstdio>
#include <vector>

#include "decoder/generate.h"
#include "decoder/model.h"
#include "decoder/spliced_attention.h"
#include "decoder/tokenizer.h"
#include "demo/evaluate.h"
#include "demo/progress.h"
#include "demo/report.h"
#include "demo/state.h"
#include "prefixd/client.h"

namespace prefixd::demo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kBudgets[] = {0.01, 0.02, 0.03, 0.04, 0.05};
constexpr size_t kColdTokens = 33;
constexpr uint32_t kSweep[] = {1, 2, 3, 5, 7, 10};  // multiples of k_phi = 1% of the prompt

// Measures the rows of the table: one full read, then each method under each budget.
Result<std::vector<Row>> MeasureRows(Evaluator& evaluator) {
  ProgressLine progress("decoding under budgets");
  const size_t total = 1 + (Methods().size() - 1) * std::size(kBudgets);
  std::vector<Row> rows;
  for (const Method& method : Methods()) {
    for (const double budget : kBudgets) {
      const bool full = method.mode == StepMode::kFull;
      PREFIXD_ASSIGN(Row row, evaluator.Run(method, full ? std::nullopt : std::optional(budget)));
      rows.push_back(std::move(row));
      progress.Update(rows.size(), total, "rows");
      if (full) break;
    }
  }
  return rows;
}

Result<BreakEven> MeasureBreakEven(Evaluator& evaluator, uint32_t prompt_tokens, bool with_phi) {
  ProgressLine progress("break-even sweep");
  BreakEven sweep;
  sweep.k_phi = static_cast<uint32_t>(std::ceil(0.01 * prompt_tokens));
  for (const uint32_t multiple : kSweep) {
    const uint32_t k = multiple * sweep.k_phi;
    PREFIXD_ASSIGN(const Evaluator::Timing timing, evaluator.TimeAtK(EstimatorKind::kNone, k));
    sweep.topk.emplace_back(k, timing);
    progress.Update(sweep.topk.size(), std::size(kSweep) + 2, "points");
  }
  PREFIXD_ASSIGN(const Evaluator::Timing moment,
                 evaluator.TimeAtK(EstimatorKind::kMoment, sweep.k_phi));
  sweep.completion.emplace_back("topk_moment", moment);
  if (with_phi) {
    PREFIXD_ASSIGN(const Evaluator::Timing phi,
                   evaluator.TimeAtK(EstimatorKind::kPhi, sweep.k_phi));
    sweep.completion.emplace_back("topk_phi", phi);
  }
  return sweep;
}

}  // namespace

Status RunDecode(const DecodeOptions& options) {
  PREFIXD_ASSIGN(const DemoState state, LoadState(options.state_file));
  PREFIXD_ASSIGN(const decoder::Model model, decoder::Model::Load(state.model_dir, {}));
  PREFIXD_ASSIGN(const auto tokenizer, decoder::ByteTokenizer::For(model.config()));

  // Resuming means to connect, attach and run the question through, up to the first answer token.
  Report report{.state = state};
  const auto resume_start = Clock::now();
  PREFIXD_ASSIGN(const std::unique_ptr<Store> client, Connect(options.address));
  PREFIXD_ASSIGN(const std::shared_ptr<Session> session,
                 client->Attach({.model = state.model, .tokens = state.prompt}));
  report.attach_s = SecondsSince(resume_start);
  const uint32_t n = session->info().n_tokens;
  if (n != state.prompt.size()) {
    return Error{Code::kInternal, "only " + std::to_string(n) + " of " +
                                      std::to_string(state.prompt.size()) +
                                      " prompt tokens are stored"};
  }
  decoder::SplicedAttention resumed(session);
  const std::vector<uint32_t> question =
      tokenizer.Encode(state.facts.front().Question(), /*with_bos=*/false);
  std::vector<float> logits(model.config().vocab_size);
  PREFIXD_TRY(model.Forward(question, n, resumed, 1, logits));
  report.resume_s = SecondsSince(resume_start);
  report.first_token_same = decoder::Argmax(logits) == state.own_answers.front().front();
  std::printf(
      "   attach: %.1f ms; until the first answer token: %.1f ms, %.0f times faster than the "
      "cold prefill (%.2f s)\n",
      1e3 * report.attach_s, 1e3 * report.resume_s, state.cold_prefill_s / report.resume_s,
      state.cold_prefill_s);

  PREFIXD_ASSIGN(const PrefixDetail detail, client->Prefix(state.prefix));
  report.session = session->info();
  Evaluator evaluator(model, tokenizer, state, session);
  PREFIXD_ASSIGN(report.agreement, evaluator.RecordTruth());
  std::printf("   reading everything: %s tokens as without prefixd, logits within %.1e\n",
              report.agreement.same_tokens ? "the same" : "NOT the same",
              report.agreement.max_logit_difference);
  PREFIXD_ASSIGN(report.rows, MeasureRows(evaluator));
  PREFIXD_ASSIGN(report.break_even, MeasureBreakEven(evaluator, n, session->info().d_phi > 0));
  report.entropy = evaluator.entropy();
  report.choices = detail.choices;
  PREFIXD_ASSIGN(const SessionReport ledger, session->Detach());
  report.ledger = ledger.total;

  PrintTable(report);
  return WriteJson(report, options.json_file);
}

Status RunCold(const DecodeOptions& options) {
  PREFIXD_ASSIGN(const DemoState state, LoadState(options.state_file));
  PREFIXD_ASSIGN(const decoder::Model model, decoder::Model::Load(state.model_dir, {}));
  PREFIXD_ASSIGN(const auto tokenizer, decoder::ByteTokenizer::For(model.config()));
  PREFIXD_ASSIGN(const std::unique_ptr<Store> client, Connect(options.address));
  PREFIXD_ASSIGN(const std::shared_ptr<Session> session,
                 client->Attach({.model = state.model, .tokens = state.prompt}));
  Evaluator evaluator(model, tokenizer, state, session);
  ProgressLine progress("cold reads");
  std::vector<ColdRow> rows;
  for (const Method& method : Methods()) {
    for (const double budget : kBudgets) {
      const bool full = method.mode == StepMode::kFull;
      const auto of_row = full ? std::nullopt : std::optional(budget);
      if (method.estimator.kind == EstimatorKind::kPhi && session->info().d_phi == 0) continue;
      const Status set = session->SetPolicy(Evaluator::PolicyOf(method, of_row));
      if (!set.ok() && set.error().code == Code::kInfeasible) continue;
      PREFIXD_TRY(set);
      // The first token is not counted, because it loads the selector's keys into memory.
      PREFIXD_ASSIGN(Evaluator::Continuation run, evaluator.Continue(2));
      PREFIXD_ASSIGN(run, evaluator.Continue(kColdTokens));
      rows.push_back({method.name, of_row, run.ssd_bytes + run.host_bytes, run.ms_per_token});
      progress.Update(rows.size(), 1 + (Methods().size() - 1) * std::size(kBudgets), "rows");
      if (full) break;
    }
  }
  PrintCold(rows);
  return AddColdToJson(rows, options.json_file);
}

}  // namespace prefixd::demo
