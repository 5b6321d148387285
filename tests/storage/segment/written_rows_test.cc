// Tests which rows a new segment takes, by heads.
#include "storage/segment/written_rows.h"

#include "tests/support/expect_ok.h"

namespace prefixd::storage {
namespace {

TEST(WrittenRows, KnowsEachRunOfHeadsByItself) {
  WrittenRows written({2, 4}, 4, {10, 16});
  constexpr HeadRange kFirst{0, 1}, kRest{1, 3};
  ASSERT_OK(written.Check(0, kFirst, 10, 6));
  written.Note(0, kFirst, 10, 6);
  EXPECT_CODE(written.Check(0, kFirst, 15, 1), Code::kInvalidArgument);
  ASSERT_OK(written.Check(0, kRest, 15, 1));
  ASSERT_OK(written.Check(1, kFirst, 15, 1));
  written.Note(0, kRest, 15, 1);
  // Heads come together always, or never.
  EXPECT_CODE(written.Check(1, {1, 1}, 10, 1), Code::kInvalidArgument);
  EXPECT_CODE(written.Check(1, {0, 4}, 10, 1), Code::kInvalidArgument);
  EXPECT_CODE(written.Check(1, {0, 2}, 10, 1), Code::kInvalidArgument);
  for (const HeadRange heads : {HeadRange{4, 1}, HeadRange{1, 4}, HeadRange{1, 0},
                                HeadRange{1, UINT32_MAX}, HeadRange{UINT32_MAX, 2}}) {
    EXPECT_CODE(written.Check(1, heads, 10, 1), Code::kInvalidArgument);
  }
  EXPECT_CODE(written.Check(2, kFirst, 10, 1), Code::kInvalidArgument);
  EXPECT_CODE(written.Check(1, kFirst, 9, 1), Code::kInvalidArgument);
  EXPECT_CODE(written.Check(1, kFirst, 15, 2), Code::kInvalidArgument);
  EXPECT_CODE(written.Check(1, kFirst, 10, 0), Code::kInvalidArgument);
}

TEST(WrittenRows, NamesWhatLacks) {
  WrittenRows written({2, 4}, 4, {10, 16});
  constexpr HeadRange kFirst{0, 1}, kRest{1, 3}, kAll{0, 4};
  const auto lacks = [&](HeadRange heads) {
    const Status complete = written.CheckComplete(heads);
    return complete.ok() ? std::string() : complete.error().message;
  };
  EXPECT_NE(lacks(kFirst).find("layer 0 lacks token 10"), std::string::npos);
  for (uint32_t layer = 0; layer < 2; ++layer) written.Note(layer, kFirst, 10, 6);
  EXPECT_EQ(lacks(kFirst), "");
  EXPECT_NE(lacks(kAll).find("layer 0 lacks token 10"), std::string::npos);
  written.Note(0, kRest, 10, 6);
  written.Note(1, kRest, 10, 2), written.Note(1, kRest, 13, 3);
  EXPECT_NE(lacks(kAll).find("layer 1 lacks token 12"), std::string::npos);
  EXPECT_EQ(lacks(kFirst), "");
  EXPECT_CODE(written.CheckComplete(kRest), Code::kFailedPrecondition);
  written.Note(1, kRest, 12, 1);
  EXPECT_EQ(lacks(kAll), "");
}

TEST(WrittenRows, LayersWithoutRowsNeitherTakeNorLackAny) {
  const std::vector<uint32_t> heads = {0, 4, 0, 8};
  WrittenRows written(HeadIndex(heads), 4, {10, 16});
  constexpr HeadRange kAll{0, 4}, kFirst{0, 2}, kRest{2, 2};
  EXPECT_CODE(written.Check(0, kAll, 10, 6), Code::kInvalidArgument);
  EXPECT_CODE(written.Check(2, kAll, 10, 6), Code::kInvalidArgument);
  EXPECT_CODE(written.Check(3, {0, 8}, 10, 6), Code::kInvalidArgument);  // ranges are the model's
  const Status empty = written.CheckComplete(kAll);
  EXPECT_CODE(empty, Code::kFailedPrecondition);
  EXPECT_NE(empty.error().message.find("layer 1 lacks token 10"), std::string::npos);
  for (const uint32_t layer : {1, 3}) {
    ASSERT_OK(written.Check(layer, kFirst, 10, 6));
    written.Note(layer, kFirst, 10, 6);
  }
  ASSERT_OK(written.CheckComplete(kFirst));
  written.Note(1, kRest, 10, 6);
  EXPECT_CODE(written.CheckComplete(kAll), Code::kFailedPrecondition);
  written.Note(3, kRest, 10, 6);
  EXPECT_OK(written.CheckComplete(kAll));
}

TEST(WrittenRows, CountsItsMemory) {
  WrittenRows written({8, 4}, 4, {0, 1000});
  EXPECT_EQ(written.BytesWith({0, 2}), 1000u);
  written.Note(0, {0, 2}, 0, 10);
  EXPECT_EQ(written.BytesWith({0, 2}), 1000u);
  EXPECT_EQ(written.BytesWith({2, 2}), 2000u);
}

}  // namespace
}  // namespace prefixd::storage
