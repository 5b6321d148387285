// Compares sessions that have own tokens with plain lists of rows and attention in float64.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {

// The own rows of every head of a session, as a list.
struct NaiveOwn {
  std::map<std::pair<uint32_t, uint32_t>, std::vector<std::byte>> rows;  // by layer and KV head
};

class OwnTokensTest : public RuntimeTest {
 protected:
  struct Token {
    std::vector<std::byte> k, v;  // [n][heads][dim]
  };

  void Prepare(const char* name, uint32_t n_tokens = 300) {
    Open();
    prompt_ = MakePrompt(spec_.geometry, n_tokens, Seed(name));
    PutReady(prompt_);
    random_.emplace(Seed(name) + 1);
  }

  Token MakeTokens(uint32_t layer, uint32_t heads, uint32_t n) {
    const RowShape row = spec_.geometry.row(layer);
    const auto some = [&](size_t elements) {
      std::vector<float> x(elements);
      for (float& e : x) e = random_->Normal();
      std::vector<std::byte> bytes(elements * DTypeBytes(row.dtype));
      FromFloat(row.dtype, x, bytes.data());
      return bytes;
    };
    return {some(size_t{n} * heads * row.key_dim), some(size_t{n} * heads * row.value_dim)};
  }
  std::vector<float> MakeQueries(uint32_t layer, uint32_t heads, uint32_t n) {
    const LayerShape shape = spec_.geometry.layer(layer);
    std::vector<float> q(size_t{n} * heads * shape.group_size() * shape.key_dim);
    for (float& x : q) x = random_->Normal();
    return q;
  }
  void Note(NaiveOwn& own, uint32_t layer, HeadRange heads, uint32_t n, const Token& t) const {
    const RowShape row = spec_.geometry.row(layer);
    for (uint32_t i = 0; i < n; ++i) {
      for (uint32_t h = 0; h < heads.n; ++h) {
        auto& to = own.rows[{layer, heads.first + h}];
        const size_t at = size_t{i} * heads.n + h;
        to.insert(to.end(), &t.k[at * row.key_bytes()],
                  &t.k[at * row.key_bytes()] + row.key_bytes());
        to.insert(to.end(), &t.v[at * row.value_bytes()],
                  &t.v[at * row.value_bytes()] + row.value_bytes());
      }
    }
  }
  uint32_t Count(const NaiveOwn& own, uint32_t layer, uint32_t head) const {
    const auto it = own.rows.find({layer, head});
    return it == own.rows.end()
               ? 0
               : static_cast<uint32_t>(it->second.size() / spec_.geometry.row(layer).bytes());
  }

  // Expects y and lse of one token's queries of these heads to be exact attention over the prefix
  // and the first `seen` own rows of each head.
  void ExpectExact(const NaiveOwn& own, uint32_t layer, HeadRange heads, std::span<const float> q,
                   std::span<const float> y, std::span<const float> lse, uint32_t fewer = 0) {
    const LayerShape g = spec_.geometry.layer(layer);
    const uint32_t group = g.group_size();
    for (uint32_t h = 0; h < heads.n; ++h) {
      auto rows = prompt_.Rows(layer, heads.first + h);
      if (const auto it = own.rows.find({layer, heads.first + h}); it != own.rows.end()) {
        const size_t seen = it->second.size() - fewer * g.row().bytes();
        rows.insert(rows.end(), it->second.begin(), it->second.begin() + ptrdiff_t(seen));
      }
      const auto want = reference::ExactAttention(
          q.subspan(h * group * g.key_dim, group * g.key_dim), group, spec_.geometry.layers[layer],
          {rows.data(), rows.size() / g.row().bytes(), g.row().bytes(), g.row()});
      for (uint32_t i = 0; i < group; ++i) {
        ASSERT_NEAR(lse[h * group + i], want.lse[i], 1e-5 * (1 + std::abs(want.lse[i])));
        for (uint32_t l = 0; l < g.value_dim; ++l) {
          const size_t at = i * g.value_dim + l;
          ASSERT_NEAR(y[h * group * g.value_dim + at], want.y[at], 1e-5 * want.abs_y[at] + 1e-6);
        }
      }
    }
  }

  struct State {
    std::vector<float> y, lse;
  };
  State Room(uint32_t layer, uint32_t heads, uint32_t n) const {
    const LayerShape g = spec_.geometry.layer(layer);
    const size_t queries = size_t{n} * heads * g.group_size();
    return {std::vector<float>(queries * g.value_dim), std::vector<float>(queries)};
  }
  HeadRange All(uint32_t layer) const { return {0, spec_.geometry.layer(layer).n_kv_heads}; }

  uint64_t Used() const {
    const RuntimeStats stats = store_->Stats().value();
    for (const MemoryOfKind& m : stats.memory_kinds) {
      if (m.kind == "own_tokens") return m.bytes;
    }
    ADD_FAILURE();
    return 0;
  }

  SyntheticPrompt prompt_;
  std::optional<Random> random_;
};

inline const StepPolicy kFull = {.mode = StepMode::kFull};

}  // namespace prefixd::testing
