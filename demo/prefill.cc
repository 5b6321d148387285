#include "demo/prefill.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "decoder/checkpoint.h"
#include "decoder/generate.h"
#include "decoder/local_attention.h"
#include "decoder/model.h"
#include "decoder/put_attention.h"
#include "decoder/tokenizer.h"
#include "demo/progress.h"
#include "demo/state.h"
#include "prefixd/client.h"
#include "tensors/feature_map_file.h"

namespace prefixd::demo {
namespace {

using decoder::ByteTokenizer;
using decoder::LocalAttention;
using decoder::Model;
using Clock = std::chrono::steady_clock;

constexpr DType kKvDtype = DType::kBf16;
constexpr uint32_t kUntrainedPromptTokens = 2048;  // without feature maps, which give a length
constexpr uint32_t kRoomForAnswers = 192;          // positions kept free after the prompt

struct ModelFiles {
  std::vector<std::filesystem::path> feature_maps;
  uint32_t longest = 0;  // longest prefix length that the maps were trained for
};

Result<ModelFiles> FindFeatureMaps(const std::filesystem::path& model_dir) {
  ModelFiles files;
  std::error_code ec;
  for (const auto& entry : std::filesystem::directory_iterator(model_dir, ec)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("phi-") || entry.path().extension() != ".safetensors") continue;
    PREFIXD_ASSIGN(const FeatureMapSet maps, LoadFeatureMaps(entry.path()));
    files.longest = std::max(files.longest, maps.length);
    files.feature_maps.push_back(std::filesystem::absolute(entry.path()));
  }
  std::sort(files.feature_maps.begin(), files.feature_maps.end());
  return files;
}

// Keeps the queries of each layer for the put's sample.
struct QueryLog {
  std::vector<std::vector<float>> layers;  // [n][n_q_heads][key_dim] each, tokens from `first`
  uint32_t first = 0;                      // earlier tokens are not kept
};

// Holds the answer to a question; Ask truncates the attention to the prompt afterwards.
struct Answer {
  std::vector<uint32_t> tokens;
  std::vector<std::vector<float>> logits;  // for every question and answer token but the last
};

Result<Answer> Ask(const Model& model, const ByteTokenizer& tokenizer, const Fact& fact,
                   uint32_t position, LocalAttention& attention) {
  Answer answer;
  std::vector<uint32_t> next = tokenizer.Encode(fact.Question(), /*with_bos=*/false);
  std::vector<float> logits(model.config().vocab_size);
  for (size_t i = 0, at = position; answer.tokens.size() < kAnswerTokens; ++i, ++at) {
    const uint32_t token = i < next.size() ? next[i] : answer.tokens.back();
    PREFIXD_TRY(model.Forward({&token, 1}, static_cast<uint32_t>(at), attention, 1, logits));
    answer.logits.push_back(logits);
    if (i + 1 >= next.size()) answer.tokens.push_back(decoder::Argmax(logits));
  }
  attention.TruncateTo(position);
  return answer;
}

}  // namespace

