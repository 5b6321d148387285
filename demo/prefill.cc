#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

#include "decoder/attention/local_attention.h"
#include "decoder/checkpoint/checkpoint.h"
#include "decoder/model/model.h"
#include "demo/answer.h"
#include "demo/commands.h"
#include "demo/events.h"
#include "demo/prefilled.h"
#include "prefixd/client.h"
#include "tensors/feature_map_file.h"

namespace prefixd::demo {
namespace {

using decoder::LocalAttention;
using decoder::Model;
using Clock = std::chrono::steady_clock;

constexpr DType kKvDtype = DType::kBf16;

Result<std::vector<std::filesystem::path>> FindFeatureMaps(const std::filesystem::path& model_dir) {
  std::vector<std::filesystem::path> files;
  std::error_code ec;
  for (const auto& entry : std::filesystem::directory_iterator(model_dir, ec)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("phi-") || entry.path().extension() != ".safetensors") continue;
    PREFIXD_TRY(LoadFeatureMaps(entry.path()));
    files.push_back(std::filesystem::absolute(entry.path()));
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Answers the question in the state that `attention` is in, and truncates it to that again.
Result<Answer> Ask(const Model& model, const std::vector<uint32_t>& question,
                   LocalAttention& attention, const AnswerOptions& options) {
  const uint32_t position = attention.position();
  std::vector<float> logits(model.config().vocab_size);
  PREFIXD_TRY(model.Forward(question, position, attention, 1, logits));
  auto answer = AnswerQuestion(model, attention, logits, attention.position(), options);
  attention.TruncateTo(position);
  return answer;
}

// Answers all questions with full attention over the prompt, in memory, and without the document.
// The first one's logits go with it, to compare.
Status AnswerAll(const Model& model, const Request& request, LocalAttention& with_prompt) {
  LocalAttention empty(model.Geometry(kKvDtype));
  for (uint32_t i = 0; i < request.questions.size(); ++i) {
    const Question& question = request.questions[i];
    AnswerOptions options{.tokens = request.answer_tokens, .question = i, .reading = {"own", {}}};
    options.keep_logits = i == 0;
    PREFIXD_ASSIGN(const Answer answer, Ask(model, question.tokens, with_prompt, options));
    Emit({{"event", "answer"},
          {"question", i},
          {"method", "own"},
          {"budget", nullptr},
          {"tokens", answer.tokens},
          {"logits", answer.logits},
          {"seconds", answer.seconds}});
    if (question.alone.empty()) continue;
    options = {.tokens = request.answer_tokens, .question = i, .reading = {"alone", {}}};
    PREFIXD_ASSIGN(const Answer alone, Ask(model, question.alone, empty, options));
    Emit({{"event", "answer"},
          {"question", i},
          {"method", "alone"},
          {"budget", nullptr},
          {"tokens", alone.tokens},
          {"seconds", alone.seconds}});
  }
  return {};
}

}  // namespace

Status RunPrefill(const std::string& address, const Request& request) {
  if (request.questions.empty()) return InvalidArgument("the request has no question");
  PREFIXD_ASSIGN(const Model model, Model::Load(request.model_dir, {}));
  ModelSpec spec;
  spec.name = std::filesystem::weakly_canonical(request.model_dir).filename().string();
  spec.geometry = model.Geometry(kKvDtype);
  PREFIXD_ASSIGN(spec.identity, decoder::ModelIdentity(request.model_dir, model.config()));
  PREFIXD_ASSIGN(spec.feature_maps, FindFeatureMaps(request.model_dir));
  PREFIXD_ASSIGN(const std::unique_ptr<Store> client, Connect(address));
  PREFIXD_TRY(client->RegisterModel(spec));

  // Times a cold prefill until the first answer token, as a decoder without prefixd does it.
  const auto n = static_cast<uint32_t>(request.prompt.size());
  const auto prefill_start = Clock::now();
  PREFIXD_ASSIGN(Prefilled prefilled,
                 Prefilled::Compute(model, spec.geometry, request.prompt, "cold prefill"));
  LocalAttention& local = prefilled.attention();
  const double prompt_s = SecondsSince(prefill_start);
  std::vector<float> logits(model.config().vocab_size);
  PREFIXD_TRY(model.Forward(request.questions.front().tokens, n, local, 1, logits));
  const double first_token_s = SecondsSince(prefill_start);
  local.TruncateTo(n);
  Emit({{"event", "prefilled"},
        {"model", spec.name},
        {"prompt_s", prompt_s},
        {"first_token_s", first_token_s}});

  const auto put_start = Clock::now();
  PREFIXD_ASSIGN(const PutResult stored, prefilled.Put(*client, spec.name, request.label));
  Emit({{"event", "stored"},
        {"prefix", stored.prefix},
        {"bytes", stored.bytes},
        {"seconds", SecondsSince(put_start)}});
  const auto ready_start = Clock::now();
  Progress summaries("summaries and choices");
  PREFIXD_TRY(
      client->WaitReady(stored.prefix, [&](uint64_t done, uint64_t total, std::string_view unit) {
        summaries.Update(done, total, unit);
        return true;
      }));
  Emit({{"event", "ready"}, {"seconds", SecondsSince(ready_start)}});
  return AnswerAll(model, request, local);
}

}  // namespace prefixd::demo
