#include "attention/estimators/moments.h"

#include <algorithm>
#include <cassert>
#include <string>

#include "attention/estimators/byte_codec.h"
#include "attention/kernels/kernels.h"
#include "attention/rows/limits.h"

namespace prefixd {
namespace {

// Layout, little-endian: magic u32, version u16, flags u16, key_dim u32, value_dim u32, count u64;
// then float32 mean_key, key_m2, mean_value and, by flag: cross; u32 rank, key factor, value
// factor; the upper triangle of the covariance, row by row.
constexpr uint32_t kMomentsMagic = 0x4f4d5850;  // "PXMO"
constexpr uint16_t kMomentsVersion = 1;
constexpr uint16_t kHasCross = 1, kHasFactor = 2, kHasCovariance = 4;
constexpr size_t kMomentsHeaderBytes = 24;
constexpr uint64_t kMaxCount = uint64_t{1} << 32;  // token positions are 32 bits wide
constexpr size_t kBlockTokens = 256;

// Holds a block's rows, converted, and their exact-as-possible moments.
struct BlockMoments {
  std::vector<double> mean;    // [dim]
  std::vector<float> centred;  // [n][dim]
  std::vector<double> sum_sq;  // [dim], centred
};

// `at` returns where vector i lies.
template <typename At>
void Centre(DType dtype, At at, size_t n, uint32_t dim, BlockMoments& out) {
  out.mean.assign(dim, 0.0);
  out.sum_sq.assign(dim, 0.0);
  out.centred.resize(n * dim);
  for (size_t i = 0; i < n; ++i) {
    float* row = out.centred.data() + i * dim;
    Kernels().to_float(dtype, at(i), dim, row);
    for (uint32_t j = 0; j < dim; ++j) out.mean[j] += double{row[j]};
  }
  for (double& m : out.mean) m /= static_cast<double>(n);
  for (size_t i = 0; i < n; ++i) {
    float* row = out.centred.data() + i * dim;
    for (uint32_t j = 0; j < dim; ++j) {
      const double d = double{row[j]} - out.mean[j];
      out.sum_sq[j] += d * d;
      row[j] = static_cast<float>(d);
    }
  }
}

}  // namespace

MomentSummary::MomentSummary(uint32_t key_dim, uint32_t value_dim, bool with_cross,
                             bool with_covariance)
    : key_dim_(key_dim),
      value_dim_(value_dim),
      mean_key_(key_dim),
      key_m2_(key_dim),
      mean_value_(value_dim),
      cross_(with_cross ? size_t{key_dim} * value_dim : 0),
      covariance_(with_covariance ? size_t{key_dim} * key_dim : 0) {}

void MomentSummary::Add(const RowsView& rows) {
  assert(rows.count == 0 || (rows.shape.key_dim == key_dim_ && rows.shape.value_dim == value_dim_));
  BlockMoments keys, values;
  std::vector<float> keys_by_channel;
  for (size_t begin = 0; begin < rows.count; begin += kBlockTokens) {
    const size_t n = std::min(kBlockTokens, rows.count - begin);
    const RowsView block = rows.Sub(begin, n);
    const DType dtype = rows.shape.dtype;
    Centre(
        dtype, [&](size_t i) { return block.key(i); }, n, key_dim_, keys);
    Centre(
        dtype, [&](size_t i) { return block.value(i); }, n, value_dim_, values);
    MomentSummary part(key_dim_, value_dim_, has_cross() || cross_rank_ > 0, has_covariance());
    part.count_ = n;
    if (part.has_cross() || part.has_covariance()) {
      // sum_i dk_i dx_i^T: each key channel is one row of weights over the block's rows.
      keys_by_channel.resize(size_t{key_dim_} * n);
      for (size_t i = 0; i < n; ++i) {
        for (uint32_t j = 0; j < key_dim_; ++j) {
          keys_by_channel[j * n + i] = keys.centred[i * key_dim_ + j];
        }
      }
    }
    if (part.has_covariance()) {
      const VectorBlock centred_keys = {reinterpret_cast<const std::byte*>(keys.centred.data()),
                                        key_dim_ * sizeof(float), n, key_dim_, DType::kF32};
      Kernels().weighted_sum(keys_by_channel.data(), n, key_dim_, centred_keys,
                             part.covariance_.data(), key_dim_);
    }
    if (part.has_cross()) {
      const VectorBlock centred_values = {reinterpret_cast<const std::byte*>(values.centred.data()),
                                          value_dim_ * sizeof(float), n, value_dim_, DType::kF32};
      Kernels().weighted_sum(keys_by_channel.data(), n, key_dim_, centred_values,
                             part.cross_.data(), value_dim_);
    }
    part.mean_key_.swap(keys.mean);
    part.key_m2_.swap(keys.sum_sq);
    part.mean_value_.swap(values.mean);
    Merge(part);
  }
}

// Chan's formula: with d the difference of means and w = n_a n_b / n, second moments add up as
// M2_a + M2_b + w d d^T, without ever forming a raw sum of squares.
void MomentSummary::Merge(const MomentSummary& other) {
  if (other.count_ == 0) return;
  if (other.cross_rank_ > 0) {
    MomentSummary whole = other;
    whole.Expand();
    return Merge(whole);
  }
  if (cross_rank_ > 0) Expand();
  if (count_ == 0) {
    assert(key_dim_ == 0 ||
           (has_cross() == other.has_cross() && has_covariance() == other.has_covariance()));
    *this = other;
    return;
  }
  assert(key_dim_ == other.key_dim_ && value_dim_ == other.value_dim_);
  assert(has_cross() == other.has_cross() && has_covariance() == other.has_covariance());
  const double n = static_cast<double>(count_ + other.count_);
  const double share = static_cast<double>(other.count_) / n;
  const double w = static_cast<double>(count_) * share;
  std::vector<double> value_diff(value_dim_), key_diff(key_dim_);
  for (uint32_t j = 0; j < key_dim_; ++j) key_diff[j] = other.mean_key_[j] - mean_key_[j];
  for (uint32_t l = 0; l < value_dim_; ++l) value_diff[l] = other.mean_value_[l] - mean_value_[l];
  for (uint32_t j = 0; j < key_dim_; ++j) {
    const double d = key_diff[j];
    key_m2_[j] += other.key_m2_[j] + w * d * d;
    mean_key_[j] += share * d;
    for (uint32_t l = 0; l < key_dim_ && has_covariance(); ++l) {
      const size_t at = size_t{j} * key_dim_ + l;
      covariance_[at] += other.covariance_[at] + w * d * key_diff[l];
    }
    if (!has_cross()) continue;
    double* row = cross_.data() + size_t{j} * value_dim_;
    const double* other_row = other.cross_.data() + size_t{j} * value_dim_;
    const double wd = w * d;
    for (uint32_t l = 0; l < value_dim_; ++l) row[l] += other_row[l] + wd * value_diff[l];
  }
  for (uint32_t l = 0; l < value_dim_; ++l) mean_value_[l] += share * value_diff[l];
  count_ += other.count_;
}

void MomentSummary::Expand() {
  if (cross_rank_ == 0) return;
  cross_.assign(size_t{key_dim_} * value_dim_, 0.0);
  for (uint32_t j = 0; j < key_dim_; ++j) {
    for (uint32_t r = 0; r < cross_rank_; ++r) {
      const double a = key_factor_[size_t{j} * cross_rank_ + r];
      const double* b = value_factor_.data() + size_t{r} * value_dim_;
      for (uint32_t l = 0; l < value_dim_; ++l) cross_[size_t{j} * value_dim_ + l] += a * b[l];
    }
  }
  cross_rank_ = 0;
  key_factor_.clear();
  value_factor_.clear();
}

MomentSummary MomentSummary::Reduced(bool keep_cross, bool keep_covariance) const {
  MomentSummary out(key_dim_, value_dim_, false, false);
  out.count_ = count_;
  out.mean_key_ = mean_key_;
  out.key_m2_ = key_m2_;
  out.mean_value_ = mean_value_;
  if (keep_covariance) out.covariance_ = covariance_;
  if (!keep_cross) return out;
  out.cross_ = cross_;
  out.cross_rank_ = cross_rank_;
  out.key_factor_ = key_factor_;
  out.value_factor_ = value_factor_;
  return out;
}

size_t MomentSummary::bytes() const {
  const size_t dk = key_dim_;
  return sizeof(float) * (2 * dk + value_dim_ + cross_.size() + key_factor_.size() +
                          value_factor_.size() + (has_covariance() ? dk * (dk + 1) / 2 : 0));
}

std::vector<std::byte> MomentSummary::Serialize() const {
  ByteWriter out;
  out.Put(kMomentsMagic);
  out.Put(kMomentsVersion);
  out.Put(static_cast<uint16_t>((has_cross() ? kHasCross : 0) | (cross_rank_ ? kHasFactor : 0) |
                                (has_covariance() ? kHasCovariance : 0)));
  out.Put(key_dim_);
  out.Put(value_dim_);
  out.Put(count_);
  out.PutFloats(mean_key());
  out.PutFloats(key_m2());
  out.PutFloats(mean_value());
  out.PutFloats(cross());
  if (cross_rank_ > 0) {
    out.Put(cross_rank_);
    out.PutFloats(key_factor());
    out.PutFloats(value_factor());
  }
  for (uint32_t j = 0; j < key_dim_ && has_covariance(); ++j) {
    out.PutFloats(covariance().subspan(size_t{j} * key_dim_ + j, key_dim_ - j));
  }
  return out.Take();
}

Result<MomentSummary> MomentSummary::Deserialize(std::span<const std::byte> bytes) {
  constexpr const char* kName = "moment summary";
  const auto corrupt = [](const std::string& what) {
    return Error{Code::kCorrupt, std::string(kName) + ": " + what};
  };
  PREFIXD_ASSIGN(ByteReader in,
                 ReadHead(bytes, kMomentsHeaderBytes, kMomentsMagic, kMomentsVersion, kName));
  const uint16_t flags = in.Get<uint16_t>();
  if ((flags & ~(kHasCross | kHasFactor | kHasCovariance)) != 0) return corrupt("unknown flags");
  const bool with_cross = (flags & kHasCross) != 0, with_factor = (flags & kHasFactor) != 0;
  const bool with_covariance = (flags & kHasCovariance) != 0;
  if (with_cross && with_factor) return corrupt("its cross moment is there twice");
  const uint32_t key_dim = in.Get<uint32_t>();
  const uint32_t value_dim = in.Get<uint32_t>();
  const uint64_t count = in.Get<uint64_t>();
  if (key_dim > kMaxDim || value_dim > kMaxDim || (key_dim == 0) != (value_dim == 0)) {
    return corrupt("dimensions out of range");
  }
  if (count > kMaxCount || (key_dim == 0 && (count != 0 || flags != 0))) {
    return corrupt("token count out of range");
  }
  const size_t dk = key_dim;
  const size_t plain = 2 * dk + value_dim + (with_cross ? dk * value_dim : 0);
  const size_t triangle = with_covariance ? dk * (dk + 1) / 2 : 0;
  if (in.remaining() < plain * sizeof(float)) return corrupt("size does not fit its shape");

  MomentSummary summary(key_dim, value_dim, with_cross, with_covariance);
  summary.count_ = count;
  summary.mean_key_ = in.GetFloats<double>(key_dim);
  summary.key_m2_ = in.GetFloats<double>(key_dim);
  summary.mean_value_ = in.GetFloats<double>(value_dim);
  summary.cross_ = in.GetFloats<double>(with_cross ? dk * value_dim : 0);
  size_t rank = 0;
  if (with_factor) {
    if (in.remaining() < sizeof(uint32_t)) return corrupt("size does not fit its shape");
    rank = summary.cross_rank_ = in.Get<uint32_t>();
    if (rank < 1 || rank >= std::min(key_dim, value_dim)) return corrupt("rank out of range");
  }
  if (in.remaining() != (rank * (dk + value_dim) + triangle) * sizeof(float)) {
    return corrupt("size does not fit its shape");
  }
  summary.key_factor_ = in.GetFloats<double>(dk * rank);
  summary.value_factor_ = in.GetFloats<double>(rank * value_dim);
  for (size_t j = 0; j < dk && with_covariance; ++j) {
    for (size_t l = j; l < dk; ++l) {
      const double c = in.Get<float>();
      summary.covariance_[j * dk + l] = summary.covariance_[l * dk + j] = c;
    }
  }
  for (const auto* field :
       {&summary.mean_key_, &summary.key_m2_, &summary.mean_value_, &summary.cross_,
        &summary.key_factor_, &summary.value_factor_, &summary.covariance_}) {
    if (!AllFinite<double>(*field)) return corrupt("holds NaN or infinity");
    if (count == 0 && std::ranges::any_of(*field, [](double v) { return v != 0; })) {
      return corrupt("an empty set has non-zero moments");
    }
  }
  const auto negative = [](double v) { return v < 0; };
  if (std::ranges::any_of(summary.key_m2_, negative)) return corrupt("a variance is negative");
  for (size_t j = 0; j < dk && with_covariance; ++j) {
    if (summary.covariance_[j * dk + j] < 0) return corrupt("a variance is negative");
  }
  return summary;
}

}  // namespace prefixd
