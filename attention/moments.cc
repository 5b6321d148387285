#include "attention/moments.h"

#include <algorithm>
#include <cassert>
#include <string>

#include "attention/byte_codec.h"
#include "attention/kernels.h"

namespace prefixd {
namespace {

// Layout, little-endian: magic u32, version u16, flags u16, key_dim u32, value_dim u32, count u64;
// then float32 mean_key, key_m2, mean_value and, with kHasCross, cross.
constexpr uint32_t kMagic = 0x4f4d5850;  // "PXMO"
constexpr uint16_t kVersion = 1;
constexpr uint16_t kHasCross = 1;
constexpr size_t kHeaderBytes = 24;
constexpr uint32_t kMaxDim = 1024;
constexpr uint64_t kMaxCount = uint64_t{1} << 32;  // token positions are 32 bits wide
constexpr size_t kBlock = 256;

// A block's rows, converted, and their exact-as-possible moments.
struct BlockMoments {
  std::vector<double> mean;    // [dim]
  std::vector<float> centred;  // [n][dim]
  std::vector<double> sum_sq;  // [dim], centred
};

void Centre(DType dtype, const std::byte* data, size_t stride, size_t n, uint32_t dim,
            BlockMoments& out) {
  out.mean.assign(dim, 0.0);
  out.sum_sq.assign(dim, 0.0);
  out.centred.resize(n * dim);
  for (size_t i = 0; i < n; ++i) {
    float* row = out.centred.data() + i * dim;
    Kernels().to_float(dtype, data + i * stride, dim, row);
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

MomentSummary::MomentSummary(uint32_t key_dim, uint32_t value_dim, bool with_cross)
    : key_dim_(key_dim),
      value_dim_(value_dim),
      mean_key_(key_dim),
      key_m2_(key_dim),
      mean_value_(value_dim),
      cross_(with_cross ? size_t{key_dim} * value_dim : 0) {}

void MomentSummary::Add(const RowsView& rows) {
  assert(rows.count == 0 || (rows.shape.key_dim == key_dim_ && rows.shape.value_dim == value_dim_));
  BlockMoments keys, values;
  std::vector<float> keys_by_channel;
  for (size_t begin = 0; begin < rows.count; begin += kBlock) {
    const size_t n = std::min(kBlock, rows.count - begin);
    const RowsView block = rows.Sub(begin, n);
    Centre(rows.shape.dtype, block.key(0), rows.stride, n, key_dim_, keys);
    Centre(rows.shape.dtype, block.value(0), rows.stride, n, value_dim_, values);
    MomentSummary part(key_dim_, value_dim_, has_cross());
    part.count_ = n;
    if (has_cross()) {
      // sum_i dk_i dv_i^T: each key channel is one row of weights over the block's values.
      keys_by_channel.resize(size_t{key_dim_} * n);
      for (size_t i = 0; i < n; ++i) {
        for (uint32_t j = 0; j < key_dim_; ++j) {
          keys_by_channel[j * n + i] = keys.centred[i * key_dim_ + j];
        }
      }
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
  if (count_ == 0) {
    assert(key_dim_ == 0 || has_cross() == other.has_cross());
    *this = other;
    return;
  }
  assert(key_dim_ == other.key_dim_ && value_dim_ == other.value_dim_);
  assert(has_cross() == other.has_cross());
  const double n = static_cast<double>(count_ + other.count_);
  const double share = static_cast<double>(other.count_) / n;
  const double w = static_cast<double>(count_) * share;
  std::vector<double> value_diff(value_dim_);
  for (uint32_t l = 0; l < value_dim_; ++l) value_diff[l] = other.mean_value_[l] - mean_value_[l];
  for (uint32_t j = 0; j < key_dim_; ++j) {
    const double d = other.mean_key_[j] - mean_key_[j];
    key_m2_[j] += other.key_m2_[j] + w * d * d;
    mean_key_[j] += share * d;
    if (!has_cross()) continue;
    double* row = cross_.data() + size_t{j} * value_dim_;
    const double* other_row = other.cross_.data() + size_t{j} * value_dim_;
    const double wd = w * d;
    for (uint32_t l = 0; l < value_dim_; ++l) row[l] += other_row[l] + wd * value_diff[l];
  }
  for (uint32_t l = 0; l < value_dim_; ++l) mean_value_[l] += share * value_diff[l];
  count_ += other.count_;
}

std::vector<std::byte> MomentSummary::Serialize() const {
  ByteWriter out;
  out.Put(kMagic);
  out.Put(kVersion);
  out.Put(has_cross() ? kHasCross : uint16_t{0});
  out.Put(key_dim_);
  out.Put(value_dim_);
  out.Put(count_);
  out.PutFloats(mean_key());
  out.PutFloats(key_m2());
  out.PutFloats(mean_value());
  out.PutFloats(cross());
  return out.Take();
}

Result<MomentSummary> MomentSummary::Deserialize(std::span<const std::byte> bytes) {
  const auto corrupt = [](const std::string& what) {
    return Error{Code::kCorrupt, "moment summary: " + what};
  };
  ByteReader in(bytes);
  if (in.remaining() < kHeaderBytes) return corrupt("shorter than its header");
  if (in.Get<uint32_t>() != kMagic) return corrupt("not a moment summary");
  const uint16_t version = in.Get<uint16_t>();
  if (version != kVersion) return corrupt("unknown version " + std::to_string(version));
  const uint16_t flags = in.Get<uint16_t>();
  if ((flags & ~kHasCross) != 0) return corrupt("unknown flags");
  const bool with_cross = (flags & kHasCross) != 0;
  const uint32_t key_dim = in.Get<uint32_t>();
  const uint32_t value_dim = in.Get<uint32_t>();
  const uint64_t count = in.Get<uint64_t>();
  if (key_dim > kMaxDim || value_dim > kMaxDim || (key_dim == 0) != (value_dim == 0)) {
    return corrupt("dimensions out of range");
  }
  if (count > kMaxCount || (key_dim == 0 && (count != 0 || with_cross))) {
    return corrupt("token count out of range");
  }
  const size_t cross_size = with_cross ? size_t{key_dim} * value_dim : 0;
  const size_t floats = 2 * size_t{key_dim} + value_dim + cross_size;
  if (in.remaining() != floats * sizeof(float)) return corrupt("size does not fit its shape");

  MomentSummary summary(key_dim, value_dim, with_cross);
  summary.count_ = count;
  summary.mean_key_ = in.GetFloats<double>(key_dim);
  summary.key_m2_ = in.GetFloats<double>(key_dim);
  summary.mean_value_ = in.GetFloats<double>(value_dim);
  summary.cross_ = in.GetFloats<double>(cross_size);
  for (const auto* field :
       {&summary.mean_key_, &summary.key_m2_, &summary.mean_value_, &summary.cross_}) {
    if (!AllFinite<double>(*field)) return corrupt("holds NaN or infinity");
    if (count == 0 && std::ranges::any_of(*field, [](double v) { return v != 0; })) {
      return corrupt("an empty set has non-zero moments");
    }
  }
  if (std::ranges::any_of(summary.key_m2_, [](double v) { return v < 0; })) {
    return corrupt("a variance is negative");
  }
  return summary;
}

}  // namespace prefixd
