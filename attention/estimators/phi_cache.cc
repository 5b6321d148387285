#include "attention/estimators/phi_cache.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <string>

#include "attention/estimators/byte_codec.h"
#include "attention/kernels/kernels.h"
#include "attention/rows/row_blocks.h"

namespace prefixd {
namespace {

// Layout, little-endian: magic u32, version u16, flags u16, d_phi u32, value_dim u32,
// count u64; then float32 m; u and T in float32 or, with kBf16Flag, bf16.
constexpr uint32_t kPhiMagic = 0x48505850;  // "PXPH"
constexpr uint16_t kPhiVersion = 1;
constexpr uint16_t kBf16Flag = 1;
constexpr size_t kPhiHeaderBytes = 24;
constexpr uint32_t kMaxFeatures = 4096;
constexpr uint32_t kMaxPhiDim = 1024;
constexpr uint64_t kMaxPhiCount = uint64_t{1} << 32;
constexpr float kEmpty = -std::numeric_limits<float>::infinity();
constexpr size_t kFeatureRows = 512;  // rows whose features are held at once

// exp(from - to), 0 for an empty `from` even when `to` is empty as well.
double Rescale(float from, float to) {
  return from == kEmpty ? 0.0 : std::exp(double{from} - double{to});
}

}  // namespace

PhiCache::PhiCache(uint32_t d_phi, uint32_t value_dim)
    : d_phi_(d_phi),
      value_dim_(value_dim),
      m_(d_phi, kEmpty),
      u_(d_phi),
      t_(size_t{d_phi} * value_dim) {}

void PhiCache::Add(const RowsView& rows, const FeatureMap& phi_k) {
  assert(rows.count == 0 || (phi_k.in_dim == rows.shape.key_dim && phi_k.d_phi == d_phi_));
  std::vector<float> keys, log_phi;
  for (size_t begin = 0; begin < rows.count; begin += kFeatureRows) {
    const RowsView part = rows.Sub(begin, std::min(kFeatureRows, rows.count - begin));
    keys.resize(part.count * phi_k.in_dim);
    log_phi.resize(part.count * d_phi_);
    for (size_t i = 0; i < part.count; ++i) {
      ToFloat(part.shape.dtype, part.key(i),
              std::span(keys).subspan(i * phi_k.in_dim, phi_k.in_dim));
    }
    phi_k.LogPhi(keys, part.count, log_phi);
    AddFeatures(part, log_phi);
  }
}

void PhiCache::AddFeatures(const RowsView& rows, std::span<const float> log_phi) {
  if (rows.count == 0) return;
  assert(rows.shape.value_dim == value_dim_ && log_phi.size() == rows.count * d_phi_);
  PhiCache part(d_phi_, value_dim_);
  part.count_ = rows.count;
  for (size_t i = 0; i < rows.count; ++i) {
    const float* row = log_phi.data() + i * d_phi_;
    for (uint32_t f = 0; f < d_phi_; ++f) part.m_[f] = std::max(part.m_[f], row[f]);
  }
  // Weights are laid out by feature, so that T is one weighted sum of the values per feature.
  std::vector<float> weights(size_t{d_phi_} * rows.count);
  for (uint32_t f = 0; f < d_phi_; ++f) {
    float* row = weights.data() + size_t{f} * rows.count;
    for (size_t i = 0; i < rows.count; ++i) row[i] = log_phi[i * d_phi_ + f];
    if (part.m_[f] == kEmpty) {
      std::fill_n(row, rows.count, 0.0f);
    } else {
      part.u_[f] = static_cast<float>(Kernels().exp_shifted(row, rows.count, part.m_[f], row));
    }
  }
  std::vector<double> sums(t_.size());
  const VectorBlock values = ValueBlock(rows, 0, rows.count);
  Kernels().weighted_sum(weights.data(), rows.count, d_phi_, values, sums.data(), value_dim_);
  std::ranges::transform(sums, part.t_.begin(), [](double x) { return static_cast<float>(x); });
  Merge(part);
}

void PhiCache::Merge(const PhiCache& other) {
  if (other.count_ == 0) return;
  if (count_ == 0) {
    *this = other;
    dtype_ = DType::kF32;
    return;
  }
  dtype_ = DType::kF32;
  assert(d_phi_ == other.d_phi_ && value_dim_ == other.value_dim_);
  for (uint32_t f = 0; f < d_phi_; ++f) {
    const float m = std::max(m_[f], other.m_[f]);
    const double mine = Rescale(m_[f], m);
    const double theirs = Rescale(other.m_[f], m);
    m_[f] = m;
    u_[f] = static_cast<float>(u_[f] * mine + other.u_[f] * theirs);
    float* row = t_.data() + size_t{f} * value_dim_;
    const float* other_row = other.t_.data() + size_t{f} * value_dim_;
    for (uint32_t l = 0; l < value_dim_; ++l) {
      row[l] = static_cast<float>(row[l] * mine + other_row[l] * theirs);
    }
  }
  count_ += other.count_;
}

size_t PhiCache::bytes() const {
  return m_.size() * sizeof(float) + (u_.size() + t_.size()) * DTypeBytes(dtype_);
}

PhiCache PhiCache::RoundedToBf16() const {
  PhiCache out = *this;
  out.dtype_ = DType::kBf16;
  for (std::vector<float>* field : {&out.u_, &out.t_}) {
    for (float& x : *field) x = Bf16ToFloat(FloatToBf16(x));
  }
  return out;
}

std::vector<std::byte> PhiCache::Serialize() const {
  ByteWriter out;
  out.Put(kPhiMagic);
  out.Put(kPhiVersion);
  out.Put(dtype_ == DType::kBf16 ? kBf16Flag : uint16_t{0});
  out.Put(d_phi_);
  out.Put(value_dim_);
  out.Put(count_);
  for (float m : m_) out.Put(m);  // -inf where no token has the feature
  if (dtype_ == DType::kBf16) {
    for (float x : u_) out.Put(FloatToBf16(x));
    for (float x : t_) out.Put(FloatToBf16(x));
  } else {
    out.PutFloats(u());
    out.PutFloats(t());
  }
  return out.Take();
}

Result<PhiCache> PhiCache::Deserialize(std::span<const std::byte> bytes) {
  constexpr const char* kName = "phi cache";
  const auto corrupt = [](const std::string& what) {
    return Error{Code::kCorrupt, std::string(kName) + ": " + what};
  };
  PREFIXD_ASSIGN(ByteReader in, ReadHead(bytes, kPhiHeaderBytes, kPhiMagic, kPhiVersion, kName));
  const uint16_t flags = in.Get<uint16_t>();
  if ((flags & ~kBf16Flag) != 0) return corrupt("unknown flags");
  const uint32_t d_phi = in.Get<uint32_t>();
  const uint32_t value_dim = in.Get<uint32_t>();
  const uint64_t count = in.Get<uint64_t>();
  if (d_phi > kMaxFeatures || value_dim > kMaxPhiDim || (d_phi == 0) != (value_dim == 0)) {
    return corrupt("dimensions out of range");
  }
  if (count > kMaxPhiCount || (d_phi == 0 && count != 0))
    return corrupt("token count out of range");
  PhiCache cache;
  cache.dtype_ = flags & kBf16Flag ? DType::kBf16 : DType::kF32;
  const size_t sums = size_t{d_phi} * (size_t{value_dim} + 1);
  if (in.remaining() != d_phi * sizeof(float) + sums * DTypeBytes(cache.dtype_)) {
    return corrupt("size does not fit its shape");
  }

  cache.d_phi_ = d_phi;
  cache.value_dim_ = value_dim;
  cache.count_ = count;
  cache.m_ = in.GetFloats<float>(d_phi);
  if (cache.dtype_ == DType::kBf16) {
    cache.u_.resize(d_phi);
    cache.t_.resize(size_t{d_phi} * value_dim);
    for (std::vector<float>* field : {&cache.u_, &cache.t_}) {
      for (float& x : *field) x = Bf16ToFloat(in.Get<uint16_t>());
    }
  } else {
    cache.u_ = in.GetFloats<float>(d_phi);
    cache.t_ = in.GetFloats<float>(size_t{d_phi} * value_dim);
  }
  if (!AllFinite<float>(cache.u_) || !AllFinite<float>(cache.t_)) {
    return corrupt("holds NaN or infinity");
  }
  for (uint32_t f = 0; f < d_phi; ++f) {
    const std::span<const float> row = cache.t().subspan(size_t{f} * value_dim, value_dim);
    if (cache.m_[f] == kEmpty) {
      if (cache.u_[f] != 0 || std::ranges::any_of(row, [](float v) { return v != 0; })) {
        return corrupt("a feature of no token has mass");
      }
      continue;
    }
    if (!std::isfinite(cache.m_[f])) return corrupt("holds NaN or infinity");
    // Every term of u is at most 1, one of them is 1 up to rounding.
    const double slack = cache.dtype_ == DType::kBf16 ? 0.01 : 0.001;
    const double most = static_cast<double>(count) * (1 + slack);
    if (count == 0 || cache.u_[f] < 1 - slack || cache.u_[f] > most) {
      return corrupt("a feature's mass does not fit its token count");
    }
  }
  return cache;
}

}  // namespace prefixd
