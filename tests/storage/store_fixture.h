// Provides a small model, and rows whose bytes follow from the tokens up to them: so every test
// knows what any stored prefix must contain.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "storage/store/prefix_store.h"
#include "tests/support/expect_ok.h"
#include "tests/support/files.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::storage {

using prefixd::testing::FlipByte;
using prefixd::testing::Seed;
using prefixd::testing::TempDir;

inline KvGeometry TestGeometry(uint32_t layers = 2, uint32_t kv_heads = 2, uint32_t dim = 20,
                               DType dtype = DType::kBf16) {
  KvGeometry g;
  g.n_layers = layers;
  g.n_q_heads = kv_heads * 2;
  g.n_kv_heads = kv_heads;
  g.key_dim = g.value_dim = dim;
  g.dtype = dtype;
  g.layers.assign(layers, {0.25f, 0, 0});
  return g;
}

inline ModelRecord TestModel(const std::string& name = "m", const KvGeometry& g = TestGeometry()) {
  const std::vector<std::pair<std::string, std::string>> fields{{"weights", name}};
  return {name, ModelFingerprint(g, fields), g, "{\"weights\":\"" + name + "\"}"};
}

// With PREFIXD_TEST_KEY_FILE every store is encrypted: most tests hold for one, too.
inline StoreOptions TestOptions(const std::filesystem::path& dir, IoBackend io = IoBackend::kAuto) {
  StoreOptions o;
  o.dir = dir / "store";
  o.io = io;
  o.host_tier_bytes = 1 << 20;
  o.min_free_bytes = 0;
  if (const char* keys = std::getenv("PREFIXD_TEST_KEY_FILE")) o.encryption_key_file = keys;
  return o;
}

inline uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Returns the states of the tokens: state[t] depends on tokens[0..t].
inline std::vector<uint64_t> States(std::span<const uint32_t> tokens) {
  std::vector<uint64_t> states;
  uint64_t h = 1;
  for (const uint32_t t : tokens) states.push_back(h = Mix(h ^ t));
  return states;
}

inline void FillRow(uint64_t state, uint32_t layer, uint32_t head, std::span<std::byte> row) {
  uint64_t h = Mix(state ^ (uint64_t{layer} << 32) ^ head);
  for (size_t i = 0; i < row.size(); i += 8) {
    h = Mix(h);
    std::memcpy(row.data() + i, &h, std::min<size_t>(8, row.size() - i));
  }
}

// A RowFn writes the contents of row t of one layer and KV head.
using RowFn =
    std::function<void(uint32_t t, uint32_t layer, uint32_t head, std::span<std::byte> row)>;

inline RowFn RowsFrom(std::vector<uint64_t> states) {
  return [states = std::move(states)](uint32_t t, uint32_t layer, uint32_t head,
                                      std::span<std::byte> row) {
    FillRow(states[t], layer, head, row);
  };
}

// rows: [n_kv_heads][n][row bytes] of tokens [first, first + n) of one layer.
inline std::vector<std::byte> RowsOf(const KvGeometry& g, const RowFn& fill, uint32_t layer,
                                     uint32_t first, uint32_t n) {
  const size_t row = g.row(layer).bytes();
  const uint32_t heads = g.layer(layer).n_kv_heads;
  std::vector<std::byte> out(heads * n * row);
  for (uint32_t h = 0; h < heads; ++h) {
    for (uint32_t i = 0; i < n; ++i) {
      fill(first + i, layer, h, std::span(out).subspan((size_t{h} * n + i) * row, row));
    }
  }
  return out;
}
inline std::vector<std::byte> RowsOf(const KvGeometry& g, std::span<const uint64_t> states,
                                     uint32_t layer, uint32_t first, uint32_t n) {
  return RowsOf(g, RowsFrom({states.begin(), states.end()}), layer, first, n);
}

