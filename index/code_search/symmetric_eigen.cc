#include "index/code_search/symmetric_eigen.h"

#include <algorithm>
#include <string>

#include "index/ivf/one_omp_thread.h"

// LAPACK as OpenBLAS brings it; Debian has no header of it without LAPACKE.
extern "C" void dsyev_(const char* jobz, const char* uplo, const int* n, double* a, const int* lda,
                       double* w, double* work, const int* lwork, int* info);

namespace prefixd::index {

Result<Eigen> SymmetricEigen(std::vector<double> matrix, uint32_t n) {
  const OneOmpThread one_thread;
  const int size = static_cast<int>(n);
  int info = 0, lwork = -1;
  double best = 0;
  Eigen out;
  out.values.resize(n);
  dsyev_("V", "U", &size, matrix.data(), &size, out.values.data(), &best, &lwork, &info);
  lwork = std::max(static_cast<int>(best), 3 * size);
  std::vector<double> work(static_cast<size_t>(lwork));
  dsyev_("V", "U", &size, matrix.data(), &size, out.values.data(), work.data(), &lwork, &info);
  if (info != 0) {
    return Error{Code::kInternal, "eigenvalues do not converge (" + std::to_string(info) + ")"};
  }
  // LAPACK's ascend, its vectors are columns of a column-major matrix: rows of ours.
  std::reverse(out.values.begin(), out.values.end());
  out.vectors.resize(matrix.size());
  for (size_t i = 0; i < n; ++i) {
    std::copy_n(matrix.data() + (n - 1 - i) * n, n, out.vectors.data() + i * n);
  }
  return out;
}

}  // namespace prefixd::index
