#include "tests/soak/world.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>

#include "attention/rows/rows.h"
#include "prefixd/client.h"

namespace prefixd::soak {
namespace {

ModelSpec Model(const std::string& name, uint32_t layers, uint32_t q_heads, uint32_t kv_heads,
                uint32_t dim, DType dtype) {
  ModelSpec spec;
  spec.name = name;
  spec.geometry = {layers, q_heads, kv_heads, dim, dim, dtype, {}};
  spec.geometry.layers.assign(layers, {1 / std::sqrt(static_cast<float>(dim)), 0, 0});
  spec.identity = {{"weights", "soak " + name}};
  return spec;
}

std::vector<float> Normal(size_t n, std::mt19937_64& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& x : values) x = normal(rng);
  return values;
}

Status AskAll(Store& store, World& world) {
  world.answers.resize(world.AnswerIndex(world.prompts.size(), 0, 0, 0));
  for (const ModelSpec& model : world.models) PREFIXD_TRY(store.RegisterModel(model));
  for (size_t p = 0; p < world.prompts.size(); ++p) {
    const Prompt& prompt = world.prompts[p];
    const ModelSpec& model = world.ModelOf(prompt);
    PREFIXD_ASSIGN(auto put, store.BeginPut({model.name, "", prompt.tokens, ""}));
    PREFIXD_TRY(WriteRows(*put, model, prompt, 512));
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    PREFIXD_TRY(store.WaitReady(stored.prefix, {}));
    const KvGeometry& g = model.geometry;
    for (size_t policy = 0; policy < world.policies.size(); ++policy) {
      AttachSpec spec;
      spec.model = model.name;
      spec.tokens = prompt.tokens;
      spec.policy = world.policies[policy];
      PREFIXD_ASSIGN(const auto session, store.Attach(spec));
      for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
        for (size_t query = 0; query < World::kQueries; ++query) {
          Answer& answer = world.answers[world.AnswerIndex(p, policy, layer, query)];
          answer.y.resize(size_t{g.n_q_heads} * g.value_dim);
          answer.lse.resize(g.n_q_heads);
          const auto& q = world.queries[prompt.model][layer * World::kQueries + query];
          PREFIXD_TRY(session->Step(layer, q, answer.y, answer.lse, nullptr));
        }
      }
    }
  }
  return {};
}

}  // namespace

Prompt MakePrompt(const ModelSpec& spec, size_t model, uint32_t n, uint64_t seed,
                  const Prompt* like, uint32_t common) {
  std::mt19937_64 rng(seed);
  const KvGeometry& g = spec.geometry;
  const size_t values = size_t{g.n_kv_heads} * g.key_dim;  // keys and values have the same size
  const size_t token = values * DTypeBytes(g.dtype);
  Prompt prompt;
  prompt.model = model;
  for (uint32_t i = 0; i < n; ++i) prompt.tokens.push_back(static_cast<uint32_t>(rng() % 50000));
  if (like) std::copy_n(like->tokens.begin(), common, prompt.tokens.begin());
  for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
    for (auto* rows : {&prompt.k, &prompt.v}) {
      std::vector<std::byte> bytes(n * token);
      FromFloat(g.dtype, Normal(n * values, rng), bytes.data());
      if (like) {
        const auto& from = rows == &prompt.k ? like->k[layer] : like->v[layer];
        std::copy_n(from.begin(), common * token, bytes.begin());
      }
      rows->push_back(std::move(bytes));
    }
  }
  return prompt;
}

Status WriteRows(PutStream& put, const ModelSpec& spec, const Prompt& prompt, uint32_t run) {
  const TokenRange missing = put.missing();
  const size_t token = prompt.k[0].size() / prompt.tokens.size();
  for (uint32_t layer = 0; layer < spec.geometry.n_layers; ++layer) {
    const std::span<const std::byte> k(prompt.k[layer]), v(prompt.v[layer]);
    for (uint32_t at = missing.begin; at < missing.end; at += run) {
      const uint32_t n = std::min(run, missing.end - at);
      PREFIXD_TRY(put.Write(layer, at, n, k.subspan(at * token, n * token),
                            v.subspan(at * token, n * token)));
    }
  }
  return {};
}

Result<World> MakeWorld(uint64_t seed, uint32_t tenants, const std::filesystem::path& dir) {
  World world;
  world.seed = seed;
  for (uint32_t t = 1; t <= tenants; ++t) world.tenants.push_back("tenant-" + std::to_string(t));
  world.models = {Model("bf16", 2, 4, 2, 16, DType::kBf16), Model("f32", 3, 8, 2, 32, DType::kF32),
                  Model("f16", 2, 4, 4, 64, DType::kF16)};
  world.policies = {{.mode = StepMode::kFull},
                    {.mode = StepMode::kAnchors},
                    {.estimator = EstimatorKind::kMoment, .k = 24},
                    {.estimator = EstimatorKind::kNone, .k = 40},
                    {.budget = 0.25}};
  std::mt19937_64 rng(seed);
  for (size_t m = 0; m < world.models.size(); ++m) {
    const ModelSpec& spec = world.models[m];
    const auto first = MakePrompt(spec, m, 900 + 400 * static_cast<uint32_t>(m), rng());
    // One continues the other behind its middle, one begins anew.
    world.prompts.push_back(first);
    world.prompts.push_back(MakePrompt(spec, m, 1300, rng(), &first, 480));
    world.prompts.push_back(MakePrompt(spec, m, 600, rng()));
    auto& queries = world.queries.emplace_back();
    for (size_t i = 0; i < spec.geometry.n_layers * World::kQueries; ++i) {
      queries.push_back(Normal(size_t{spec.geometry.n_q_heads} * spec.geometry.key_dim, rng));
    }
  }
  RuntimeOptions options;
  options.dir = dir;
  options.min_free_bytes = 0;
  options.host_tier_bytes = 64 << 20;
  PREFIXD_ASSIGN(const auto store, Open(options));
  PREFIXD_TRY(AskAll(*store, world));
  return world;
}

}  // namespace prefixd::soak
