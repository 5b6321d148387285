#include "runtime/token_features.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "attention/byte_codec.h"

namespace prefixd {
namespace {

// Layout, little-endian: magic u32, version u16, bits u8, scale u8, d_phi u32, first token u32,
// tokens u32, chunks u32; u32 end of each chunk; float32 m [chunks][d_phi] (-inf: no token has the
// feature); codes.
constexpr uint32_t kMagic = 0x45465850;  // "PXFE"
constexpr uint16_t kVersion = 1;
constexpr size_t kHeaderBytes = 24;
constexpr uint32_t kChunkTokens = 4096;

Error Malformed(const char* what) {
  return {Code::kCorrupt, std::string("stored features are malformed: ") + what};
}

}  // namespace

Result<std::optional<FeatureFormat>> FeatureFormatFromName(std::string_view name) {
  if (name == "none") return std::optional<FeatureFormat>();
  if (name == "u8") return std::optional(FeatureFormat{8, FeatureScale::kLinear});
  if (name == "u16") return std::optional(FeatureFormat{16, FeatureScale::kLinear});
  if (name == "log8") return std::optional(FeatureFormat{8, FeatureScale::kLog});
  if (name == "log16") return std::optional(FeatureFormat{16, FeatureScale::kLog});
  return InvalidArgument("no feature format named '" + std::string(name) +
                         "'; use auto, none, u8, u16, log8 or log16");
}

Result<TokenFeatures> TokenFeatures::Encode(const Model& model, const FeatureMapSet& maps,
                                            const FeatureFormat& format,
                                            const storage::StoredPrefix& prefix, TokenRange tokens,
                                            size_t head, const WorkProgress& progress) {
  const KvGeometry& geometry = model.spec.geometry;
  const RowShape row = geometry.row();
  const RowShape key{row.key_dim, 0, row.dtype};
  const auto layer = static_cast<uint32_t>(head / geometry.n_kv_heads);
  const auto kv_head = static_cast<uint32_t>(head % geometry.n_kv_heads);
  TokenFeatures out(format, maps.d_phi, tokens);
  out.codes_.resize(tokens.size() * format.RowBytes(maps.d_phi));
  std::vector<std::byte> bytes;
  std::vector<float> keys, log_phi;
  for (uint32_t begin = tokens.begin; begin < tokens.end;) {
    PREFIXD_TRY(progress.Check());
    const TokenRange chunk{
        begin, std::min(tokens.end, storage::RunEnd(prefix.parts(), begin, kChunkTokens))};
    bytes.resize(chunk.size() * key.bytes());
    PREFIXD_TRY(prefix.ReadRange(layer, kv_head, chunk, storage::RowPart::kKey,
                                 {bytes, key.bytes()}, nullptr));
    keys.resize(size_t{chunk.size()} * key.key_dim);
    log_phi.resize(size_t{chunk.size()} * maps.d_phi);
    for (size_t i = 0; i < chunk.size(); ++i) {
      ToFloat(key.dtype, bytes.data() + i * key.bytes(),
              std::span(keys).subspan(i * key.key_dim, key.key_dim));
    }
    maps.phi_k[head].LogPhi(keys, chunk.size(), log_phi);
    std::vector<float> m(maps.d_phi, -std::numeric_limits<float>::infinity());
    for (size_t i = 0; i < log_phi.size(); ++i) {
      m[i % maps.d_phi] = std::max(m[i % maps.d_phi], log_phi[i]);
    }
    const size_t at = size_t{begin - tokens.begin} * format.RowBytes(maps.d_phi);
    EncodeFeatures(format, log_phi, m,
                   std::span(out.codes_).subspan(at, chunk.size() * format.RowBytes(maps.d_phi)));
    out.m_.insert(out.m_.end(), m.begin(), m.end());
    out.chunk_ends_.push_back(chunk.end);
    begin = chunk.end;
  }
  return out;
}

std::vector<std::byte> TokenFeatures::Serialize() const {
  ByteWriter out;
  out.Put(kMagic);
  out.Put(kVersion);
  out.Put(format_.bits);
  out.Put(static_cast<uint8_t>(format_.scale));
  out.Put(d_phi_);
  out.Put(tokens_.begin);
  out.Put(tokens_.size());
  out.Put(static_cast<uint32_t>(chunk_ends_.size()));
  for (uint32_t end : chunk_ends_) out.Put(end);
  for (float m : m_) out.Put(m);
  std::vector<std::byte> bytes = out.Take();
  bytes.insert(bytes.end(), codes_.begin(), codes_.end());
  return bytes;
}

Result<TokenFeatures> TokenFeatures::Deserialize(const FeatureFormat& format, uint32_t d_phi,
                                                 std::span<const std::byte> bytes) {
  ByteReader in(bytes);
  if (in.remaining() < kHeaderBytes) return Malformed("too short");
  if (in.Get<uint32_t>() != kMagic || in.Get<uint16_t>() != kVersion) {
    return Malformed("unknown magic or version");
  }
  const uint8_t bits = in.Get<uint8_t>(), scale = in.Get<uint8_t>();
  if (bits != format.bits || scale != static_cast<uint8_t>(format.scale) ||
      in.Get<uint32_t>() != d_phi) {
    return Malformed("they are of another format");
  }
  const uint64_t first = in.Get<uint32_t>(), n = in.Get<uint32_t>(), chunks = in.Get<uint32_t>();
  if (first + n > UINT32_MAX || chunks > n) return Malformed("impossible counts");
  const uint64_t want = chunks * (4 + uint64_t{4} * d_phi) + n * format.RowBytes(d_phi);
  if (in.remaining() != want) return Malformed("size does not fit its shape");
  TokenFeatures out(format, d_phi, {static_cast<uint32_t>(first), uint32_t(first + n)});
  uint32_t end = out.tokens_.begin;
  for (uint64_t c = 0; c < chunks; ++c) {
    const uint32_t next = in.Get<uint32_t>();
    if (next <= end || next > out.tokens_.end) return Malformed("chunks do not ascend");
    out.chunk_ends_.push_back(end = next);
  }
  if (end != out.tokens_.end) return Malformed("chunks do not cover the tokens");
  out.m_ = in.GetFloats<float>(chunks * d_phi);
  for (float m : out.m_) {
    if (std::isnan(m) || m == std::numeric_limits<float>::infinity()) {
      return Malformed("a maximum is not a number");
    }
  }
  const auto codes = bytes.last(n * format.RowBytes(d_phi));
  out.codes_.assign(codes.begin(), codes.end());
  return out;
}

Result<TokenFeatures> TokenFeatures::OfMid(const Rooms& rooms, const Model& model,
                                           const FeatureMapSet& maps, const FeatureFormat& format,
                                           const std::vector<SegmentPart>& parts, TokenRange mid,
                                           size_t head, uint64_t* loaded) {
  TokenFeatures out(format, maps.d_phi, mid);
  out.codes_.reserve(mid.size() * format.RowBytes(maps.d_phi));
  for (const SegmentPart& part : parts) {
    const uint32_t begin = std::max(part.used.begin, mid.begin);
    const uint32_t end = std::min(part.used.end, mid.end);
    if (begin >= end) continue;
    PREFIXD_ASSIGN(const TokenFeatures own,
                   LoadFeatures(rooms, model, maps, format, part.id, head, loaded));
    if (begin < own.tokens_.begin || end > own.tokens_.end) {
      return Malformed("they are of other tokens");
    }
    out.codes_.insert(out.codes_.end(), own.code(begin),
                      own.code(begin) + (end - begin) * format.RowBytes(maps.d_phi));
    uint32_t first = own.tokens_.begin;
    for (size_t c = 0; c < own.chunk_ends_.size(); ++c) {
      const uint32_t last = own.chunk_ends_[c];
      if (first < end && last > begin) {
        out.chunk_ends_.push_back(std::min(last, end));
        const float* m = own.m_.data() + c * maps.d_phi;
        out.m_.insert(out.m_.end(), m, m + maps.d_phi);
      }
      first = last;
    }
  }
  return out;
}

std::vector<float> TokenFeatures::LogPhi(TokenRange run) const {
  std::vector<float> out(size_t{run.size()} * d_phi_);
  size_t chunk =
      std::upper_bound(chunk_ends_.begin(), chunk_ends_.end(), run.begin) - chunk_ends_.begin();
  for (uint32_t t = run.begin; t < run.end; ++t) {
    while (t >= chunk_ends_[chunk]) ++chunk;
    const auto row = std::span(out).subspan(size_t{t - run.begin} * d_phi_, d_phi_);
    DecodeFeatures(format_, code(t), row);
    const float* m = m_.data() + chunk * d_phi_;
    for (uint32_t f = 0; f < d_phi_; ++f) {
      row[f] = row[f] > 0 ? std::log(row[f]) + m[f] : -std::numeric_limits<float>::infinity();
    }
  }
  return out;
}

StoredFeatures TokenFeatures::Gather(std::span<const uint32_t> ids, std::vector<std::byte>& codes,
                                     std::vector<uint32_t>& chunks) const {
  const size_t stride = format_.RowBytes(d_phi_);
  codes.resize(ids.size() * stride);
  chunks.resize(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    std::memcpy(codes.data() + i * stride, code(ids[i]), stride);
    chunks[i] = static_cast<uint32_t>(
        std::upper_bound(chunk_ends_.begin(), chunk_ends_.end(), ids[i]) - chunk_ends_.begin());
  }
  StoredFeatures out;
  out.format = format_;
  out.data = codes.data();
  out.stride = stride;
  out.m = m_;
  out.chunks = chunks;
  return out;
}

std::string FeaturesBlobName(const Model& model, const FeatureMapSet& maps, size_t head) {
  const uint32_t n = model.spec.geometry.n_kv_heads;
  return "features." + std::to_string(maps.length) + "." + std::to_string(head / n) + "." +
         std::to_string(head % n);
}

std::string FeaturesProducer(const RuntimeOptions& options, const FeatureMapSet& maps) {
  return "features/1 sinks=" + std::to_string(options.anchors.n_sink) +
         " as=" + options.phi_features + " maps=" + maps.digest;
}

Status BuildFeatures(const Rooms& rooms, const Model& model, const FeatureMapSet& maps,
                     const FeatureFormat& format, const storage::StoredPrefix& prefix,
                     const SegmentPart& segment, WorkProgress& progress) {
  const std::string producer = FeaturesProducer(*rooms.options, maps);
  const TokenRange tokens{std::max(segment.stored.begin, rooms.options->anchors.n_sink),
                          segment.stored.end};
  const auto build = [&](size_t head) -> Status {
    PREFIXD_TRY(progress.Check());
    const bool wanted =
        model.Summarised(static_cast<uint32_t>(head / model.spec.geometry.n_kv_heads)) &&
        tokens.begin < tokens.end &&
        !LoadFeatures(rooms, model, maps, format, segment.id, head, nullptr).ok();
    if (wanted) {
      PREFIXD_ASSIGN(const TokenFeatures features,
                     TokenFeatures::Encode(model, maps, format, prefix, tokens, head, progress));
      PREFIXD_TRY(rooms.storage->PutBlob(segment.id, FeaturesBlobName(model, maps, head), producer,
                                         features.Serialize()));
    }
    ++progress.done;
    return {};
  };
  return rooms.pool->ParallelFor(HeadCount(model), build, WorkPriority::kBackground);
}

Result<TokenFeatures> LoadFeatures(const Rooms& rooms, const Model& model,
                                   const FeatureMapSet& maps, const FeatureFormat& format,
                                   const storage::SegmentId& id, size_t head, uint64_t* loaded) {
  const auto blob = rooms.storage->GetBlob(id, FeaturesBlobName(model, maps, head),
                                           FeaturesProducer(*rooms.options, maps));
  if (!blob.ok() && blob.error().code == Code::kNotFound) {
    return Error{Code::kFailedPrecondition,
                 "the stored features of this prefix are not built yet; wait until it is ready "
                 "(WaitReady) or use estimator moment"};
  }
  if (!blob.ok()) return blob.error();
  if (loaded) *loaded += blob->size();
  return TokenFeatures::Deserialize(format, maps.d_phi, *blob);
}

}  // namespace prefixd
