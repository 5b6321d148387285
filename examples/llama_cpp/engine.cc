#include "examples/llama_cpp/engine.h"

#include <sodium.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace llama_example {

namespace {

constexpr int32_t kSequence = 0;
constexpr uint32_t kBatch = 2048;

// Names the weights by a hash of the file, so that a changed file never meets older rows.
std::string Digest(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) Fail(path + ": cannot be read");
  crypto_generichash_state state;
  crypto_generichash_init(&state, nullptr, 0, crypto_generichash_BYTES);
  std::vector<char> buffer(1 << 20);
  while (file.read(buffer.data(), static_cast<std::streamsize>(buffer.size())) ||
         file.gcount() > 0) {
    crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(buffer.data()),
                              static_cast<unsigned long long>(file.gcount()));
  }
  unsigned char hash[crypto_generichash_BYTES];
  crypto_generichash_final(&state, hash, sizeof hash);
  char hex[2 * sizeof hash + 1];
  return sodium_bin2hex(hex, sizeof hex, hash, sizeof hash);
}

}  // namespace

void Fail(const std::string& sentence) {
  std::fprintf(stderr, "prompt_store: %s\n", sentence.c_str());
  std::exit(1);
}

Engine::Engine(const EngineOptions& options) : options_(options) {
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  llama_backend_init();
  model_ = llama_model_load_from_file(options.model.c_str(), llama_model_default_params());
  if (model_ == nullptr) Fail(options.model + ": llama.cpp cannot load this model");
  if (llama_model_n_swa(model_) > 0 || llama_model_is_recurrent(model_) ||
      llama_model_is_hybrid(model_) || llama_model_has_encoder(model_)) {
    Fail(
        "models with sliding windows, recurrent layers or encoders keep more than rows of every "
        "token; this program does not store them");
  }
  vocab_ = llama_model_get_vocab(model_);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = options.context;
  params.n_batch = kBatch;
  params.n_seq_max = 1;
  params.n_threads = params.n_threads_batch = options.threads;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;  // else values are stored transposed
  params.type_k = params.type_v = GGML_TYPE_F16;
  context_ = llama_init_from_model(model_, params);
  if (context_ == nullptr) Fail("llama.cpp cannot make a context of that length");
}

Engine::~Engine() {
  llama_free(context_);
  llama_model_free(model_);
  llama_backend_free();
}

const SequenceState& Engine::Layout() {
  if (layout_ == nullptr) {
    if (n_tokens_ > 0) {
      layout_ = std::make_unique<SequenceState>(State());
    } else {  // one token, only to see how its state is laid out
      const llama_token token = std::max(llama_vocab_bos(vocab_), 0);
      Decode({&token, 1});
      layout_ = std::make_unique<SequenceState>(State());
      Truncate(0);
    }
  }
  return *layout_;
}

prefixd::ModelSpec Engine::Describe() {
  const SequenceState& state = Layout();
  const auto kv_heads = static_cast<uint32_t>(llama_model_n_head_kv(model_));
  const LayerRows& k = state.keys(0);
  const LayerRows& v = state.values(0);
  for (uint32_t layer = 0; layer < state.n_layers(); ++layer) {
    if (state.keys(layer) != k || state.values(layer) != v || k.type != GGML_TYPE_F16 ||
        v.type != GGML_TYPE_F16) {
      Fail("this program stores models whose layers are alike, with keys and values in f16");
    }
  }
  char description[128];
  llama_model_desc(model_, description, sizeof description);
  prefixd::ModelSpec spec;
  const std::string digest = Digest(options_.model);
  spec.name = "llama.cpp-" + digest.substr(0, 16);
  spec.geometry.n_layers = state.n_layers();
  spec.geometry.n_q_heads = static_cast<uint32_t>(llama_model_n_head(model_));
  spec.geometry.n_kv_heads = kv_heads;
  spec.geometry.key_dim = static_cast<uint32_t>(k.row_bytes / 2 / kv_heads);
  spec.geometry.value_dim = static_cast<uint32_t>(v.row_bytes / 2 / kv_heads);
  spec.geometry.dtype = prefixd::DType::kF16;
  prefixd::LayerGeometry layer;
  layer.scale = 1 / std::sqrt(static_cast<float>(spec.geometry.key_dim));
  spec.geometry.layers.assign(spec.geometry.n_layers, layer);
  spec.identity = {
      {"engine", "llama.cpp"}, {"model", description}, {"weights", digest}, {"attention", "flash"}};
  return spec;
}

std::vector<llama_token> Engine::Tokenize(const std::string& text, bool first) const {
  const auto size = static_cast<int32_t>(text.size());
  std::vector<llama_token> tokens(text.size() + 8);
  const int32_t n = llama_tokenize(vocab_, text.data(), size, tokens.data(),
                                   static_cast<int32_t>(tokens.size()), first, false);
  if (n < 0) Fail("the text cannot be made tokens");
  tokens.resize(static_cast<size_t>(n));
  return tokens;
}

std::string Engine::Text(llama_token token) const {
  char piece[256];
  const int32_t n = llama_token_to_piece(vocab_, token, piece, sizeof piece, 0, false);
  return {piece, static_cast<size_t>(std::max(n, 0))};
}

bool Engine::Ends(llama_token token) const { return llama_vocab_is_eog(vocab_, token); }

void Engine::Decode(std::span<const llama_token> tokens) {
  if (n_tokens_ + tokens.size() > options_.context) {
    Fail("the prompt and its answer are longer than the context (--context " +
         std::to_string(options_.context) + ")");
  }
  while (!tokens.empty()) {
    const auto part = tokens.first(std::min<size_t>(tokens.size(), kBatch));
    // The interface takes the tokens without const and does not change them.
    llama_batch batch = llama_batch_get_one(const_cast<llama_token*>(part.data()),
                                            static_cast<int32_t>(part.size()));
    if (llama_decode(context_, batch) != 0) Fail("llama.cpp cannot compute the tokens");
    n_tokens_ += static_cast<uint32_t>(part.size());
    tokens = tokens.subspan(part.size());
  }
}

std::span<const float> Engine::logits() const {
  return {llama_get_logits_ith(context_, -1), static_cast<size_t>(llama_vocab_n_tokens(vocab_))};
}

void Engine::Truncate(uint32_t n) {
  llama_memory_seq_rm(llama_get_memory(context_), kSequence, static_cast<llama_pos>(n), -1);
  n_tokens_ = n;
}

SequenceState Engine::State() const {
  std::vector<uint8_t> bytes(llama_state_seq_get_size(context_, kSequence));
  bytes.resize(llama_state_seq_get_data(context_, bytes.data(), bytes.size(), kSequence));
  SequenceState state;
  std::string error;
  if (!state.Parse(std::move(bytes), &error)) Fail(error);
  return state;
}

SequenceState Engine::Room(uint32_t n) { return Layout().Resized(n); }

void Engine::Load(const SequenceState& state) {
  Truncate(0);
  if (llama_state_seq_set_data(context_, state.bytes().data(), state.bytes().size(), kSequence) ==
      0) {
    Fail("llama.cpp does not take the stored rows");
  }
  n_tokens_ = state.n_tokens();
}

}  // namespace llama_example
