// Encodes token features, and gathers the codes that a step reads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "attention/estimators/byte_codec.h"
#include "runtime/summaries/token_features.h"

namespace prefixd {
namespace {

// Layout, little-endian: magic u32, version u16, bits u8, scale u8, d_phi u32, first token u32,
// tokens u32, chunks u32; u32 end of each chunk; float32 m [chunks][d_phi] (-inf: no token has the
// feature); codes.
constexpr uint32_t kFeaturesMagic = 0x45465850;  // "PXFE"
constexpr uint16_t kFeaturesVersion = 1;
constexpr size_t kFeaturesHeaderBytes = 24;

Error MalformedFeatures(const char* what) {
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

std::vector<std::byte> TokenFeatures::Serialize() const {
  ByteWriter out;
  out.Put(kFeaturesMagic);
  out.Put(kFeaturesVersion);
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
  if (in.remaining() < kFeaturesHeaderBytes) return MalformedFeatures("too short");
  if (in.Get<uint32_t>() != kFeaturesMagic || in.Get<uint16_t>() != kFeaturesVersion) {
    return MalformedFeatures("unknown magic or version");
  }
  const uint8_t bits = in.Get<uint8_t>(), scale = in.Get<uint8_t>();
  if (bits != format.bits || scale != static_cast<uint8_t>(format.scale) ||
      in.Get<uint32_t>() != d_phi) {
    return MalformedFeatures("they are of another format");
  }
  const uint64_t first = in.Get<uint32_t>(), n = in.Get<uint32_t>(), chunks = in.Get<uint32_t>();
  if (first + n > UINT32_MAX || chunks > n) return MalformedFeatures("impossible counts");
  const uint64_t want = chunks * (4 + uint64_t{4} * d_phi) + n * format.RowBytes(d_phi);
  if (in.remaining() != want) return MalformedFeatures("size does not fit its shape");
  TokenFeatures out(format, d_phi, {static_cast<uint32_t>(first), uint32_t(first + n)});
  uint32_t end = out.tokens_.begin;
  for (uint64_t c = 0; c < chunks; ++c) {
    const uint32_t next = in.Get<uint32_t>();
    if (next <= end || next > out.tokens_.end) return MalformedFeatures("chunks do not ascend");
    out.chunk_ends_.push_back(end = next);
  }
  if (end != out.tokens_.end) return MalformedFeatures("chunks do not cover the tokens");
  out.m_ = in.GetFloats<float>(chunks * d_phi);
  for (float m : out.m_) {
    if (std::isnan(m) || m == std::numeric_limits<float>::infinity()) {
      return MalformedFeatures("a maximum is not a number");
    }
  }
  const auto codes = bytes.last(n * format.RowBytes(d_phi));
  out.codes_.assign(codes.begin(), codes.end());
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

std::vector<uint32_t> TokenFeatures::Alone(TokenRange run) const {
  std::vector<uint32_t> alone;
  uint32_t begin = tokens_.begin;
  for (const uint32_t end : chunk_ends_) {
    if (end - begin == 1 && run.contains(begin)) alone.push_back(begin - run.begin);
    begin = end;
  }
  return alone;
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

}  // namespace prefixd
