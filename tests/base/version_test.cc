#include "prefixd/version.h"

#include <string>

#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(Version, TextAndNumbersAgree) {
  EXPECT_EQ(std::string(PREFIXD_VERSION), std::to_string(PREFIXD_VERSION_MAJOR) + "." +
                                              std::to_string(PREFIXD_VERSION_MINOR) + "." +
                                              std::to_string(PREFIXD_VERSION_PATCH));
}

}  // namespace
}  // namespace prefixd
