// Tests folders of runs: who may remove them and when, and what is read of them from the disk.
#include "measure/disk/scratch_folder.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "measure/disk/medium.h"
#include "measure/disk/page_cache.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

TEST(ScratchFolderTest, OthersRemoveOnlyWhatNobodyUses) {
  const testing::TempDir parent;
  auto one = ScratchFolder::Make(parent.path());
  ASSERT_TRUE(one.ok()) << one.error().message;
  testing::WriteFile(one->path() / "store", "x");
  fs::create_directory(parent / "prefixd-bench-left");
  fs::create_directory(parent / "mine");
  RemoveAbandonedFolders(parent.path());
  EXPECT_TRUE(fs::exists(one->path() / "store"));
  EXPECT_FALSE(fs::exists(parent / "prefixd-bench-left"));
  EXPECT_TRUE(fs::exists(parent / "mine"));
  one->Remove();
  EXPECT_FALSE(fs::exists(one->path()));
  EXPECT_FALSE(ScratchFolder::Make(parent / "absent").ok());
}

TEST(ScratchFolderTest, GoesWithItsObject) {
  const testing::TempDir parent;
  fs::path path;
  {
    std::optional<ScratchFolder> held;
    auto made = ScratchFolder::Make(parent.path());
    ASSERT_TRUE(made.ok());
    held.emplace(*std::move(made));
    path = held->path();
    EXPECT_TRUE(fs::exists(path));
  }
  EXPECT_FALSE(fs::exists(path));
}

// A process that shares the folder removes nothing, and one that was killed is waited for.
TEST(ScratchFolderTest, AProgramThatUsesItIsWaitedFor) {
  const testing::TempDir parent;
  std::array<int, 2> made{};
  ASSERT_EQ(::pipe(made.data()), 0);
  const pid_t owner = ::fork();
  if (owner == 0) {
    auto folder = ScratchFolder::Make(parent.path());
    if (folder.ok() && ::fork() == 0) {
      folder->Share();
      if (::write(made[1], "x", 1) == 1) ::execl("/bin/sleep", "sleep", "0.3", nullptr);
      ::_exit(1);
    }
    ::_exit(0);  // as if killed: it removes nothing
  }
  char said;
  ASSERT_EQ(::read(made[0], &said, 1), 1);
  ::waitpid(owner, nullptr, 0);
  ASSERT_FALSE(fs::is_empty(parent.path()));
  RemoveAbandonedFolders(parent.path());
  EXPECT_TRUE(fs::is_empty(parent.path()));
  for (const int fd : made) ::close(fd);
}

TEST(PageCacheTest, NothingOfFilesJustWrittenStays) {
  const testing::TempDir dir(fs::path("/var/tmp"));
  if (!MediumOf(dir.path()).disk) GTEST_SKIP() << "there is no disk";
  constexpr size_t kPages = 64;
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  fs::create_directory(dir / "below");
  testing::WriteFile(dir / "below" / "file", std::string(kPages * page, 'x'));
  const auto cached = [&] {
    const int fd = ::open((dir / "below" / "file").c_str(), O_RDONLY | O_CLOEXEC);
    void* const mapped = ::mmap(nullptr, kPages * page, PROT_READ, MAP_SHARED, fd, 0);
    std::vector<unsigned char> pages(kPages);
    EXPECT_EQ(::mincore(mapped, kPages * page, pages.data()), 0);
    ::munmap(mapped, kPages * page);
    ::close(fd);
    size_t n = 0;
    for (const unsigned char one : pages) n += one & 1;
    return n;
  };
  EXPECT_EQ(cached(), kPages);
  DropPageCache(dir.path());
  EXPECT_EQ(cached(), 0u);
}

}  // namespace
}  // namespace prefixd::bench
