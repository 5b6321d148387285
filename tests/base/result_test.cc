#include "prefixd/result.h"

#include <memory>

#include "tests/support/test.h"

namespace prefixd {
namespace {

Result<int> Half(int x) {
  if (x % 2 != 0) return InvalidArgument("odd");
  return x / 2;
}

Result<int> Quarter(int x) {
  PREFIXD_ASSIGN(const int half, Half(x));
  return Half(half);
}

Status Check(int x) {
  PREFIXD_TRY(Half(x));
  return {};
}

TEST(Result, CarriesAValueOrAnError) {
  EXPECT_EQ(*Quarter(12), 3);
  EXPECT_FALSE(Quarter(6).ok());
  EXPECT_EQ(Quarter(6).error().message, "odd");
  EXPECT_TRUE(Check(2).ok());
  EXPECT_EQ(Check(3).error().code, Code::kInvalidArgument);
}

TEST(Result, HoldsMoveOnlyValues) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(7));
  const std::unique_ptr<int> taken = std::move(result).value();
  EXPECT_EQ(*taken, 7);
}

TEST(Code, NamesRoundTripAndPrintInErrors) {
  for (int i = 0; i <= static_cast<int>(Code::kInternal); ++i) {
    const Code code = static_cast<Code>(i);
    EXPECT_EQ(CodeFromName(CodeName(code)), code) << i;
  }
  EXPECT_EQ(CodeName(Code::kInfeasible), "infeasible");
  EXPECT_EQ(CodeFromName("no such name"), Code::kInternal);
  EXPECT_EQ((Error{Code::kNotFound, "no model 'x'"}.ToString()), "not_found: no model 'x'");
}

}  // namespace
}  // namespace prefixd
