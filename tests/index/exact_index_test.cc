#include "tests/index/index_test_support.h"
#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

TEST(ExactIndex, AgreesWithBruteForceOnRandomShapes) {
  Random random(prefixd::testing::Seed("AgreesWithBruteForceOnRandomShapes"));
  for (int round = 0; round < 120; ++round) {
    const uint32_t dim = Uniform(random, 1, 96), n = Uniform(random, 1, 600);
    const TestRows rows(Normal(random, size_t{n} * dim, 1.5f), dim, AnyDType(random),
                        Uniform(random, 0, 70), Uniform(random, 0, 33));
    const uint32_t first = Uniform(random, 0, 1000);
    const uint32_t begin = Uniform(random, 0, n), end = Uniform(random, begin, n);
    SearchRequest request;
    request.group = Uniform(random, 1, 8);
    const std::vector<float> queries = Normal(random, size_t{request.group} * dim, 2);
    request.queries = queries;
    request.layer = Layer(dim, round % 3 == 0 ? 5.0f : 0.0f);
    request.candidates = {first + begin, first + end};
    request.k = Uniform(random, 0, (end - begin) + 3);
    request.keys = rows.view();
    request.first_token = first;
    SCOPED_TRACE("round " + std::to_string(round) + ": n " + std::to_string(n) + ", dim " +
                 std::to_string(dim) + ", group " + std::to_string(request.group) + ", k " +
                 std::to_string(request.k) + " of " + std::to_string(end - begin));

    const auto selection = MakeExactIndex({first, first + n})->Search(request);
    ASSERT_TRUE(selection.ok()) << selection.error().ToString();
    ExpectExactSelection(*selection, request, rows, FloatSlack(request, rows));
    for (const Cut& cut : selection->cuts) EXPECT_EQ(cut.kind, CutKind::kExact);
    const bool scans = request.k < end - begin;
    EXPECT_EQ(selection->keys_scanned, scans ? end - begin : 0);
    EXPECT_EQ(selection->bytes_scanned, scans ? (end - begin) * rows.shape.key_bytes() : 0);
  }
}

class ExactIndexTest : public ::testing::Test {
 protected:
  ExactIndexTest() : rows_({1, 0, 0, 1, 1, 1, -1, 0}, 2, DType::kF32), queries_{1, 0, 0, 2} {
    request_.group = 2;
    request_.queries = queries_;
    request_.layer.scale = 1;
    request_.candidates = {10, 14};
    request_.k = 1;
    request_.keys = rows_.view();
    request_.first_token = 10;
  }
  Result<Selection> Search() const { return MakeExactIndex({10, 14})->Search(request_); }
  // Checks that the search is refused as the request's own fault, with a message that contains
  // `what`.
  void ExpectRefused(const std::string& what) const {
    const auto selection = Search();
    ASSERT_FALSE(selection.ok());
    EXPECT_EQ(selection.error().code, Code::kInvalidArgument);
    EXPECT_NE(selection.error().message.find(what), std::string::npos) << selection.error().message;
  }

  TestRows rows_;
  std::vector<float> queries_;
  SearchRequest request_;
};

TEST_F(ExactIndexTest, ASetPerGroupIsRankedByTheBestNormalisedScore) {
  // Head 0 scores 1 0 1 -1, head 1 scores 0 2 2 0. Token 12 is best or shares the best for both.
  const auto selection = Search();
  ASSERT_TRUE(selection.ok());
  EXPECT_EQ(selection->ids.size(), size_t{1});
  EXPECT_TRUE(selection->ids[0] == 11 || selection->ids[0] == 12);
  const double l1 = std::log(2 + 2 * std::exp(2.0));
  EXPECT_NEAR(selection->cuts[1].score, l1 + (2 - l1), 1e-5);
}

TEST_F(ExactIndexTest, MoreThanThereIsReturnsAllWithCutsAtMinusInfinity) {
  for (const uint32_t k : {4u, 5u, 4000000000u}) {
    request_.k = k;
    const auto selection = Search();
    ASSERT_TRUE(selection.ok());
    EXPECT_EQ(selection->ids, (std::vector<uint32_t>{10, 11, 12, 13}));
    for (const Cut& cut : selection->cuts) {
      EXPECT_EQ(cut.kind, CutKind::kExact);
      EXPECT_EQ(cut.score, -std::numeric_limits<float>::infinity());
    }
  }
}

TEST_F(ExactIndexTest, AnEmptyRegionIsAnEmptyExactSelection) {
  request_.candidates = {12, 12};
  request_.keys = RowsView{nullptr, 0, 0, rows_.shape};
  const auto selection = Search();
  ASSERT_TRUE(selection.ok()) << selection.error().ToString();
  EXPECT_TRUE(selection->ids.empty());
  EXPECT_EQ(selection->cuts.size(), size_t{2});
  EXPECT_EQ(selection->cuts[0].kind, CutKind::kExact);
}

TEST_F(ExactIndexTest, BadRequestsAreRefusedAndNamed) {
  queries_[2] = std::numeric_limits<float>::quiet_NaN();
  ExpectRefused("query head 1");
  queries_[2] = std::numeric_limits<float>::infinity();
  ExpectRefused("query head 1");
  queries_[2] = 0;
  request_.candidates = {9, 14};
  ExpectRefused("not covered");
  request_.candidates = {10, 15};
  ExpectRefused("not covered");
  request_.candidates = {13, 12};
  ExpectRefused("before their begin");
  request_.candidates = {10, 14};
  request_.group = 3;
  ExpectRefused("query elements");
  request_.group = 0;
  ExpectRefused("at least one query head");
  request_.group = 2;
  request_.layer.scale = std::numeric_limits<float>::quiet_NaN();
  ExpectRefused("scale");
}

TEST_F(ExactIndexTest, AKeyThatIsNotFiniteIsNamed) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    TestRows rows({1, 0, 0, 1, bad, 1, -1, 0}, 2, DType::kBf16);
    request_.keys = rows.view();
    ExpectRefused("token 12");
  }
}

TEST(IndexNames, RoundTripAndRefuseOthers) {
  for (const IndexKind kind : {IndexKind::kExact, IndexKind::kIvf, IndexKind::kCodes}) {
    const auto again = IndexFromName(IndexName(kind));
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(*again, kind);
  }
  ASSERT_FALSE(IndexFromName("lsh").ok());
  EXPECT_EQ(IndexFromName("").error().code, Code::kInvalidArgument);
}

}  // namespace
}  // namespace prefixd::index
