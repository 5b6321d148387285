#include "index/ivf/centred_keys.h"

#include <cmath>
#include <string>

#include "index/search/search_request.h"

namespace prefixd::index {
namespace {

constexpr float kLargestF16 = 65504;

}  // namespace

Result<std::vector<float>> CentredKeys(const RowsView& keys, uint32_t first_token,
                                       std::span<float> mean) {
  const uint32_t dim = keys.shape.key_dim;
  std::vector<float> centred(keys.count * dim);
  std::vector<double> sum(dim, 0.0);
  for (size_t i = 0; i < keys.count; ++i) {
    const std::span<float> key(centred.data() + i * dim, dim);
    ToFloat(keys.shape.dtype, keys.key(i), key);
    if (!AllFinite(key)) {
      return InvalidArgument("the key of token " + std::to_string(first_token + i) +
                             " is NaN or infinite");
    }
    for (uint32_t d = 0; d < dim; ++d) sum[d] += key[d];
  }
  for (uint32_t d = 0; d < dim; ++d) mean[d] = static_cast<float>(sum[d] / double(keys.count));
  for (size_t i = 0; i < keys.count; ++i) {
    float* key = centred.data() + i * dim;
    for (uint32_t d = 0; d < dim; ++d) {
      key[d] -= mean[d];
      if (!(std::fabs(key[d]) <= kLargestF16)) {
        return InvalidArgument("the key of token " + std::to_string(first_token + i) +
                               " is too large for 16-bit codes; use an exact index");
      }
    }
  }
  return centred;
}

}  // namespace prefixd::index
