// Asks questions about a long document with llama.cpp, and keeps what it computed of the document
// in prefixd: the next process, or a document that begins alike, does not compute it again.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "examples/llama_cpp/engine.h"

namespace {

using llama_example::Engine;
using llama_example::EngineOptions;
using llama_example::Fail;
using llama_example::SequenceState;
using prefixd::Store;

using Clock = std::chrono::steady_clock;

double Milliseconds(Clock::time_point since) {
  return std::chrono::duration<double, std::milli>(Clock::now() - since).count();
}

template <typename T>
T Must(prefixd::Result<T> result) {
  if (!result.ok()) Fail(result.error().ToString());
  return std::move(result).value();
}

void Must(const prefixd::Status& status) {
  if (!status.ok()) Fail(status.error().ToString());
}

std::unique_ptr<Store> OpenStore(const std::string& where) {
  for (const char* daemon : {"unix:", "tcp:", "tls:"}) {
    if (where.starts_with(daemon)) return Must(prefixd::Connect(where));
  }
  prefixd::RuntimeOptions options;
  options.dir = where;
  return Must(prefixd::Open(options));
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) Fail(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

// Fills the engine with the longest stored prefix of the document.
uint32_t Resume(Store& store, const std::string& model, std::span<const llama_token> document,
                Engine* engine) {
  prefixd::MatchSpec match;
  match.model = model;
  match.tokens.assign(document.begin(), document.end());
  const auto found = Must(store.Match(match));
  if (found.n_tokens == 0) return 0;
  prefixd::AttachSpec attach;
  attach.model = model;
  attach.prefix = found.prefix;
  attach.n_tokens = found.n_tokens;
  auto restore = Must(prefixd::Restore::Begin(Must(store.Attach(attach)), {}));
  SequenceState state = engine->Room(found.n_tokens);
  while (const auto run = Must(restore->Next())) {
    const auto copy = [&](std::span<const std::byte> from, std::span<std::byte> to) {
      std::memcpy(to.data(), from.data(), to.size());
    };
    copy(run->k, state.k(run->layer, run->tokens.begin, run->tokens.size()));
    copy(run->v, state.v(run->layer, run->tokens.begin, run->tokens.size()));
  }
  engine->Load(state);
  return found.n_tokens;
}

// Stores what the store does not have of the document.
prefixd::PutResult Keep(Store& store, const std::string& model, const std::string& label,
                        std::span<const llama_token> document, const Engine& engine) {
  prefixd::PutSpec spec;
  spec.model = model;
  spec.tokens.assign(document.begin(), document.end());
  spec.label = label;
  auto put = Must(store.BeginPut(spec));
  const prefixd::TokenRange missing = put->missing();
  SequenceState state = engine.State();
  for (uint32_t layer = 0; layer < state.n_layers() && missing.size() > 0; ++layer) {
    Must(put->Write(layer, missing.begin, missing.size(),
                    state.k(layer, missing.begin, missing.size()),
                    state.v(layer, missing.begin, missing.size())));
  }
  return Must(put->Commit());
}

llama_token Likeliest(std::span<const float> logits) {
  return static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

struct Answer {
  std::vector<llama_token> tokens;
  std::vector<float> first_logits;
  double first_ms = 0, seconds = 0;
};

// Decodes behind the sequence as it stands, and takes question and answer back afterwards.
Answer Ask(Engine* engine, std::span<const llama_token> question, int predict) {
  const auto start = Clock::now();
  const uint32_t before = engine->n_tokens();
  Answer answer;
  engine->Decode(question);
  answer.first_logits.assign(engine->logits().begin(), engine->logits().end());
  answer.first_ms = Milliseconds(start);
  while (static_cast<int>(answer.tokens.size()) < predict) {
    const llama_token token = Likeliest(engine->logits());
    if (engine->Ends(token)) break;
    answer.tokens.push_back(token);
    engine->Decode({&token, 1});
  }
  answer.seconds = Milliseconds(start) / 1000;
  engine->Truncate(before);
  return answer;
}

// Computes the document anew and asks again: the answers must be equal.
void Check(Engine* engine, std::span<const llama_token> document,
           std::span<const llama_token> question, int predict, const Answer& stored) {
  engine->Truncate(0);
  engine->Decode(document);
  const Answer fresh = Ask(engine, question, predict);
  float apart = 0;
  for (size_t i = 0; i < fresh.first_logits.size(); ++i) {
    apart = std::max(apart, std::fabs(fresh.first_logits[i] - stored.first_logits[i]));
  }
  std::printf("  computed anew: %s, logits of the first token at most %g apart\n",
              fresh.tokens == stored.tokens ? "the same answer" : "ANOTHER ANSWER", apart);
  if (fresh.tokens != stored.tokens) std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  EngineOptions options;
  std::string where, document_file;
  std::vector<std::string> questions;
  int predict = 48;
  bool check = false;
  CLI::App app("Asks llama.cpp about a document whose keys and values prefixd keeps.");
  app.add_option("model", options.model, "a GGUF file")->required();
  app.add_option("store", where, "a directory, unix:/path, tcp:host:port or tls:host:port")
      ->required();
  app.add_option("document", document_file, "a text")->required();
  app.add_option("--question", questions, "text that follows the document; may be repeated");
  app.add_option("--predict", predict, "tokens of an answer")->capture_default_str();
  app.add_option("--context", options.context, "tokens of the context")->capture_default_str();
  app.add_option("--threads", options.threads, "threads of llama.cpp")->capture_default_str();
  app.add_flag("--check", check, "compute the document anew afterwards, and compare the answers");
  CLI11_PARSE(app, argc, argv);
  if (questions.empty()) questions = {"\n\nQuestion: What is this text about?\nAnswer:"};

  const auto store = OpenStore(where);
  Engine engine(options);
  const prefixd::ModelSpec model = engine.Describe();
  Must(store->RegisterModel(model));
  const auto document = engine.Tokenize(ReadText(document_file), true);

  auto start = Clock::now();
  const uint32_t found = Resume(*store, model.name, document, &engine);
  std::printf("%u of %zu tokens were stored: restored in %.1f ms\n", found, document.size(),
              Milliseconds(start));
  if (found < document.size()) {
    start = Clock::now();
    engine.Decode(std::span(document).subspan(found));
    std::printf("the others computed in %.2f s\n", Milliseconds(start) / 1000);
    start = Clock::now();
    const std::string label = std::filesystem::path(document_file).filename();
    const auto put = Keep(*store, model.name, label, document, engine);
    std::printf("%u tokens stored in %.1f ms as %s\n", put.stored_tokens, Milliseconds(start),
                put.prefix.c_str());
  }
  for (const std::string& text : questions) {
    const auto question = engine.Tokenize(text, false);
    const Answer answer = Ask(&engine, question, predict);
    std::printf("%s", text.c_str());
    for (const llama_token token : answer.tokens) std::printf("%s", engine.Text(token).c_str());
    std::printf("\n  [first token after %.1f ms, %.1f tokens/s]\n", answer.first_ms,
                static_cast<double>(answer.tokens.size()) / answer.seconds);
    if (check) Check(&engine, document, question, predict, answer);
  }
}
