#include "prefixd/ledger.h"

#include "base/tables/statistics.h"

namespace prefixd {
namespace {

template <typename T>
void Add(T& sum, const T& more) {
  sum += more;
}
template <typename T, size_t n>
void Add(std::array<T, n>& sum, const std::array<T, n>& more) {
  for (size_t i = 0; i < n; ++i) sum[i] += more[i];
}

}  // namespace

Ledger& Ledger::operator+=(const Ledger& other) {
  ForEachStatistic<Ledger>(
      [&](const auto& statistic) { Add(this->*statistic.member, other.*statistic.member); });
  return *this;
}

}  // namespace prefixd
