// Fuzzes the catalog's values and the manifest.
#include "storage/segment/gone_record.h"
#include "storage/segment/records.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

using namespace prefixd::storage;

void Consistent(const ModelRecord& model) { FUZZ_EXPECT(model.geometry.Validate().ok()); }
void Consistent(const AliasRecord&) {}
void Consistent(const GoneRecord& r) { FUZZ_EXPECT(r.blocks.size() <= kGoneBlocks); }
void Consistent(const SegmentManifest& manifest) { Consistent(manifest.model); }
void Consistent(const SegmentRecord& r) {
  FUZZ_EXPECT(r.tokens.begin < r.tokens.end && r.is_root() == (r.tokens.begin == 0));
  FUZZ_EXPECT(r.lead.size() <= std::min(kMaxLeadTokens, r.tokens.size()));
}

// The encoding names every field, so equal bytes are equal values.
template <typename T>
void CheckBytes(std::string_view bytes, Result<T> (*decode)(std::string_view),
                std::string (*encode)(const T&)) {
  const Result<T> decoded = decode(bytes);
  if (!decoded.ok()) return;
  Consistent(*decoded);
  const std::string again = encode(*decoded);
  const Result<T> back = decode(again);
  FUZZ_EXPECT(back.ok() && encode(*back) == again);
}

template <typename T>
void CheckValue(FuzzedDataProvider& in, const T& value, Result<T> (*decode)(std::string_view),
                std::string (*encode)(const T&)) {
  std::string bytes = encode(value);
  const Result<T> back = decode(bytes);
  FUZZ_EXPECT(back.ok() && encode(*back) == bytes);
  Damage(in, std::as_writable_bytes(std::span(bytes)));
  CheckBytes(bytes, decode, encode);
}

