// Tests the median and quartiles against values worked by hand.
#include "measure/timing/statistics.h"

#include "measure/timing/json_file.h"
#include "tests/support/expect_ok.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

TEST(Statistics, AnOddNumberHasItsMiddleAsMedian) {
  const Spread s = Summarise({5, 1, 3, 4, 2});
  EXPECT_DOUBLE_EQ(s.low, 2);
  EXPECT_DOUBLE_EQ(s.median, 3);
  EXPECT_DOUBLE_EQ(s.high, 4);
}

TEST(Statistics, AnEvenNumberHasTheMiddleOfTwo) {
  const Spread two = Summarise({3, 1});
  EXPECT_DOUBLE_EQ(two.low, 1.5);
  EXPECT_DOUBLE_EQ(two.median, 2);
  EXPECT_DOUBLE_EQ(two.high, 2.5);
  EXPECT_DOUBLE_EQ(Summarise({10, 1, 2, 4}).median, 3);
}

// A log's file may have any name.
TEST(Figures, AreWrittenWhateverNamesAreInThem) {
  testing::TempDir dir;
  const std::string file = dir / "figures.json";
  EXPECT_OK(WriteJson(file, {{"log", "caf\xe9.jsonl"}, {"n", 1}}));
  EXPECT_EQ(nlohmann::json::parse(testing::ReadFile(file), nullptr, false)["n"], 1);
}

TEST(Statistics, OneIsAllAndNoneIsZero) {
  EXPECT_DOUBLE_EQ(Summarise({7}).low, 7);
  EXPECT_DOUBLE_EQ(Summarise({7}).high, 7);
  EXPECT_DOUBLE_EQ(Summarise({}).median, 0);
}

}  // namespace
}  // namespace prefixd::bench