// Writes the range of `writer` in calls of at most `chunk` tokens, layer by layer or chunk by
// chunk; of all heads, or of those before `split` and then of the others.
inline Status WriteAll(SegmentWriter& writer, const KvGeometry& g, const RowFn& fill,
                       uint32_t chunk, bool layer_major, uint32_t split = 0) {
  const TokenRange range = writer.range();
  const auto write = [&](uint32_t layer, uint32_t first) -> Status {
    if (!g.layers[layer].stored) return {};
    const uint32_t n = std::min(chunk, range.end - first);
    const auto rows = RowsOf(g, fill, layer, first, n);
    if (split == 0) return writer.WriteRows(layer, first, n, rows);
    const size_t own_split = size_t{split} * g.layer(layer).n_kv_heads / g.n_kv_heads;
    const size_t before = own_split * n * g.row(layer).bytes();
    PREFIXD_TRY(writer.WriteRows(layer, {0, split}, first, n, std::span(rows).first(before)));
    return writer.WriteRows(layer, {split, 0}, first, n, std::span(rows).subspan(before));
  };
  if (layer_major) {
    for (uint32_t l = 0; l < g.n_layers; ++l) {
      for (uint32_t t = range.begin; t < range.end; t += chunk) PREFIXD_TRY(write(l, t));
    }
  } else {
    for (uint32_t t = range.begin; t < range.end; t += chunk) {
      for (uint32_t l = 0; l < g.n_layers; ++l) PREFIXD_TRY(write(l, t));
    }
  }
  return {};
}
inline Status WriteAll(SegmentWriter& writer, const KvGeometry& g, std::span<const uint32_t> tokens,
                       uint32_t chunk, bool layer_major) {
  return WriteAll(writer, g, RowsFrom(States(tokens)), chunk, layer_major);
}

inline Result<SegmentId> Put(PrefixStore& store, const ModelRecord& model,
                             std::span<const uint32_t> tokens, const std::string& tenant = "t",
                             uint32_t chunk = 37, bool layer_major = true) {
  PREFIXD_ASSIGN(auto writer, store.BeginPut(model.name, tenant, tokens, "label"));
  PREFIXD_TRY(WriteAll(*writer, model.geometry, tokens, chunk, layer_major));
  return writer->Commit();
}

// Returns "" when everything that `prefix` returns follows from `tokens`, and its rows are
// `fill`'s; otherwise the first difference.
inline Result<std::string> Compare(const StoredPrefix& prefix, std::span<const uint32_t> tokens,
                                   const RowFn& fill, ReadStats* stats = nullptr) {
  const KvGeometry& g = prefix.model().geometry;
  if (!std::equal(prefix.tokens().begin(), prefix.tokens().end(), tokens.begin(), tokens.end())) {
    return std::string("token ids differ");
  }
  const auto n = static_cast<uint32_t>(tokens.size());
  // Some ids lie close together, and some far apart.
  std::vector<uint32_t> some, few;
  for (uint32_t t = 0; t < n; t += 1 + t % 7) some.push_back(t);
  for (uint32_t t = n % 5; t < n; t += 61) few.push_back(t);
  for (uint32_t l = 0; l < g.n_layers; ++l) {
    const size_t row = g.row(l).bytes();
    std::vector<std::byte> range(n * row), rows(some.size() * row), expected(row);
    for (uint32_t h = 0; h < g.layer(l).n_kv_heads; ++h) {
      const auto differs = [&](uint32_t t, const std::byte* got) {
        fill(t, l, h, expected);
        return std::memcmp(expected.data(), got, row) != 0;
      };
      PREFIXD_TRY(prefix.ReadRange(l, h, {0, n}, range, stats));
      for (uint32_t t = 0; t < n; ++t) {
        if (differs(t, range.data() + t * row)) return "range: row of token " + std::to_string(t);
      }
      for (const auto* ids : {&some, &few}) {
        const auto out = std::span(rows).first(ids->size() * row);
        PREFIXD_TRY(prefix.ReadRows(l, h, *ids, out, stats));
        for (size_t i = 0; i < ids->size(); ++i) {
          if (differs((*ids)[i], out.data() + i * row)) {
            return "rows: row of token " + std::to_string((*ids)[i]);
          }
        }
      }
    }
  }
  return std::string();
}
inline Result<std::string> Compare(const StoredPrefix& prefix, std::span<const uint32_t> tokens,
                                   ReadStats* stats = nullptr) {
  return Compare(prefix, tokens, RowsFrom(States(tokens)), stats);
}

inline std::vector<uint32_t> RandomTokens(std::mt19937_64& rng, size_t n, uint32_t vocabulary) {
  std::vector<uint32_t> tokens(n);
  for (uint32_t& t : tokens) t = static_cast<uint32_t>(rng() % vocabulary);
  return tokens;
}

// Returns n tokens: first, first + 1, ...
inline std::vector<uint32_t> Iota(uint32_t n, uint32_t first = 0) {
  std::vector<uint32_t> tokens(n);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

inline std::vector<uint32_t> Join(std::span<const uint32_t> a, std::span<const uint32_t> b) {
  std::vector<uint32_t> out(a.begin(), a.end());
  out.insert(out.end(), b.begin(), b.end());
  return out;
}

inline size_t FilesIn(const std::filesystem::path& dir) {
  size_t n = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) n += entry.is_regular_file();
  return n;
}

}  // namespace prefixd::storage
