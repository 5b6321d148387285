// Sessions that keep a bounded number of own tokens in memory, beside lists of all rows.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "tests/runtime/step/own_tokens_fixture.h"
#include "tests/runtime/watched_store.h"

namespace prefixd::testing {

inline constexpr uint32_t kMemory = kMinOwnMemoryTokens;

class OwnMemoryTest : public OwnTokensTest {
 protected:
  std::shared_ptr<Session> AttachBounded(const StepPolicy& policy, uint32_t tokens = kMemory) {
    auto session = store_->Attach({.model = spec_.name,
                                   .tokens = prompt_.tokens,
                                   .policy = policy,
                                   .own_memory_tokens = tokens});
    EXPECT_OK(session);
    return session.ok() ? *std::move(session) : nullptr;
  }
  // As Prepare; `watch` says what is told of the storage behind the prompt's put.
  void PrepareWatched(const char* name, const std::function<void(WatchedStore&)>& watch,
                      uint32_t n_tokens = 300) {
    WatchedStore* watched = nullptr;  // owned by the store
    auto opened = LocalStore::Open(
        options_,
        [&](const storage::StoreOptions& at) -> Result<std::unique_ptr<storage::PrefixStore>> {
          PREFIXD_ASSIGN(auto inner, storage::PrefixStore::Open(at));
          auto store = std::make_unique<WatchedStore>(std::move(inner));
          watched = store.get();
          watch(*watched);
          return std::unique_ptr<storage::PrefixStore>(std::move(store));
        });
    ASSERT_OK(opened);
    store_ = *std::move(opened);
    ASSERT_OK(store_->RegisterModel(spec_));
    prompt_ = MakePrompt(spec_.geometry, n_tokens, Seed(name));
    PutReady(prompt_);
    ASSERT_OK(store_->WaitRewritten(nullptr));
    random_.emplace(Seed(name) + 1);
    watched->watching = true;
  }
  template <typename Condition>
  static bool Soon(const Condition& condition) {
    for (int i = 0; i < 60000 && !condition(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return condition();
  }
  // Waits until the session holds no more than it may.
  void AwaitMoves(Session& session, uint32_t tokens = kMemory) {
    EXPECT_TRUE(Soon([&] {
      const SessionReport report = *session.report();
      return report.own_tokens <= report.own_moved + tokens;
    }));
  }
  // A block of all layers.
  void AppendToAll(std::span<Session* const> sessions, NaiveOwn& rows, uint32_t n) {
    for (uint32_t l = 0; l < spec_.geometry.n_layers; ++l) {
      const uint32_t heads = spec_.geometry.layer(l).n_kv_heads;
      const Token block = MakeTokens(l, heads, n);
      for (Session* s : sessions) ASSERT_OK(s->Append(l, n, block.k, block.v));
      Note(rows, l, All(l), n, block);
    }
  }
  void Decode(Session& session, NaiveOwn& rows, bool exact = true) {
    for (uint32_t l = 0; l < spec_.geometry.n_layers; ++l) {
      const uint32_t heads = spec_.geometry.layer(l).n_kv_heads;
      const Token token = MakeTokens(l, heads, 1);
      const auto q = MakeQueries(l, heads, 1);
      State out = Room(l, heads, 1);
      ASSERT_OK(session.StepAppend(l, q, token.k, token.v, out.y, out.lse, nullptr));
      Note(rows, l, All(l), 1, token);
      if (exact) ExpectExact(rows, l, All(l), q, out.y, out.lse);
    }
  }
  // Exact attention of own tokens [n - block - after, n - after) of a layer.
  void AttendBlock(Session& session, const NaiveOwn& rows, uint32_t layer, uint32_t block,
                   uint32_t after) {
    const LayerShape g = spec_.geometry.layer(layer);
    const uint32_t heads = g.n_kv_heads;
    const auto q = MakeQueries(layer, heads, block);
    State out = Room(layer, heads, block);
    ASSERT_OK(session.AttendExact(layer, {}, block, after, q, out.y, out.lse));
    const size_t queries = size_t{g.n_q_heads}, nq = queries * g.key_dim,
                 ny = queries * g.value_dim;
    for (uint32_t t = 0; t < block; t += std::max(1u, block / 4)) {
      ExpectExact(rows, layer, All(layer), std::span(q).subspan(t * nq, nq),
                  std::span(out.y).subspan(t * ny, ny),
                  std::span(out.lse).subspan(t * queries, queries), after + block - 1 - t);
    }
  }
  static void Shorten(NaiveOwn& rows, uint32_t n, const KvGeometry& geometry) {
    for (auto& [head, bytes] : rows.rows) {
      bytes.resize(std::min(bytes.size(), n * geometry.row(head.first).bytes()));
    }
  }
  uint64_t Stored() const { return store_->Stats()->prefixes; }
  // Nothing is left of what sessions moved.
  void ExpectNothingLeft(uint64_t prefixes = 1) {
    EXPECT_TRUE(Soon([&] { return Stored() == prefixes && Used() == 0; }))
        << Stored() << " segments, " << Used() << " bytes";
  }
};

}  // namespace prefixd::testing
