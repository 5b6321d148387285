// Fuzzes stored features of single tokens.
#include <cmath>

#include "runtime/summaries/token_features.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

// Accepted bytes serialise to themselves, have a value for every token, and can be gathered.
void Check(const FeatureFormat& format, uint32_t d_phi, const Bytes& bytes) {
  const auto features = TokenFeatures::Deserialize(format, d_phi, bytes);
  if (!features.ok()) return;
  FUZZ_EXPECT(features->Serialize() == bytes);
  const TokenRange tokens = features->tokens();
  for (const float x : features->LogPhi(tokens)) {
    FUZZ_EXPECT(!std::isnan(x) && x < std::numeric_limits<float>::infinity());
  }
  if (tokens.size() == 0) return;
  const std::vector<uint32_t> ids = {tokens.begin, tokens.end - 1};
  std::vector<std::byte> codes;
  std::vector<uint32_t> chunks;
  const StoredFeatures gathered = features->Gather(ids, codes, chunks);
  for (const uint32_t chunk : gathered.chunks)
    FUZZ_EXPECT((chunk + 1) * d_phi <= gathered.m.size());
}

template <typename T>
void Put(Bytes& bytes, T value) {
  const auto* p = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), p, p + sizeof(T));
}

// Makes bytes as a builder would: a header that fits, chunks, m, codes.
Bytes Make(FuzzedDataProvider& in, const FeatureFormat& format, uint32_t d_phi) {
  const auto n = in.ConsumeIntegralInRange<uint32_t>(0, 20);
  const uint32_t chunks = std::min(n, in.ConsumeIntegralInRange<uint32_t>(1, 3));
  const uint32_t first = Whole<uint16_t>(in);
  Bytes bytes;
  Put(bytes, uint32_t{0x45465850});
  Put(bytes, uint16_t{1});
  Put(bytes, format.bits);
  Put(bytes, static_cast<uint8_t>(format.scale));
  Put(bytes, d_phi);
  Put(bytes, first);
  Put(bytes, n);
  Put(bytes, chunks);
  for (uint32_t c = 1; c <= chunks; ++c) Put(bytes, first + (c == chunks ? n : c));
  for (uint32_t i = 0; i < chunks * d_phi; ++i) Put(bytes, static_cast<float>(Whole<int8_t>(in)));
  for (size_t i = 0; i < n * format.RowBytes(d_phi); ++i) Put(bytes, Whole<uint8_t>(in));
  return bytes;
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  const bool built = Whole<uint8_t>(in) % 2 == 1;
  FeatureFormat format;
  format.bits = in.ConsumeBool() ? 8 : 16;
  format.scale = in.ConsumeBool() ? FeatureScale::kLinear : FeatureScale::kLog;
  const auto d_phi = in.ConsumeIntegralInRange<uint32_t>(1, 9);
  if (!built) {
    Check(format, d_phi, Rest(in));
    return;
  }
  const Bytes bytes = Make(in, format, d_phi);
  FUZZ_EXPECT(TokenFeatures::Deserialize(format, d_phi, bytes).ok());
  CheckDamaged(in, bytes, [&](const Bytes& b) { Check(format, d_phi, b); });
}

}  // namespace prefixd::fuzz
