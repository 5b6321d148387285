// Provides a store in its own directory, a model, and prompts put into it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attention/reference/reference.h"
#include "runtime/store/local_store.h"
#include "tensors/safetensors.h"
#include "tests/support/expect_ok.h"
#include "tests/support/files.h"
#include "tests/support/random_kv.h"
#include "tests/support/seed.h"
#include "tests/support/synthetic_kv.h"
#include "tests/support/test.h"

namespace prefixd::testing {

// Writes random maps of a whole model into a file that LoadFeatureMaps reads.
inline Status WriteRandomMaps(const std::filesystem::path& path, const KvGeometry& geometry,
                              uint32_t length, uint32_t d_emb, uint32_t d_phi, Random& random) {
  struct Owned {
    std::string name;
    std::vector<uint64_t> shape;
    std::vector<float> data;
  };
  std::vector<Owned> tensors;
  for (uint32_t l = 0; l < geometry.n_layers; ++l) {
    for (const bool keys : {false, true}) {
      const uint32_t heads = keys ? geometry.n_kv_heads : geometry.n_q_heads;
      const std::string at = "layers." + std::to_string(l) + (keys ? ".phi_k." : ".phi_q.");
      std::vector<FeatureMap> maps;
      for (uint32_t h = 0; h < heads; ++h) {
        maps.push_back(RandomFeatureMap(random, geometry.key_dim, d_emb, d_phi));
      }
      const auto add = [&](const char* name, std::vector<uint64_t> shape, auto member) {
        Owned tensor{at + name, {heads}, {}};
        tensor.shape.insert(tensor.shape.end(), shape.begin(), shape.end());
        for (const FeatureMap& map : maps) {
          const std::vector<float>& part = map.*member;
          tensor.data.insert(tensor.data.end(), part.begin(), part.end());
        }
        tensors.push_back(std::move(tensor));
      };
      add("W_in", {d_emb, geometry.key_dim}, &FeatureMap::w_in);
      add("b_in", {d_emb}, &FeatureMap::b_in);
      add("W1", {d_emb, d_emb}, &FeatureMap::w1);
      add("b1", {d_emb}, &FeatureMap::b1);
      add("W2", {d_emb, d_emb}, &FeatureMap::w2);
      add("b2", {d_emb}, &FeatureMap::b2);
      add("W_out", {d_phi, d_emb}, &FeatureMap::w_out);
      add("b_out", {d_phi}, &FeatureMap::b_out);
      Owned alpha{at + "alpha", {heads}, {}};
      for (const FeatureMap& map : maps) alpha.data.push_back(map.alpha);
      tensors.push_back(std::move(alpha));
    }
  }
  std::vector<TensorToWrite> to_write;
  for (const Owned& tensor : tensors) {
    to_write.push_back(
        {tensor.name, TensorType::kF32, tensor.shape, std::as_bytes(std::span(tensor.data))});
  }
  const auto text = [](auto x) { return std::to_string(x); };
  return WriteSafetensors(path, to_write,
                          {{"format", "prefixd-phi-v1"},
                           {"length", text(length)},
                           {"d_emb", text(d_emb)},
                           {"d_phi", text(d_phi)},
                           {"n_layers", text(geometry.n_layers)},
                           {"n_q_heads", text(geometry.n_q_heads)},
                           {"n_kv_heads", text(geometry.n_kv_heads)},
                           {"head_dim", text(geometry.key_dim)},
                           {"scale", text(geometry.layers[0].scale)},
                           {"model", "synthetic"},
                           {"weights", "w1"}});
}

class RuntimeTest : public ::testing::Test {
 protected:
  RuntimeTest() {
    options_.dir = dir_.path() / "store";
    options_.host_tier_bytes = 8 << 20;
    options_.min_free_bytes = 1 << 20;
    options_.threads = 2;
    options_.compute = "cpu";
    options_.checkpoint_tokens = 128;
    options_.build_codes = options_.build_ivf = false;
    options_.phi_features = "none";
    spec_.name = "tiny";
    spec_.geometry = SmallGeometry(2, 4, 2, 16);
    spec_.identity = {{"weights", "w1"}};
  }

  // Closes the store, if one is open, and opens it (again), registering the model.
  void Open() {
    store_.reset();
    auto store = LocalStore::Open(options_);
    ASSERT_OK(store);
    store_ = std::move(store).value();
    ASSERT_OK(store_->RegisterModel(spec_));
  }

