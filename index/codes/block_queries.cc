#include "index/codes/block_queries.h"

#include <cmath>
#include <numeric>

namespace prefixd {

Result<BlockQueries> PrepareBlockQueries(const BlockCodeBook& book, std::span<const float> queries,
                                         uint32_t heads, float scale) {
  const size_t n = book.keys.components();
  const uint32_t dim = book.keys.key_dim, fields = CodeFields(dim);
  const std::vector<float> along = ProjectOnDirections(book.keys, queries, heads);
  std::vector<float> of_means(along.size());
  BlockQueries out;
  out.error.resize(heads);
  out.units_of_mean.resize(heads);
  std::vector<double> range(heads);
  for (uint32_t g = 0; g < heads; ++g) {
    double left = 0;
    for (size_t c = 0; c < n; ++c) {
      const float x = along[g * n + c];
      of_means[g * n + c] = x * book.mean_ratios[c];
      left += double{x} * x * book.variances[c] * kErrorLeft[book.keys.digits[c]];
    }
    out.error[g] = static_cast<float>(std::fabs(scale) * std::sqrt(left));
  }
  out.means = QuantiseQueries(of_means, book.mean_digits, heads, fields, scale, {});
  for (uint32_t g = 0; g < heads && scale != 0; ++g) {
    int32_t reach = 2;  // of a mean's integer score, and rounding
    for (uint32_t p = 0; p < fields; ++p) {
      reach += ReachOfWeight(out.means.weights[g * fields + p]);
    }
    range[g] = reach * double{out.means.mul[g]} / std::fabs(scale);
  }
  out.keys = QuantiseQueries(along, book.keys.digits, heads, fields, scale, range);
  for (uint32_t g = 0; g < heads; ++g) {
    const auto query = queries.subspan(size_t{g} * dim, dim);
    const double centre =
        scale * std::inner_product(query.begin(), query.end(), book.keys.centre.begin(), 0.0);
    const double unit = out.keys.mul[g];
    out.units_of_mean[g] = unit > 0 ? static_cast<float>(out.means.mul[g] / unit) : 0;
    // The middle of keys' codes is no difference from the mean.
    out.means.add[g] = out.keys.add[g] =
        static_cast<float>(centre + double{out.means.add[g]} + out.keys.add[g]);
    if (!std::isfinite(out.means.mul[g]) || !std::isfinite(out.keys.mul[g]) ||
        !std::isfinite(out.keys.add[g]) || !std::isfinite(out.error[g])) {
      return InvalidArgument("search: scores overflow although queries and keys are finite");
    }
  }
  return out;
}

}  // namespace prefixd