Status RunPrefill(PrefillOptions options) {
  PREFIXD_ASSIGN(const Model model, Model::Load(options.model_dir, {}));
  PREFIXD_ASSIGN(const ByteTokenizer tokenizer, ByteTokenizer::For(model.config()));
  PREFIXD_ASSIGN(const ModelFiles files, FindFeatureMaps(options.model_dir));
  const uint32_t room = model.config().max_positions > kRoomForAnswers
                            ? model.config().max_positions - kRoomForAnswers
                            : 0;
  uint32_t& limit = options.document.prompt_tokens;
  if (limit == 0) {
    limit =
        files.longest > kRoomForAnswers ? files.longest - kRoomForAnswers : kUntrainedPromptTokens;
  }
  limit = std::min(limit, room);
  PREFIXD_ASSIGN(const Document document, LoadDocument(options.document));

  ModelSpec spec;
  spec.name = std::filesystem::weakly_canonical(options.model_dir).filename().string();
  spec.geometry = model.Geometry(kKvDtype);
  PREFIXD_ASSIGN(spec.identity, decoder::ModelIdentity(options.model_dir, model.config()));
  spec.feature_maps = files.feature_maps;
  PREFIXD_ASSIGN(const std::unique_ptr<Store> client, Connect(options.address));
  PREFIXD_TRY(client->RegisterModel(spec));

  DemoState state;
  state.document = options.document.file.string();
  state.model_dir = std::filesystem::absolute(options.model_dir).string();
  state.model = spec.name;
  state.facts = document.facts;
  state.continuation = document.continuation;
  state.prompt = tokenizer.Encode(document.prompt, /*with_bos=*/true);
  const auto n = static_cast<uint32_t>(state.prompt.size());
  std::printf("   %s: %u tokens with %zu facts planted; model %s\n", state.document.c_str(), n,
              state.facts.size(), state.model.c_str());

  // Times a cold prefill until the first answer token, as a decoder without prefixd does it.
  LocalAttention local(spec.geometry);
  QueryLog queries{std::vector<std::vector<float>>(spec.geometry.n_layers), n - n / 4};
  decoder::ObservedAttention observed(
      local, [&](uint32_t layer, uint32_t first, uint32_t count, std::span<const float> q) {
        const uint32_t skip = std::min(count, queries.first - std::min(queries.first, first));
        const std::span<const float> kept = q.subspan(q.size() / count * skip);
        queries.layers[layer].insert(queries.layers[layer].end(), kept.begin(), kept.end());
      });
  const auto prefill_start = Clock::now();
  {
    ProgressLine progress("cold prefill");
    PREFIXD_TRY(model.Forward(state.prompt, 0, observed, 0, {}, [&](uint32_t done, uint32_t total) {
      progress.Update(done, total, "tokens");
      return true;
    }));
  }
  const std::vector<uint32_t> question =
      tokenizer.Encode(state.facts.front().Question(), /*with_bos=*/false);
  std::vector<float> logits(model.config().vocab_size);
  PREFIXD_TRY(model.Forward(question, n, local, 1, logits));
  state.cold_prefill_s = SecondsSince(prefill_start);
  local.TruncateTo(n);
  std::printf("   cold prefill until the first answer token: %.2f s\n", state.cold_prefill_s);

  // The prompt is durable when Commit returns.
  const auto put_start = Clock::now();
  PREFIXD_ASSIGN(const std::unique_ptr<PutStream> put,
                 client->BeginPut({spec.name, "", state.prompt, state.document}));
  PREFIXD_TRY(decoder::PutCache(local.cache(), 0, n, *put));
  for (uint32_t layer = 0; layer < spec.geometry.n_layers; ++layer) {
    PREFIXD_TRY(put->WriteQueries(layer, queries.first, n - queries.first, queries.layers[layer]));
  }
  PREFIXD_ASSIGN(const PutResult stored, put->Commit());
  state.put_s = SecondsSince(put_start);
  state.prefix = stored.prefix;
  state.put_bytes = stored.bytes;
  std::printf("   put: %.1f MiB durable in %.3f s (%.0f MiB/s), prefix %s\n",
              static_cast<double>(stored.bytes) / (1 << 20), state.put_s,
              static_cast<double>(stored.bytes) / (1 << 20) / state.put_s, stored.prefix.c_str());

  const auto ingest_start = Clock::now();
  {
    ProgressLine progress("summaries and choices");
    PREFIXD_TRY(
        client->WaitReady(stored.prefix, [&](uint64_t done, uint64_t total, std::string_view unit) {
          progress.Update(done, total, unit);
          return true;
        }));
  }
  state.ingest_s = SecondsSince(ingest_start);
  std::printf("   summaries and per-head choices ready after %.2f s more\n", state.ingest_s);

  ProgressLine progress("answers without prefixd, to compare");
  size_t right = 0;
  for (const Fact& fact : state.facts) {
    PREFIXD_ASSIGN(Answer answer, Ask(model, tokenizer, fact, n, local));
    right += tokenizer.Decode(answer.tokens) == fact.answer;
    if (state.own_answers.empty()) state.own_logits = std::move(answer.logits);
    state.own_answers.push_back(std::move(answer.tokens));
    progress.Update(state.own_answers.size(), state.facts.size(), "questions");
  }
  std::printf("   the decoder alone answers %zu of %zu facts\n", right, state.facts.size());
  return SaveState(state, options.state_file);
}

}  // namespace prefixd::demo
