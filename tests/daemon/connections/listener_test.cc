// Tests the Unix socket's file: whose it is and who may connect, also where the system forbids
// chown, as the packaged unit did.
#include "daemon/connections/listener.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>

#include "tests/support/expect_ok.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::daemon {
namespace {

// Every call of the chown family fails from now on, in this process.
bool ForbidChown() {
  std::array code = {
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
#ifdef SYS_lchown
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_lchown, 1, 0),
#else
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fchownat, 1, 0),
#endif
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fchownat, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(code.size()), code.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// What a child without chown says about the group: "" where it listens.
std::string InSandbox(const std::string& path, const std::string& group) {
  std::array<int, 2> ends{};
  EXPECT_EQ(::pipe(ends.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::string said = "no sandbox";
    if (ForbidChown()) {
      const auto listener = Listener::Unix(path, /*group=*/true, group);
      said = listener.ok() ? "" : listener.error().message;
    }
    const bool told = ::write(ends[1], said.data(), said.size()) >= 0;
    ::_exit(told ? 0 : 1);
  }
  ::close(ends[1]);
  std::string said(1000, 0);
  said.resize(static_cast<size_t>(std::max<ssize_t>(0, ::read(ends[0], said.data(), said.size()))));
  ::close(ends[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  return said;
}

TEST(ListenerTest, TheSocketsFileHasItsGroupAndMode) {
  testing::TempDir dir("/tmp");
  const std::string path = dir.path() / "socket";
  struct stat st {};
  {
    const auto own = Listener::Unix(path, /*group=*/false);
    ASSERT_OK(own);
    ASSERT_EQ(::lstat(path.c_str(), &st), 0);
    EXPECT_EQ(st.st_mode & 07777, 0600u);
  }
  if (::geteuid() != 0) GTEST_SKIP() << "only root is a member of every group";
  const auto group = Listener::Unix(path, /*group=*/true, "12345");
  ASSERT_OK(group);
  ASSERT_EQ(::lstat(path.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 07777, 0660u);
  EXPECT_EQ(st.st_gid, 12345u);
  EXPECT_CODE(Listener::Unix(path + "2", true, "no-such-group"), Code::kInvalidArgument);
}

TEST(ListenerTest, TheDaemonsOwnGroupNeedsNoChown) {
  testing::TempDir dir("/tmp");
  EXPECT_EQ(InSandbox(dir.path() / "socket", std::to_string(::getegid())), "");
  const std::string refused = InSandbox(dir.path() / "other", "12345");
  EXPECT_NE(refused.find("SupplementaryGroups="), std::string::npos) << refused;
  EXPECT_NE(refused.find("must allow chown"), std::string::npos) << refused;
}

}  // namespace
}  // namespace prefixd::daemon
