// Tests that a benchmark writes to no store but its own.
#include "bench/scale/own_store.h"

#include <filesystem>

#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

TEST(OwnStoreTest, TakesWhatIsNewEmptyOrItsOwn) {
  const testing::TempDir dir;
  EXPECT_TRUE(ClaimStore(dir / "new", "prompts").ok());
  testing::WriteFile(dir / "new" / "STORE", "");
  EXPECT_TRUE(ClaimStore(dir / "new", "prompts").ok());
  EXPECT_TRUE(ClaimStore((dir / "new").string() + "/", "prompts").ok());
  fs::create_directory(dir / "empty");
  EXPECT_TRUE(ClaimStore(dir / "empty", "prompts").ok());
  // Of another kind of store it says what it has and what to do.
  const Status other = ClaimStore(dir / "new", "other prompts");
  ASSERT_FALSE(other.ok());
  EXPECT_EQ(other.error().code, Code::kFailedPrecondition);
  EXPECT_NE(other.error().message.find("has prompts, and this call wants other prompts"),
            std::string::npos)
      << other.error().message;
}

TEST(OwnStoreTest, RefusesWhatIsSomebodyElses) {
  const testing::TempDir dir;
  fs::create_directories(dir / "store" / "segments");
  fs::create_directory(dir / "files");
  testing::WriteFile(dir / "files" / "diary", "");
  testing::WriteFile(dir / "file", "");
  for (const char* name : {"store", "store/", "store/below", "store/segments", "files"}) {
    const Status refused = ClaimStore(dir / name, "prompts");
    ASSERT_FALSE(refused.ok()) << name;
    EXPECT_EQ(refused.error().code, Code::kFailedPrecondition) << name;
    EXPECT_NE(refused.error().message.find("--dir"), std::string::npos) << name;
  }
  EXPECT_FALSE(ClaimStore(dir / "file", "prompts").ok());
  EXPECT_FALSE(ClaimStore(dir / "absent" / "below", "prompts").ok());
  EXPECT_FALSE(fs::exists(dir / "store" / "below"));
  EXPECT_FALSE(fs::exists(dir / "files" / ".scale_bench"));
}

}  // namespace
}  // namespace prefixd::bench
