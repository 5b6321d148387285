#include "attention/rows/finite_check.h"

#include <limits>

#include "tests/support/random_kv.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(CheckQueries, AcceptsEveryFiniteNumberAndNamesTheBadHead) {
  constexpr float kMax = std::numeric_limits<float>::max();
  std::vector<float> q = {kMax, kMax, -kMax, 0, 1e-45f, 2};
  EXPECT_TRUE(CheckQueries(q, 2, 3).ok()) << "large finite queries must not look infinite";
  q[4] = std::numeric_limits<float>::infinity();
  const Status status = CheckQueries(q, 2, 3);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().message, "queries: query head 1 holds infinity at element 1");
}

TEST(ExplainNonFinite, NamesTensorRowAndElementOrSaysOverflow) {
  testing::OwnedRows a({2, 2, DType::kF32}, 3), b({2, 2, DType::kF32}, 3);
  const std::vector<float> fine = {1, 2};
  for (size_t i = 0; i < 3; ++i) a.Set(i, fine, fine), b.Set(i, fine, fine);
  const NamedRows both[] = {{"sinks", a.view()}, {"tail", b.view()}};
  EXPECT_NE(ExplainNonFinite(both).message.find("overflow"), std::string::npos);
  b.Set(2, fine, std::vector<float>{0, std::numeric_limits<float>::quiet_NaN()});
  EXPECT_EQ(ExplainNonFinite(both).message, "tail value: row 2 holds NaN at element 1");
}

}  // namespace
}  // namespace prefixd
