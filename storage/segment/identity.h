// Computes the identity of prefixes: model fingerprints and chained block hashes over token ids.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"

namespace prefixd::storage {

// A Fingerprint is a BLAKE2b-256 hash.
struct Fingerprint {
  std::array<uint8_t, 32> bytes{};
  std::string ToString() const;  // 64 hex digits
  static Result<Fingerprint> Parse(std::string_view hex);
  auto operator<=>(const Fingerprint&) const = default;
};

// Hashes tagged fields: each enters the hash as (tag, length, bytes), sorted by tag, so that no two
// different field lists collide by concatenation and their order does not matter. Typical tags:
// weights, architecture, rope, dtype, layout, adapter, tokenizer, tenant_salt. The geometry is
// always part of it.
Fingerprint ModelFingerprint(const KvGeometry& geometry,
                             std::span<const std::pair<std::string, std::string>> fields);

using BlockHash = std::array<uint8_t, 16>;

// hash_i = BLAKE2b-128(key = seed; hash_{i-1} || token ids of block i), for every full block of
// `block_tokens` ids; the seed binds model fingerprint and tenant, and the store's secret key where
// it has one (StoreSecret::hash_key): then nobody without it can test a guess of the tokens.
std::vector<BlockHash> BlockHashes(const Fingerprint& model, std::string_view tenant,
                                   std::span<const uint32_t> tokens, uint32_t block_tokens,
                                   std::span<const uint8_t> secret = {});

// Names the tree of prefixes of one model and tenant: prefixes of two scopes never share segments.
BlockHash PrefixScope(const Fingerprint& model, std::string_view tenant);

// Fills `out` from the operating system's entropy, for fresh ids.
void RandomBytes(std::span<uint8_t> out);

}  // namespace prefixd::storage
