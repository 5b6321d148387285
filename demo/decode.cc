#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "decoder/attention/spliced_attention.h"
#include "decoder/model/model.h"
#include "demo/answer.h"
#include "demo/commands.h"
#include "demo/evaluate.h"
#include "demo/events.h"
#include "demo/rows.h"
#include "prefixd/client.h"

namespace prefixd::demo {
namespace {

using Clock = std::chrono::steady_clock;
using decoder::BlockMode;
using nlohmann::json;

// Compares an answer over the stored rows with the decoder's own. Behind the first token that
// differs they are of different texts: there it says how much the decoder preferred its own, in
// nats.
json Agreement(const Answer& answer, const OwnAnswer& own) {
  const size_t both =
      std::min({answer.logits.size(), own.logits.size(), answer.tokens.size(), own.tokens.size()});
  double difference = 0;
  json preferred;
  size_t alike = 0;
  for (; alike < both; ++alike) {
    difference = std::max(difference, MaxLogitDifference(answer.logits[alike], own.logits[alike]));
    if (answer.tokens[alike] == own.tokens[alike]) continue;
    const TopLogits& of_own = own.logits[alike];
    const auto other =
        std::ranges::find(of_own, answer.tokens[alike], &TopLogits::value_type::first);
    preferred = other == of_own.end() ? of_own.front().second - of_own.back().second
                                      : of_own.front().second - other->second;
    break;
  }
  return {{"event", "agreement"},
          {"same_tokens", answer.tokens == own.tokens},
          {"tokens_alike", alike},
          {"preferred_by", preferred},
          {"max_logit_difference", difference}};
}

constexpr uint32_t kSweep[] = {1, 2, 3, 5, 7, 10};  // multiples of k_phi = 1% of the prompt

json BudgetJson(const Reading& reading) { return reading.budget ? json(*reading.budget) : json(); }

Result<std::shared_ptr<Session>> AttachAll(Store& store, const Request& request) {
  // A short prompt cannot pay for the default budget; each reading sets its own.
  PREFIXD_ASSIGN(
      std::shared_ptr<Session> session,
      store.Attach(
          {.model = request.model, .tokens = request.prompt, .policy = {.mode = StepMode::kFull}}));
  if (const uint32_t n = session->info().n_tokens; n != request.prompt.size()) {
    return Error{Code::kNotFound, "only " + std::to_string(n) + " of " +
                                      std::to_string(request.prompt.size()) +
                                      " prompt tokens are stored; prefill the prompt again"};
  }
  return session;
}

// Answers questions over one attached prompt. A question's tokens attend exactly, in one pass, and
// all readings go on from there: the answer's tokens are read under the budget. Only where anchors
// alone are read, the question is read so, too.
class Questions {
 public:
  Questions(const decoder::Model& model, const Request& request, std::shared_ptr<Session> session)
      : model_(model),
        request_(request),
        session_(std::move(session)),
        attention_(session_),
        logits_(model.config().vocab_size) {}

  // Runs the question's tokens through; the first answer token follows from them.
  Status Ask(uint32_t question) {
    question_ = question;
    return Feed(BlockMode::kExact);
  }

  Result<Answer> AnswerUnder(const Reading& reading, bool keep_logits) {
    PREFIXD_ASSIGN(const StepPolicy policy, PolicyOf(reading));
    PREFIXD_TRY(session_->SetPolicy(policy));
    const bool anchors = policy.mode == StepMode::kAnchors;
    const BlockMode mode = anchors ? BlockMode::kStep : BlockMode::kExact;
    if (mode != fed_) PREFIXD_TRY(Feed(mode));
    const uint32_t position = attention_.position();
    auto answer = AnswerQuestion(model_, attention_, logits_, position,
                                 {.tokens = request_.answer_tokens,
                                  .keep_logits = keep_logits,
                                  .question = question_,
                                  .reading = reading});
    attention_.TruncateTo(position);
    return answer;
  }

 private:
  Status Feed(BlockMode mode) {
    const uint32_t n = session_->info().n_tokens;
    fed_ = mode;
    attention_.TruncateTo(n);
    attention_.set_block_mode(mode);
    return model_.Forward(request_.questions[question_].tokens, n, attention_, 1, logits_);
  }

