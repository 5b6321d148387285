#include "demo/ask.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "decoder/generate.h"
#include "decoder/model.h"
#include "decoder/spliced_attention.h"
#include "decoder/tokenizer.h"
#include "demo/progress.h"
#include "demo/state.h"
#include "prefixd/client.h"

namespace prefixd::demo {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

// This only parses the budget; the daemon decides whether it can be paid.
Result<StepPolicy> PolicyOf(std::string_view budget) {
  if (budget == "all") return StepPolicy{.mode = StepMode::kFull};
  const bool per_cent = budget.ends_with('%');
  const char* end = budget.data() + budget.size() - per_cent;
  double value = 0;
  const auto [at, ec] = std::from_chars(budget.data(), end, value);
  if (ec != std::errc{} || at != end || !std::isfinite(value)) {
    return InvalidArgument("the budget is a fraction of the prompt such as 0.01 or 1%, or 'all'; " +
                           ("not '" + std::string(budget) + "'"));
  }
  return StepPolicy{.budget = per_cent ? value / 100 : value};
}

// A question begins on its own line, like those in the model's training.
Result<std::string> QuestionOf(const AskOptions& options, const DemoState& state) {
  if (!options.question) {
    if (!state.facts.empty()) return state.facts.front().Question();
    return InvalidArgument("no facts are planted in the stored prompt; give a --question");
  }
  if (options.question->find_first_not_of('\n') == std::string::npos) {
    return InvalidArgument("the question is empty");
  }
  return options.question->starts_with('\n') ? *options.question : "\n" + *options.question;
}

// Returns a byte of text in a form that is safe on a terminal: a model's output must not move the
// cursor.
char Shown(char c) {
  const auto byte = static_cast<unsigned char>(c);
  const bool control = (byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7f;
  return control ? '?' : c;
}

void Print(std::string_view text) {
  for (const char c : text) std::putchar(Shown(c));
  std::fflush(stdout);
}

uint64_t Bytes(const Ledger& ledger) {
  uint64_t bytes = 0;
  for (const uint64_t of_tier : ledger.physical_bytes) bytes += of_tier;
  return bytes;
}
uint64_t SsdBytes(const Ledger& ledger) { return ledger.physical_bytes[size_t(Tier::kSsd)]; }

std::string Size(double bytes) {
  const char* const unit = bytes < 1024 ? "B" : bytes < (1 << 20) ? "KiB" : "MiB";
  const double value = bytes < 1024 ? bytes : bytes < (1 << 20) ? bytes / 1024 : bytes / (1 << 20);
  char text[32];
  std::snprintf(text, sizeof text, bytes < 1024 ? "%.0f %s" : "%.1f %s", value, unit);
  return text;
}

struct Asked {
  uint32_t prompt_tokens = 0, question_tokens = 0;
  uint64_t prompt_bytes = 0;
  double attach_ms = 0, first_token_ms = 0, generate_ms = 0;
  std::string text;
  Ledger question;          // attaching and the exact pass
  Ledger generated;         // everything after the question
  uint64_t step_count = 0;  // tokens run under the budget, each through all layers

  double PerStep(double sum) const {
    return step_count == 0 ? 0 : sum / static_cast<double>(step_count);
  }
  double BytesPerStep() const { return PerStep(static_cast<double>(Bytes(generated))); }
  double SsdBytesPerStep() const { return PerStep(static_cast<double>(SsdBytes(generated))); }
  double PerCentPerStep() const { return 100 * BytesPerStep() / static_cast<double>(prompt_bytes); }
};

// Streams the text to stdout unless options.json is set.
Result<Asked> Generate(const AskOptions& options, const DemoState& state, const StepPolicy& policy,
                       const std::string& question) {
  // The question goes through in one piece, so that the prompt is read once for it, however long it
  // is.
  const auto piece = static_cast<uint32_t>(std::max<size_t>(question.size(), 512));
  PREFIXD_ASSIGN(const decoder::Model model,
                 decoder::Model::Load(state.model_dir, {.chunk_tokens = piece}));
  PREFIXD_ASSIGN(const auto tokenizer, decoder::ByteTokenizer::For(model.config()));
  const std::vector<uint32_t> tokens = tokenizer.Encode(question, /*with_bos=*/false);
  Asked asked;
  asked.prompt_tokens = static_cast<uint32_t>(state.prompt.size());
  asked.question_tokens = static_cast<uint32_t>(tokens.size());

  // Attaching by name refuses a damaged prefix with the reason. Attaching by tokens would only fail
  // to find it.
  const auto start = Clock::now();
  PREFIXD_ASSIGN(const std::unique_ptr<Store> store, Connect(options.address));
  PREFIXD_ASSIGN(const std::shared_ptr<Session> session,
                 store->Attach({.model = state.model,
                                .prefix = state.prefix,
                                .n_tokens = asked.prompt_tokens,
                                .policy = policy}));
  const KvGeometry& geometry = session->info().geometry;
  asked.prompt_bytes = uint64_t{asked.prompt_tokens} * geometry.token_bytes();
  asked.attach_ms = 1e3 * SecondsSince(start);

  decoder::SplicedAttention attention(session, decoder::BlockMode::kExact);
  std::vector<float> logits(model.config().vocab_size);
  PREFIXD_TRY(model.Forward(tokens, asked.prompt_tokens, attention, 1, logits));
  asked.first_token_ms = 1e3 * SecondsSince(start);
  asked.question = session->report().total;

  if (!options.json) Print(std::string_view(question).substr(1));
  const auto generate_start = Clock::now();
  const auto on_token = [&](uint32_t token) {
    const std::string text = tokenizer.Decode({&token, 1});
    if (!options.json) Print(text);
    asked.text += text;
    return true;
  };
  auto generated = decoder::GreedyDecode(
      model, attention, logits, attention.position(),
      {.max_tokens = options.tokens, .stop = model.config().eos, .on_token = on_token});
  if (!options.json) std::putchar('\n');
  if (!generated.ok()) return std::move(generated).error();
  asked.generate_ms = 1e3 * SecondsSince(generate_start);
  asked.generated = attention.step_ledger();
  asked.step_count = asked.generated.steps / (uint64_t{geometry.n_layers} * geometry.n_kv_heads);
  PREFIXD_TRY(session->Detach());
  return asked;
}

void PrintReads(const Asked& asked) {
  std::printf(
      "attach and question (%u tokens, exact): %s read, %s from SSD; first token after %.1f ms\n",
      asked.question_tokens, Size(static_cast<double>(Bytes(asked.question))).c_str(),
      Size(static_cast<double>(SsdBytes(asked.question))).c_str(), asked.first_token_ms);
  if (asked.step_count == 0) return;
  std::printf(
      "%llu steps, each %.1f token-equivalents per head: %s read, %s from SSD, %.2f%% of the "
      "prompt; %.1f ms\n",
      static_cast<unsigned long long>(asked.step_count), asked.generated.tokens_per_step(),
      Size(asked.BytesPerStep()).c_str(), Size(asked.SsdBytesPerStep()).c_str(),
      asked.PerCentPerStep(), asked.PerStep(asked.generate_ms));
}

void PrintJson(const AskOptions& options, const DemoState& state, const std::string& question,
               const Asked& asked) {
  const json all = {
      {"prefix", state.prefix},
      {"prompt_tokens", asked.prompt_tokens},
      {"prompt_bytes", asked.prompt_bytes},
      {"question", question},
      {"question_tokens", asked.question_tokens},
      {"question_bytes", Bytes(asked.question)},
      {"question_ssd_bytes", SsdBytes(asked.question)},
      {"attach_ms", asked.attach_ms},
      {"first_token_ms", asked.first_token_ms},
      {"text", asked.text},
      {"budget", options.budget},
      {"steps", asked.step_count},
      {"tokens_per_step", asked.generated.tokens_per_step()},
      {"bytes_per_step", asked.BytesPerStep()},
      {"ssd_bytes_per_step", asked.SsdBytesPerStep()},
      {"scan_bytes_per_step", asked.PerStep(static_cast<double>(asked.generated.scan_bytes))},
      {"per_cent_per_step", asked.PerCentPerStep()},
      {"ms_per_step", asked.PerStep(asked.generate_ms)},
  };
  std::puts(all.dump(2, ' ', false, json::error_handler_t::replace).c_str());
}

}  // namespace

Status RunAsk(const AskOptions& options) {
  PREFIXD_ASSIGN(const StepPolicy policy, PolicyOf(options.budget));
  PREFIXD_ASSIGN(const DemoState state, LoadState(options.state_file));
  PREFIXD_ASSIGN(const std::string question, QuestionOf(options, state));
  PREFIXD_ASSIGN(const Asked asked, Generate(options, state, policy, question));
  if (options.json) {
    PrintJson(options, state, question, asked);
  } else {
    PrintReads(asked);
  }
  return {};
}

}  // namespace prefixd::demo
