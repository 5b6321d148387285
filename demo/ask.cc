#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

#include "decoder/attention/spliced_attention.h"
#include "decoder/model/model.h"
#include "demo/answer.h"
#include "demo/commands.h"
#include "demo/evaluate.h"
#include "demo/events.h"
#include "prefixd/client.h"

namespace prefixd::demo {
namespace {

using Clock = std::chrono::steady_clock;

uint64_t Bytes(const Ledger& ledger) {
  uint64_t bytes = 0;
  for (const uint64_t of_tier : ledger.physical_bytes) bytes += of_tier;
  return bytes;
}

}  // namespace

Status RunAsk(const std::string& address, const Request& request) {
  if (request.questions.empty() || request.asked.empty()) {
    return InvalidArgument("the request has no question, or no way of reading");
  }
  const std::vector<uint32_t>& question = request.questions.front().tokens;
  PREFIXD_ASSIGN(const StepPolicy policy, PolicyOf(request.asked.front()));
  // The question goes through in one piece, so that the prompt is read once for it, however long it
  // is.
  const auto piece = static_cast<uint32_t>(std::max<size_t>(question.size(), 512));
  PREFIXD_ASSIGN(const decoder::Model model,
                 decoder::Model::Load(request.model_dir, {.chunk_tokens = piece}));

  // Attaching by name refuses a damaged prefix with the reason. Attaching by tokens would only fail
  // to find it.
  const auto n = static_cast<uint32_t>(request.prompt.size());
  const auto start = Clock::now();
  PREFIXD_ASSIGN(const std::unique_ptr<Store> store, Connect(address));
  PREFIXD_ASSIGN(
      const std::shared_ptr<Session> session,
      store->Attach(
          {.model = request.model, .prefix = request.prefix, .n_tokens = n, .policy = policy}));
  const KvGeometry& geometry = session->info().geometry;
  const double attach_s = SecondsSince(start);
  decoder::SplicedAttention attention(session, decoder::BlockMode::kExact);
  std::vector<float> logits(model.config().vocab_size);
  PREFIXD_TRY(model.Forward(question, n, attention, 1, logits));
  const double first_token_s = SecondsSince(start);
  PREFIXD_ASSIGN(const SessionReport asked, session->report());
  const Ledger& exact = asked.total;

  PREFIXD_ASSIGN(const Answer answer, AnswerQuestion(model, attention, logits, attention.position(),
                                                     {.tokens = request.answer_tokens,
                                                      .reading = request.asked.front()}));
  const Ledger& steps = attention.step_ledger();
  Emit({{"event", "asked"},
        {"prompt_bytes", uint64_t{n} * geometry.token_bytes()},
        {"question_bytes", Bytes(exact)},
        {"question_ssd_bytes", exact.physical_bytes[size_t(Tier::kSsd)]},
        {"attach_ms", 1e3 * attach_s},
        {"first_token_ms", 1e3 * first_token_s},
        {"steps", steps.steps / (uint64_t{geometry.n_layers} * geometry.n_kv_heads)},
        {"tokens_per_step", steps.tokens_per_step()},
        {"bytes", Bytes(steps)},
        {"ssd_bytes", steps.physical_bytes[size_t(Tier::kSsd)]},
        {"scan_bytes", steps.scan_bytes},
        {"answer_ms", 1e3 * answer.seconds}});
  PREFIXD_TRY(session->Detach());
  return {};
}

}  // namespace prefixd::demo
