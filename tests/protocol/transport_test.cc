// Tests addresses and the memory that client and daemon share.
#include <unistd.h>

#include <string>

#include "protocol/address.h"
#include "protocol/shared_region.h"
#include "tests/support/test.h"

namespace prefixd::wire {
namespace {

TEST(AddressTest, ParsesAndRefuses) {
  EXPECT_EQ(Address::Parse("unix:/a/b")->path, "/a/b");
  EXPECT_EQ(Address::Parse("/a/b")->ToString(), "unix:/a/b");
  EXPECT_EQ(Address::Parse("tcp:localhost:80")->port, 80);
  EXPECT_EQ(Address::Parse("tcp:[::1]:80")->host, "::1");
  EXPECT_EQ(Address::Parse("tcp:[::1]:80")->ToString(), "tcp:[::1]:80");
  EXPECT_TRUE(Address::Parse(std::string(107, 'x')).ok());
  for (const std::string& bad :
       {std::string(108, 'x'), std::string("tcp:80"), std::string("tcp::80"),
        std::string("tcp:h:x"), std::string("tcp:h:70000"), std::string("tcp:a:b:1"),
        std::string("unix:"), std::string()}) {
    EXPECT_FALSE(Address::Parse(bad).ok()) << bad;
  }
}

TEST(SharedRegionTest, SharesBytesAndIsSealed) {
  auto ours = SharedRegion::Create(1 << 16);
  ASSERT_TRUE(ours.ok());
  auto theirs = SharedRegion::Map(::dup(ours->fd()), 1 << 16);
  ASSERT_TRUE(theirs.ok());
  ours->bytes()[77] = std::byte{42};
  EXPECT_EQ(theirs->bytes()[77], std::byte{42});
  EXPECT_NE(::ftruncate(ours->fd(), 10), 0);
  EXPECT_FALSE(SharedRegion::Map(::dup(ours->fd()), 1 << 20).ok());  // the region is shorter
}

}  // namespace
}  // namespace prefixd::wire