  // Waits until the background has loaded everything that steps have requested.
  void WaitLoaded() const {
    while (store_->Stats().value().preload_queue > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // Adds feature maps to the spec.
  void AddMaps(uint32_t length, uint64_t seed, uint32_t d_phi = 8) {
    Random random(seed);
    const auto path = dir_.path() / ("phi-" + std::to_string(length) + ".safetensors");
    ASSERT_OK(WriteRandomMaps(path, spec_.geometry, length, 16, d_phi, random));
    spec_.feature_maps.push_back(path);
  }

  // Puts a prompt in runs of `run` tokens; returns its id, or "" after a failure.
  std::string Put(const SyntheticPrompt& prompt, bool queries = true, uint32_t run = 100,
                  const std::string& tenant = "") {
    std::string id;
    PutInto(prompt, queries, run, tenant, id);
    return id;
  }

  std::string PutReady(const SyntheticPrompt& prompt, bool queries = true, uint32_t run = 100) {
    const std::string id = Put(prompt, queries, run);
    const Status ready = store_->WaitReady(id, nullptr);
    EXPECT_TRUE(ready.ok()) << ready.error().ToString();
    return id;
  }

  std::shared_ptr<Session> Attach(const SyntheticPrompt& prompt, const StepPolicy& policy) {
    auto session = store_->Attach({spec_.name, "", prompt.tokens, "", 0, policy});
    EXPECT_TRUE(session.ok()) << session.error().ToString();
    return session.ok() ? std::move(session).value() : nullptr;
  }

  struct Output {
    std::vector<float> y, lse;
    StepInfo info;
  };
  Output Step(Session& session, uint32_t layer, std::span<const float> q) {
    const LayerShape shape = session.info().geometry.layer(layer);
    Output out{std::vector<float>(shape.n_q_heads * shape.value_dim),
               std::vector<float>(shape.n_q_heads),
               {}};
    const Status status = session.Step(layer, q, out.y, out.lse, &out.info);
    EXPECT_TRUE(status.ok()) << status.error().ToString();
    return out;
  }

  // Expects equal bits.
  static void ExpectSame(const std::vector<Output>& a, const std::vector<Output>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].y, b[i].y) << i;
      EXPECT_EQ(a[i].lse, b[i].lse) << i;
    }
  }

  // Computes exact attention of n tokens from `first` on, and compares every `every`-th of each
  // head with float64.
  void ExpectSuffix(Session& session, const SyntheticPrompt& prompt, uint32_t layer, uint32_t first,
                    uint32_t n, uint32_t every = 1) {
    const LayerShape g = spec_.geometry.layer(layer);
    const LayerGeometry& parameters = spec_.geometry.layers[layer];
    const auto q = prompt.Q(layer, first, n);
    std::vector<float> y(n * g.n_q_heads * g.value_dim), lse(n * g.n_q_heads);
    ASSERT_OK(session.AttendExact(layer, n, q, y, lse));
    for (uint32_t h = 0; h < g.n_q_heads; ++h) {
      const auto rows = prompt.Rows(layer, h / g.group_size());
      for (uint32_t t = h % every; t < n; t += every) {
        const size_t at = t * g.n_q_heads + h;
        const auto want =
            reference::ExactAttention(q.subspan(at * g.key_dim, g.key_dim), 1, parameters,
                                      {rows.data(), prompt.n_tokens, g.row().bytes(), g.row()});
        EXPECT_NEAR(lse[at], want.lse[0], 1e-5 * (1 + std::abs(want.lse[0])));
        for (uint32_t i = 0; i < g.value_dim; ++i) {
          EXPECT_NEAR(y[at * g.value_dim + i], want.y[i], 1e-5 * want.abs_y[i] + 1e-7);
        }
      }
    }
  }

  TempDir dir_;
  RuntimeOptions options_;
  ModelSpec spec_;
  std::unique_ptr<LocalStore> store_;

 private:
  void PutInto(const SyntheticPrompt& prompt, bool queries, uint32_t run, const std::string& tenant,
               std::string& id) {
    auto put = store_->BeginPut({spec_.name, tenant, prompt.tokens, "test"});
    ASSERT_OK(put);
    for (uint32_t l = 0; l < prompt.geometry.n_layers; ++l) {
      if (!prompt.geometry.layers[l].stored) continue;
      for (uint32_t t = 0; t < prompt.n_tokens; t += run) {
        const uint32_t n = std::min(run, prompt.n_tokens - t);
        ASSERT_OK((*put)->Write(l, t, n, prompt.K(l, t, n), prompt.V(l, t, n)));
        if (queries) ASSERT_OK((*put)->WriteQueries(l, t, n, prompt.Q(l, t, n)));
      }
    }
    auto result = (*put)->Commit();
    ASSERT_OK(result);
    EXPECT_EQ(result->n_tokens, prompt.n_tokens);
    id = result->prefix;
  }
};

}  // namespace prefixd::testing
