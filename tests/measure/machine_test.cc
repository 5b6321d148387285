// Tests what is said of the machine: memory that is left, what files lie on, others' work.
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "measure/disk/medium.h"
#include "measure/disk/memory_left.h"
#include "measure/timing/other_work.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

TEST(MemoryLeftTest, ALimitOfAContainerHolds) {
  testing::TempDir dir;
  const MemoryFiles files{dir / "meminfo", dir / "cgroup", dir / "groups"};
  testing::WriteFile(files.meminfo, "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 8000 kB\n");
  EXPECT_EQ(AvailableMemory(files), 8000u << 10);
  testing::WriteFile(files.own_group, "0::/box/inner\n");
  std::filesystem::create_directories(files.groups / "box" / "inner");
  testing::WriteFile(files.groups / "box" / "inner" / "memory.max", "max\n");
  EXPECT_EQ(AvailableMemory(files), 8000u << 10);
  // The group above bounds it; its page cache can be had.
  testing::WriteFile(files.groups / "box" / "memory.max", "4000000\n");
  testing::WriteFile(files.groups / "box" / "memory.current", "3500000\n");
  testing::WriteFile(files.groups / "box" / "memory.stat",
                     "anon 1000000\ninactive_file 1500000\nactive_file 500000\n");
  EXPECT_EQ(AvailableMemory(files), 2'500'000u);
  testing::WriteFile(files.groups / "box" / "memory.current", "9000000\n");
  EXPECT_EQ(AvailableMemory(files), 0u);
}

TEST(MediumTest, FilesInMemoryAreNoDisk) {
  if (!std::filesystem::exists("/dev/shm")) GTEST_SKIP();
  const Medium memory = MediumOf("/dev/shm");
  EXPECT_FALSE(memory.disk);
  EXPECT_EQ(memory.rows(), "rows in a file, page cache");
  EXPECT_NE(memory.sentence.find("lies in memory"), std::string::npos) << memory.sentence;
  EXPECT_TRUE(MediumOf("/nonexistent").disk);  // nothing says otherwise
  EXPECT_EQ(Medium{}.rows(), "rows on the SSD");
}

// The work of a child counts as others' until it is waited for.
TEST(OtherWorkTest, IsWhatNeitherThisProcessNorItsChildrenDid) {
  const OtherWork others;
  const auto begun = std::chrono::steady_clock::now();
  const pid_t child = ::fork();
  if (child == 0) {
    timespec used{};
    do {
      ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    } while (used.tv_sec < 1);
    ::_exit(0);
  }
  siginfo_t info;
  ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  const double before = others.Share();
  ::waitpid(child, nullptr, 0);
  const double after = others.Share();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  const double one = 1 / (seconds * std::max(1u, std::thread::hardware_concurrency()));
  EXPECT_GT(before - after, 0.5 * one);
  EXPECT_LE(before, 1);
  EXPECT_EQ(DisturbedBy(0.1), "");
  EXPECT_NE(DisturbedBy(0.4).find("40%"), std::string::npos);
}

TEST(OtherWorkTest, InterruptsAndTheKernelsThreadsAreNobodys) {
  testing::TempDir proc;
  const auto tell = [&](const std::string& cpu, const char* worker, const char* process) {
    testing::WriteFile(proc / "stat", "cpu  " + cpu + "\ncpu0 " + cpu + "\n");
    const std::string zeros = " 0 0 0 0 ", rest = " 0 0 20 0 1 0 77 0\n";
    testing::WriteFile(proc / "7" / "stat",
                       "7 (kworker/0:1 (x)) I 2 0 0 0 -1 2097216" + zeros + "0 " + worker + rest);
    testing::WriteFile(proc / "8" / "stat",
                       "8 (another) R 1 0 0 0 -1 4194304" + zeros + process + " 0" + rest);
  };
  for (const char* pid : {"7", "8"}) std::filesystem::create_directory(proc / pid);
  // A core for 1,000 s more, in hundredths: 300 of interrupts, 400 of a kernel's thread.
  tell("0 0 0 0 0 0 0 0", "0", "0");
  const OtherWork quiet(proc.path());
  tell("0 0 40000 30000 0 10000 20000 0", "40000", "0");
  EXPECT_NEAR(quiet.Share(), 0, 0.05);
  // Another process takes 200 of the next 1,000.
  const OtherWork busy(proc.path());
  tell("20000 0 80000 50000 0 20000 30000 0", "80000", "20000");
  EXPECT_NEAR(busy.Share(), 0.2, 0.05);
}

}  // namespace
}  // namespace prefixd::bench