SegmentRecord MakeSegment(FuzzedDataProvider& in) {
  SegmentRecord r;
  Fill(in, r.id.bytes);
  r.sequence = Whole<uint64_t>(in);
  r.model = in.ConsumeRandomLengthString(300);
  r.tenant = in.ConsumeRandomLengthString(300);
  r.label = in.ConsumeRandomLengthString(70'000);
  r.tokens.begin = in.ConsumeBool() ? 0 : in.ConsumeIntegralInRange<uint32_t>(1, UINT32_MAX - 1);
  r.tokens.end = in.ConsumeIntegralInRange<uint32_t>(r.tokens.begin + 1, UINT32_MAX);
  r.first_token = Whole<uint32_t>(in);
  if (r.tokens.begin == 0) {
    const uint32_t n = in.ConsumeIntegralInRange<uint32_t>(0, kMaxLeadTokens);
    for (uint32_t i = 0; i < std::min(n, r.tokens.size()); ++i) {
      r.lead.push_back(i == 0 ? r.first_token : Whole<uint32_t>(in));
    }
  } else {
    Fill(in, r.parent.bytes);
    r.parent.bytes[0] |= 1;
  }
  r.file_bytes = Whole<uint64_t>(in);
  Fill(in, r.file);
  r.reclustered = in.ConsumeBool();
  r.listed = in.ConsumeBool();
  r.pinned = in.ConsumeBool();
  r.expires_unix_ms = Whole<int64_t>(in);
  r.created_unix_ms = Whole<int64_t>(in);
  return r;
}

AliasRecord MakeAlias(FuzzedDataProvider& in) {
  AliasRecord a;
  Fill(in, a.id.bytes);
  Fill(in, a.segment.bytes);
  a.n_tokens = Whole<uint32_t>(in);
  a.label = in.ConsumeRandomLengthString(300);
  a.created_unix_ms = Whole<int64_t>(in);
  return a;
}

GoneRecord MakeGone(FuzzedDataProvider& in) {
  GoneRecord r;
  r.reason = static_cast<GoneReason>(in.ConsumeIntegralInRange<uint32_t>(1, 7));
  r.tenant = in.ConsumeRandomLengthString(300);
  Fill(in, r.id.bytes);
  r.tokens = {Whole<uint32_t>(in), Whole<uint32_t>(in)};
  r.unix_ms = Whole<int64_t>(in);
  r.why = in.ConsumeRandomLengthString(300);
  r.blocks.resize(in.ConsumeIntegralInRange<size_t>(0, kGoneBlocks));
  for (BlockHash& block : r.blocks) Fill(in, block);
  return r;
}

ModelRecord MakeModel(FuzzedDataProvider& in) {
  ModelRecord m;
  m.name = in.ConsumeRandomLengthString(300);
  Fill(in, m.fingerprint.bytes);
  KvGeometry& g = m.geometry;
  g.n_layers = in.ConsumeIntegralInRange<uint32_t>(1, 20);
  g.n_kv_heads = in.ConsumeIntegralInRange<uint32_t>(1, 16);
  g.n_q_heads = g.n_kv_heads * in.ConsumeIntegralInRange<uint32_t>(1, 64);
  g.key_dim = in.ConsumeIntegralInRange<uint32_t>(1, 1024);
  g.value_dim = in.ConsumeIntegralInRange<uint32_t>(1, 1024);
  g.dtype = in.PickValueInArray({DType::kF32, DType::kF16, DType::kBf16});
  for (uint32_t l = 0; l < g.n_layers; ++l) {
    g.layers.push_back({in.ConsumeFloatingPointInRange(1e-30f, 1e30f),
                        in.ConsumeFloatingPointInRange(0.0f, 1e30f), Whole<uint32_t>(in)});
    if (in.ConsumeBool()) continue;
    LayerGeometry& layer = g.layers.back();
    layer.n_kv_heads = in.ConsumeIntegralInRange<uint32_t>(0, 16);
    layer.n_q_heads = layer.n_kv_heads * in.ConsumeIntegralInRange<uint32_t>(0, 64);
    layer.key_dim = in.ConsumeIntegralInRange<uint32_t>(0, 1024);
    layer.value_dim = in.ConsumeIntegralInRange<uint32_t>(0, 1024);
    layer.stored = in.ConsumeBool();
  }
  m.description_json = in.ConsumeRandomLengthString(1000);
  return m;
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  switch (Whole<uint8_t>(in) % 10) {
    case 0:
      CheckBytes(in.ConsumeRemainingBytesAsString(), DecodeSegment, EncodeSegment);
      break;
    case 1:
      CheckBytes(in.ConsumeRemainingBytesAsString(), DecodeModel, EncodeModel);
      break;
    case 2:
      CheckBytes(in.ConsumeRemainingBytesAsString(), DecodeManifest, EncodeManifest);
      break;
    case 3: {
      const SegmentRecord record = MakeSegment(in);
      CheckValue(in, record, DecodeSegment, EncodeSegment);
      break;
    }
    case 4: {
      const ModelRecord model = MakeModel(in);
      if (model.geometry.Validate().ok()) CheckValue(in, model, DecodeModel, EncodeModel);
      break;
    }
    case 5: {
      SegmentManifest manifest;
      manifest.model = MakeModel(in);
      manifest.tenant = in.ConsumeRandomLengthString(300);
      manifest.label = in.ConsumeRandomLengthString(5000);
      manifest.block_tokens = Whole<uint32_t>(in);
      while (manifest.aliases.size() < 4 && in.ConsumeBool()) {
        manifest.aliases.push_back(MakeAlias(in));
      }
      if (!manifest.model.geometry.Validate().ok()) break;
      CheckValue(in, manifest, DecodeManifest, EncodeManifest);
      break;
    }
    case 6:
      CheckBytes(in.ConsumeRemainingBytesAsString(), DecodeAlias, EncodeAlias);
      break;
    case 7:
      CheckValue(in, MakeAlias(in), DecodeAlias, EncodeAlias);
      break;
    case 8:
      CheckBytes(in.ConsumeRemainingBytesAsString(), DecodeGone, EncodeGone);
      break;
    case 9:
      CheckValue(in, MakeGone(in), DecodeGone, EncodeGone);
      break;
  }
}

}  // namespace prefixd::fuzz
