// Tests what is said while a large store opens, and how often.
#include "storage/store/opening_log.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace prefixd::storage {
namespace {

std::vector<std::string> Said(std::chrono::milliseconds pause) {
  std::vector<std::string> said;
  OpeningLog log(pause, [&](std::string_view line) { said.emplace_back(line); });
  for (uint64_t i = 0; i < 3; ++i) log.Note(i, 3, "records loaded");
  return said;
}

TEST(OpeningLogTest, SaysHowFarItIs) {
  EXPECT_EQ(Said(std::chrono::milliseconds(0)),
            (std::vector<std::string>{"opening the store: 0 of 3 records loaded",
                                      "opening the store: 1 of 3 records loaded",
                                      "opening the store: 2 of 3 records loaded"}));
}

TEST(OpeningLogTest, SaysNothingOfWhatIsQuick) { EXPECT_TRUE(Said(std::chrono::hours(1)).empty()); }

}  // namespace
}  // namespace prefixd::storage
