#include "attention/estimators/phi_cache.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <string>

#include "attention/estimators/byte_codec.h"
#include "attention/estimators/outweighing.h"
#include "attention/kernels/kernels.h"
#include "attention/rows/row_blocks.h"

namespace prefixd {
namespace {

// Layout, little-endian: magic u32, version u16, flags u16, d_phi u32, value_dim u32,
// count u64, rows kept apart u32, their key_dim u32 (0 without); then float32 m; u and T in float32
// or, with kBf16Flag, bf16; then of each row kept apart float32 key, value, log phi.
constexpr uint32_t kPhiMagic = 0x48505850;  // "PXPH"
constexpr uint16_t kPhiVersion = 2;
constexpr uint16_t kBf16Flag = 1;
constexpr size_t kPhiHeaderBytes = 32;
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
    // Beside a single row there is nothing to compare with: those before and after it decide.
    const std::vector<uint32_t> outweighing =
        part.count == 1 ? std::vector<uint32_t>{0} : OutweighingRows(log_phi, part.count, d_phi_);
    AddFeatures(part, log_phi, outweighing);
  }
}

void PhiCache::AddFeatures(const RowsView& rows, std::span<const float> given,
                           std::span<const uint32_t> outweighing) {
  if (rows.count == 0) return;
  assert(rows.shape.value_dim == value_dim_ && given.size() == rows.count * d_phi_);
  PhiCache part(d_phi_, value_dim_);
  part.count_ = rows.count;
  std::span<const float> log_phi = given;
  std::vector<float> of_others;  // without the features of rows kept apart
  if (!outweighing.empty()) {
    of_others.assign(given.begin(), given.end());
    log_phi = of_others;
  }
  for (const uint32_t i : outweighing) {
    const auto features = std::span(of_others).subspan(size_t{i} * d_phi_, d_phi_);
    ApartRow& row = part.apart_.emplace_back();
    row.key.resize(rows.shape.key_dim);
    row.value.resize(value_dim_);
    ToFloat(rows.shape.dtype, rows.key(i), row.key);
    ToFloat(rows.shape.dtype, rows.value(i), row.value);
    row.log_phi.assign(features.begin(), features.end());
    std::ranges::fill(features, kEmpty);
  }
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
  } else {
    assert(d_phi_ == other.d_phi_ && value_dim_ == other.value_dim_);
    AddSums(other);
    count_ += other.count_;
    apart_.insert(apart_.end(), other.apart_.begin(), other.apart_.end());
  }
  dtype_ = DType::kF32;
  Settle();
}

void PhiCache::AddSums(const PhiCache& other) {
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
}

// Takes rows that outweigh the others no more, and those that are too many, into the sums.
void PhiCache::Settle() {
  while (!apart_.empty()) {
    std::vector<double> excess(apart_.size(), -std::numeric_limits<double>::infinity());
    std::vector<float> weights(apart_.size());
    for (uint32_t f = 0; f < d_phi_; ++f) {
      std::ranges::transform(apart_, weights.begin(),
                             [&](const ApartRow& row) { return row.log_phi[f]; });
      const double sum = m_[f] == kEmpty ? double{kEmpty} : m_[f] + std::log(double{u_[f]});
      RaiseExcess(weights, sum, excess);
    }
    const auto least = std::ranges::min_element(excess);
    if (*least > kOutweighs && apart_.size() <= kMostApart) return;
    const auto row = apart_.begin() + (least - excess.begin());
    PhiCache one(d_phi_, value_dim_);
    for (uint32_t f = 0; f < d_phi_; ++f) {
      if (row->log_phi[f] == kEmpty) continue;
      one.m_[f] = row->log_phi[f];
      one.u_[f] = 1;
      std::ranges::copy(row->value, one.t_.begin() + static_cast<ptrdiff_t>(f) * value_dim_);
    }
    AddSums(one);
    apart_.erase(row);
  }
}

size_t PhiCache::bytes() const {
  return m_.size() * sizeof(float) + (u_.size() + t_.size()) * DTypeBytes(dtype_) + apart_bytes();
}

size_t PhiCache::apart_bytes() const {
  size_t floats = 0;
  for (const ApartRow& row : apart_) floats += row.key.size() + row.value.size() + d_phi_;
  return floats * sizeof(float);
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
  out.Put(static_cast<uint32_t>(apart_.size()));
  out.Put(apart_.empty() ? 0u : static_cast<uint32_t>(apart_.front().key.size()));
  for (float m : m_) out.Put(m);  // -inf where no token has the feature
  if (dtype_ == DType::kBf16) {
    for (float x : u_) out.Put(FloatToBf16(x));
    for (float x : t_) out.Put(FloatToBf16(x));
  } else {
    out.PutFloats(u());
    out.PutFloats(t());
  }
  for (const ApartRow& row : apart_) {
    out.PutFloats(std::span<const float>(row.key));
    out.PutFloats(std::span<const float>(row.value));
    for (float x : row.log_phi) out.Put(x);
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
  const uint32_t apart = in.Get<uint32_t>(), key_dim = in.Get<uint32_t>();
  if (d_phi > kMaxFeatures || value_dim > kMaxPhiDim || (d_phi == 0) != (value_dim == 0)) {
    return corrupt("dimensions out of range");
  }
  if (apart > std::min<uint64_t>(kMostApart, count) || key_dim > kMaxPhiDim ||
      (apart == 0) != (key_dim == 0)) {
    return corrupt("rows kept apart out of range");
  }
  if (count > kMaxPhiCount || (d_phi == 0 && count != 0))
    return corrupt("token count out of range");
  PhiCache cache;
  cache.dtype_ = flags & kBf16Flag ? DType::kBf16 : DType::kF32;
  const size_t sums = size_t{d_phi} * (size_t{value_dim} + 1);
  const size_t apart_floats = apart * (size_t{key_dim} + value_dim + d_phi);
  if (in.remaining() != (d_phi + apart_floats) * sizeof(float) + sums * DTypeBytes(cache.dtype_)) {
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
  for (uint32_t i = 0; i < apart; ++i) {
    ApartRow& row = cache.apart_.emplace_back();
    row.key = in.GetFloats<float>(key_dim);
    row.value = in.GetFloats<float>(value_dim);
    row.log_phi = in.GetFloats<float>(d_phi);
    const auto none = [](float x) { return !(x < std::numeric_limits<float>::infinity()); };
    if (!AllFinite<float>(row.key) || !AllFinite<float>(row.value) ||
        std::ranges::any_of(row.log_phi, none)) {
      return corrupt("holds NaN or infinity");
    }
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
