#include "attention/estimators/feature_map.h"

#include <algorithm>
#include <cassert>
#include <cmath>

#include "attention/estimators/byte_codec.h"
#include "attention/kernels/kernels.h"

namespace prefixd {
namespace {

constexpr uint32_t kMaxMapDim = 4096;
constexpr size_t kBlock = 64;  // inputs carried through the layers together

// A matrix whose rows are padded with zeros to PadUp(columns), as the kernels want them.
class PaddedRows {
 public:
  PaddedRows(size_t n, uint32_t columns)
      : columns_(columns), stride_(PadUp(columns)), data_(n * stride_) {}
  float* row(size_t i) { return data_.data() + i * stride_; }
  const float* data() const { return data_.data(); }
  float* data() { return data_.data(); }
  size_t stride() const { return stride_; }
  uint32_t columns() const { return columns_; }

 private:
  uint32_t columns_;
  size_t stride_;
  std::vector<float> data_;
};

// out_i = W in_i + b for n rows.
void Linear(const PaddedRows& in, size_t n, std::span<const float> w, std::span<const float> b,
            float* out, size_t out_stride) {
  const VectorBlock weights = {reinterpret_cast<const std::byte*>(w.data()),
                               in.columns() * sizeof(float), b.size(), in.columns(), DType::kF32};
  Kernels().dot(in.data(), in.stride(), n, weights, 1.0f, out, out_stride);
  for (size_t i = 0; i < n; ++i) {
    for (size_t o = 0; o < b.size(); ++o) out[i * out_stride + o] += b[o];
  }
}

Status CheckTensor(const char* name, std::span<const float> tensor, size_t size) {
  if (tensor.size() != size) {
    return InvalidArgument(std::string("feature map: ") + name + " has " +
                           std::to_string(tensor.size()) + " elements; its shape asks for " +
                           std::to_string(size));
  }
  if (!AllFinite(tensor)) {
    return InvalidArgument(std::string("feature map: ") + name + " holds NaN or infinity");
  }
  return {};
}

}  // namespace

Status FeatureMap::Validate() const {
  for (uint32_t dim : {in_dim, d_emb, d_phi}) {
    if (dim < 1 || dim > kMaxMapDim) {
      return InvalidArgument("feature map: dimensions must be 1.." + std::to_string(kMaxMapDim));
    }
  }
  const size_t in = in_dim, emb = d_emb, phi = d_phi;
  PREFIXD_TRY(CheckTensor("w_in", w_in, emb * in));
  PREFIXD_TRY(CheckTensor("b_in", b_in, emb));
  PREFIXD_TRY(CheckTensor("w1", w1, emb * emb));
  PREFIXD_TRY(CheckTensor("b1", b1, emb));
  PREFIXD_TRY(CheckTensor("w2", w2, emb * emb));
  PREFIXD_TRY(CheckTensor("b2", b2, emb));
  PREFIXD_TRY(CheckTensor("w_out", w_out, phi * emb));
  PREFIXD_TRY(CheckTensor("b_out", b_out, phi));
  return CheckTensor("alpha", std::span(&alpha, 1), 1);
}

void FeatureMap::LogPhi(std::span<const float> x, size_t n, std::span<float> out) const {
  assert(x.size() == n * in_dim && out.size() == n * d_phi);
  const size_t block = std::min(n, kBlock);
  PaddedRows input(block, in_dim), g0(block, d_emb), hidden(block, d_emb), h(block, d_emb);
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    for (size_t i = 0; i < count; ++i) {
      std::copy_n(x.data() + (begin + i) * in_dim, in_dim, input.row(i));
    }
    Linear(input, count, w_in, b_in, g0.data(), g0.stride());
    Linear(g0, count, w1, b1, hidden.data(), hidden.stride());
    for (size_t i = 0; i < count; ++i) Kernels().gelu(hidden.row(i), d_emb);
    Linear(hidden, count, w2, b2, h.data(), h.stride());
    for (size_t i = 0; i < count; ++i) {
      const float* residual = h.row(i);
      float* row = g0.row(i);
      for (uint32_t e = 0; e < d_emb; ++e) row[e] += alpha * residual[e];
    }
    Linear(g0, count, w_out, b_out, out.data() + begin * d_phi, d_phi);
  }
}

Status FeatureMapSet::Validate(const KvGeometry& geometry) const {
  const auto check = [&](const char* name, const std::vector<FeatureMap>& maps, uint32_t heads) {
    const size_t want = size_t{geometry.n_layers} * heads;
    if (maps.size() != want) {
      return Status(InvalidArgument(std::string("feature maps: ") + name + " has " +
                                    std::to_string(maps.size()) + " maps; the model needs " +
                                    std::to_string(want) + " (layers x heads)"));
    }
    for (size_t i = 0; i < maps.size(); ++i) {
      const std::string where = std::string(name) + " of layer " + std::to_string(i / heads) +
                                ", head " + std::to_string(i % heads) + ": ";
      if (Status status = maps[i].Validate(); !status.ok()) {
        return Status(InvalidArgument(where + status.error().message));
      }
      if (maps[i].in_dim != geometry.key_dim || maps[i].d_phi != d_phi) {
        return Status(
            InvalidArgument(where + "maps " + std::to_string(maps[i].in_dim) + " to " +
                            std::to_string(maps[i].d_phi) + " dimensions; the model needs " +
                            std::to_string(geometry.key_dim) + " to " + std::to_string(d_phi)));
      }
    }
    return Status();
  };
  if (length == 0) return InvalidArgument("feature maps: target prefix length is 0");
  if (!phi_q.empty()) PREFIXD_TRY(check("phi_q", phi_q, geometry.n_q_heads));
  return check("phi_k", phi_k, geometry.n_kv_heads);
}

}  // namespace prefixd
