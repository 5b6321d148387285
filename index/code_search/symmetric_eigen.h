// Eigenvalues of symmetric matrices, by LAPACK. Internal to index/.
#pragma once

#include <cstdint>
#include <vector>

#include "prefixd/result.h"

namespace prefixd::index {

struct Eigen {
  std::vector<double> values;   // [n], descending
  std::vector<double> vectors;  // [n][n]: row i belongs to values[i], of unit length
};

// matrix: [n][n], symmetric. kInternal when LAPACK does not converge (entries not finite).
Result<Eigen> SymmetricEigen(std::vector<double> matrix, uint32_t n);

}  // namespace prefixd::index
