#include "storage/segment/identity.h"

#include <sodium.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

#include "storage/segment/gone_record.h"
#include "storage/segment/hex.h"

namespace prefixd::storage {
namespace {

static_assert(std::endian::native == std::endian::little, "hashes are over little-endian bytes");

void InitSodium() {
  static const int ready = sodium_init();  // idempotent and thread-safe; < 0 only without entropy
  assert(ready >= 0);
  (void)ready;
}

class Blake2b {
 public:
  explicit Blake2b(size_t bytes, std::span<const uint8_t> key = {}) : bytes_(bytes) {
    crypto_generichash_init(&state_, key.empty() ? nullptr : key.data(), key.size(), bytes);
  }
  // A keyed state holds its key.
  ~Blake2b() { sodium_memzero(&state_, sizeof(state_)); }
  Blake2b(const Blake2b&) = delete;
  Blake2b& operator=(const Blake2b&) = delete;

  void Update(const void* data, size_t n) {
    crypto_generichash_update(&state_, static_cast<const unsigned char*>(data), n);
  }
  void UpdateU64(uint64_t value) { Update(&value, sizeof(value)); }
  void UpdateString(std::string_view s) {
    UpdateU64(s.size());
    Update(s.data(), s.size());
  }
  void Final(uint8_t* out) { crypto_generichash_final(&state_, out, bytes_); }

 private:
  crypto_generichash_state state_;
  size_t bytes_;
};

std::string GeometryBytes(const KvGeometry& g) {
  std::string out;
  const auto put = [&out](const auto& v) {
    out.append(reinterpret_cast<const char*>(&v), sizeof(v));
  };
  put(g.n_layers);
  put(g.n_q_heads);
  put(g.n_kv_heads);
  put(g.key_dim);
  put(g.value_dim);
  put(static_cast<uint32_t>(g.dtype));
  for (const LayerGeometry& layer : g.layers) {
    put(layer.scale);
    put(layer.softcap);
    put(layer.sliding_window);
  }
  // Layers that differ from the model follow, so that other models keep their fingerprints.
  const LayerShape own{g.n_q_heads, g.n_kv_heads, g.key_dim, g.value_dim, g.dtype};
  for (uint32_t l = 0; l < g.layers.size(); ++l) {
    const LayerShape layer = g.layer(l);
    if (layer == own) continue;
    put(l);
    put(layer.n_q_heads);
    put(layer.n_kv_heads);
    put(layer.key_dim);
    put(layer.value_dim);
  }
  return out;
}

std::array<uint8_t, 32> Seed(const Fingerprint& model, std::string_view tenant,
                             std::span<const uint8_t> secret = {}) {
  InitSodium();
  Blake2b hash(32, secret);
  hash.UpdateString("prefixd block seed 1");
  hash.Update(model.bytes.data(), model.bytes.size());
  hash.UpdateString(tenant);
  std::array<uint8_t, 32> seed;
  hash.Final(seed.data());
  return seed;
}

}  // namespace

std::string Fingerprint::ToString() const { return ToHex(bytes); }

Result<Fingerprint> Fingerprint::Parse(std::string_view hex) {
  Fingerprint f;
  if (!FromHex(hex, f.bytes)) {
    return InvalidArgument("a model fingerprint is 64 hex digits, not '" + std::string(hex) + "'");
  }
  return f;
}

Fingerprint ModelFingerprint(const KvGeometry& geometry,
                             std::span<const std::pair<std::string, std::string>> fields) {
  InitSodium();
  std::vector<std::pair<std::string, std::string>> sorted(fields.begin(), fields.end());
  std::sort(sorted.begin(), sorted.end());
  Blake2b hash(32);
  hash.UpdateString("prefixd model fingerprint 1");
  hash.UpdateString(GeometryBytes(geometry));
  hash.UpdateU64(sorted.size());
  for (const auto& [tag, value] : sorted) {
    hash.UpdateString(tag);
    hash.UpdateString(value);
  }
  Fingerprint f;
  hash.Final(f.bytes.data());
  return f;
}

std::vector<BlockHash> BlockHashes(const Fingerprint& model, std::string_view tenant,
                                   std::span<const uint32_t> tokens, uint32_t block_tokens,
                                   std::span<const uint8_t> secret) {
  assert(block_tokens > 0);
  const std::array<uint8_t, 32> seed = Seed(model, tenant, secret);
  std::vector<BlockHash> hashes(tokens.size() / block_tokens);
  BlockHash previous{};
  for (size_t i = 0; i < hashes.size(); ++i) {
    Blake2b hash(previous.size(), seed);
    hash.Update(previous.data(), previous.size());
    hash.Update(tokens.data() + i * block_tokens, block_tokens * sizeof(uint32_t));
    hash.Final(hashes[i].data());
    previous = hashes[i];
  }
  return hashes;
}

BlockHash PrefixScope(const Fingerprint& model, std::string_view tenant) {
  const std::array<uint8_t, 32> seed = Seed(model, tenant);
  Blake2b hash(16, seed);
  hash.UpdateString("scope");
  BlockHash scope;
  hash.Final(scope.data());
  return scope;
}

BlockHash ModelNameHash(std::string_view name) {
  InitSodium();
  BlockHash out;
  Blake2b hash(out.size());
  hash.UpdateString("prefixd model name");
  hash.UpdateString(name);
  hash.Final(out.data());
  return out;
}

std::vector<BlockHash> SampleBlocks(std::span<const BlockHash> hashes) {
  if (hashes.size() <= kGoneBlocks) return {hashes.begin(), hashes.end()};
  std::vector<BlockHash> out;
  for (size_t i = 1; i <= kGoneBlocks; ++i)
    out.push_back(hashes[i * hashes.size() / kGoneBlocks - 1]);
  return out;
}

void RandomBytes(std::span<uint8_t> out) {
  InitSodium();
  randombytes_buf(out.data(), out.size());
}

}  // namespace prefixd::storage
