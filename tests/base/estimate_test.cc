#include "prefixd/estimate.h"

#include <limits>

#include "tests/support/test.h"

namespace prefixd {
namespace {

constexpr auto kMeasured = EstimateSource::kMeasured;

ReuseEstimate Estimate(TimeEstimate restore, TimeEstimate retrieve, TimeEstimate recompute) {
  ReuseEstimate e;
  e.restore = restore;
  e.retrieve = retrieve;
  e.recompute = recompute;
  return e;
}

TEST(FastestWay, IsTheLeastTimeOfThoseKnown) {
  const TimeEstimate one{1, kMeasured}, two{2, kMeasured}, token{0.01, kMeasured};
  // Restoring or recomputing; equal times leave what is stored in use.
  EXPECT_EQ(FastestWay(Estimate(one, {}, two), 0), ReuseAdvice::kRestore);
  EXPECT_EQ(FastestWay(Estimate(two, {}, one), 0), ReuseAdvice::kRecompute);
  EXPECT_EQ(FastestWay(Estimate(one, {}, one), 0), ReuseAdvice::kRestore);
  // A step for each token of the answer: 0.5 s and 1.5 s.
  EXPECT_EQ(FastestWay(Estimate(two, token, one), 50), ReuseAdvice::kAttach);
  EXPECT_EQ(FastestWay(Estimate(two, token, one), 150), ReuseAdvice::kRecompute);
  EXPECT_EQ(FastestWay(Estimate(one, token, two), 50), ReuseAdvice::kAttach);
  EXPECT_EQ(FastestWay(Estimate(one, token, two), 150), ReuseAdvice::kRestore);
  EXPECT_EQ(FastestWay(Estimate(one, token, {}), 50), ReuseAdvice::kAttach);
  EXPECT_EQ(FastestWay(Estimate(one, token, {}), 150), ReuseAdvice::kRestore);
}

TEST(FastestWay, IsUnknownWhereNothingCanBeCompared) {
  const TimeEstimate one{1, kMeasured}, token{0.01, kMeasured};
  EXPECT_EQ(FastestWay({}, 100), ReuseAdvice::kUnknown);
  EXPECT_EQ(FastestWay(Estimate(one, {}, {}), 100), ReuseAdvice::kUnknown);
  EXPECT_EQ(FastestWay(Estimate({}, {}, one), 100), ReuseAdvice::kUnknown);
  EXPECT_EQ(FastestWay(Estimate({}, token, {}), 100), ReuseAdvice::kUnknown);
  // How long the answer will be is not known.
  EXPECT_EQ(FastestWay(Estimate(one, token, {}), 0), ReuseAdvice::kUnknown);
  EXPECT_EQ(FastestWay(Estimate({}, token, one), 0), ReuseAdvice::kUnknown);
  // Restoring may be faster yet.
  EXPECT_EQ(FastestWay(Estimate({}, token, one), 150), ReuseAdvice::kUnknown);
  EXPECT_EQ(FastestWay(Estimate({}, token, one), 50), ReuseAdvice::kAttach);
}

TEST(EngineSpeed, IsFinite) {
  EXPECT_TRUE(CheckEngineSpeed({}).ok());
  EXPECT_TRUE(CheckEngineSpeed({1e9}).ok());
  for (const double rate :
       {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(CheckEngineSpeed({rate}).error().code, Code::kInvalidArgument);
  }
}

}  // namespace
}  // namespace prefixd