  const decoder::Model& model_;
  const Request& request_;
  std::shared_ptr<Session> session_;
  decoder::SplicedAttention attention_;
  uint32_t question_ = 0;
  BlockMode fed_ = BlockMode::kExact;  // how the question's tokens attended
  std::vector<float> logits_;
};

// Emits all answers, and how the first question's with everything read compares with the decoder's
// own.
Status AnswerAll(const Request& request, Questions& questions) {
  for (uint32_t i = 0; i < request.questions.size(); ++i) {
    const auto start = Clock::now();
    PREFIXD_TRY(questions.Ask(i));
    const double first_token_s = SecondsSince(start);
    for (const Reading& reading : request.asked) {
      const bool compared = i == 0 && request.own && reading.method == "full";
      auto answer = questions.AnswerUnder(reading, compared);
      if (!answer.ok() && answer.error().code == Code::kInfeasible) {
        Emit({{"event", "infeasible"},
              {"question", i},
              {"method", reading.method},
              {"budget", BudgetJson(reading)},
              {"reason", answer.error().message}});
        continue;
      }
      PREFIXD_TRY(answer);
      Emit({{"event", "answer"},
            {"question", i},
            {"method", reading.method},
            {"budget", BudgetJson(reading)},
            {"tokens", answer->tokens},
            {"first_token_s", first_token_s},
            {"seconds", answer->seconds}});
      if (!compared) continue;
      Emit(Agreement(*answer, *request.own));
    }
  }
  return {};
}

// Measures the rows of the table in the order of the request.
Status MeasureRows(Evaluator& evaluator, const Request& request) {
  Progress progress("decoding under budgets");
  for (size_t i = 0; i < request.readings.size(); ++i) {
    PREFIXD_ASSIGN(const Row row, evaluator.Run(request.readings[i]));
    json event = RowJson(row);
    event["event"] = "row";
    Emit(event);
    progress.Update(i + 1, request.readings.size(), "rows");
  }
  return {};
}

Result<BreakEven> MeasureBreakEven(Evaluator& evaluator, uint32_t prompt_tokens, bool with_phi) {
  Progress progress("break-even sweep");
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

Status RunDecode(const std::string& address, const Request& request) {
  if (request.questions.empty()) return InvalidArgument("the request has no question");
  PREFIXD_ASSIGN(const decoder::Model model, decoder::Model::Load(request.model_dir, {}));

  // Resuming means to connect, attach and run the question through, up to the first answer token.
  const auto resume_start = Clock::now();
  PREFIXD_ASSIGN(const std::unique_ptr<Store> client, Connect(address));
  PREFIXD_ASSIGN(const std::shared_ptr<Session> session, AttachAll(*client, request));
  const double attach_s = SecondsSince(resume_start);
  Questions questions(model, request, session);
  PREFIXD_TRY(questions.Ask(0));
  json resumed = SessionJson(session->info());
  resumed["event"] = "resumed";
  resumed["attach_s"] = attach_s;
  resumed["resume_s"] = SecondsSince(resume_start);
  PREFIXD_ASSIGN(const SessionReport resumed_report, session->report());
  const Ledger& first = resumed_report.total;
  resumed["ssd_bytes"] = first.physical_bytes[size_t(Tier::kSsd)];
  Emit(resumed);
  PREFIXD_TRY(AnswerAll(request, questions));

  PREFIXD_ASSIGN(const PrefixDetail detail, client->Prefix(request.prefix));
  Evaluator evaluator(model, request, session);
  PREFIXD_TRY(evaluator.RecordTruth());
  PREFIXD_TRY(MeasureRows(evaluator, request));
  const uint32_t n = session->info().n_tokens;
  PREFIXD_ASSIGN(const BreakEven sweep, MeasureBreakEven(evaluator, n, session->info().d_phi > 0));
  Emit({{"event", "measured"},
        {"entropy", evaluator.entropy()},
        {"choices", ChoicesJson(detail.choices)},
        {"break_even", BreakEvenJson(sweep)}});
  PREFIXD_TRY(session->Detach());
  return {};
}

Status RunCold(const std::string& address, const Request& request) {
  PREFIXD_ASSIGN(const decoder::Model model, decoder::Model::Load(request.model_dir, {}));
  PREFIXD_ASSIGN(const std::unique_ptr<Store> client, Connect(address));
  PREFIXD_ASSIGN(const std::shared_ptr<Session> session, AttachAll(*client, request));
  Evaluator evaluator(model, request, session);
  Progress progress("cold reads");
  for (size_t i = 0; i < request.readings.size(); ++i) {
    const Reading& reading = request.readings[i];
    PREFIXD_ASSIGN(const StepPolicy policy, PolicyOf(reading));
    if (policy.estimator.kind == EstimatorKind::kPhi && session->info().d_phi == 0) continue;
    const Status set = session->SetPolicy(policy);
    if (!set.ok() && set.error().code == Code::kInfeasible) continue;
    PREFIXD_TRY(set);
    // The first token is not counted, because it loads the selector's keys into memory.
    PREFIXD_ASSIGN(Evaluator::Continuation run, evaluator.Continue(2));
    PREFIXD_ASSIGN(run, evaluator.Continue(request.cold_tokens + 1));
    Emit({{"event", "cold"},
          {"method", reading.method},
          {"budget", BudgetJson(reading)},
          {"bytes_per_step", run.ssd_bytes + run.host_bytes},
          {"ms_per_token", run.ms_per_token}});
    progress.Update(i + 1, request.readings.size(), "rows");
  }
  PREFIXD_TRY(session->Detach());
  return {};
}

}  // namespace prefixd::demo
