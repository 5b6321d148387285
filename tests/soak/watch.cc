#include "tests/soak/watch.h"

namespace prefixd::soak {

double Slope(const std::vector<double>& x, const std::vector<double>& y) {
  if (x.size() < 3) return 0;
  double mean_x = 0, mean_y = 0, xy = 0, xx = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    mean_x += x[i] / static_cast<double>(x.size());
    mean_y += y[i] / static_cast<double>(x.size());
  }
  for (size_t i = 0; i < x.size(); ++i) {
    xy += (x[i] - mean_x) * (y[i] - mean_y);
    xx += (x[i] - mean_x) * (x[i] - mean_x);
  }
  return xx > 0 ? xy / xx : 0;
}

}  // namespace prefixd::soak
