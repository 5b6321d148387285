// Runs processes that may die: every store of these tests is opened in a forked child, so that a
// crash, a hang or an assertion of RocksDB is an outcome and not the end of the test. The parent
// never opens one, for threads do not survive a fork.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>

namespace prefixd::storage::reliability {

struct ChildEnd {
  bool exited = false;  // ended by itself, with `code`
  int code = 0;
  int signal = 0;
  bool hung = false;  // it ran past its time and was killed
  std::string Describe() const;
};

class Child {
 public:
  // Forks; the child runs `body` and exits with its result. Its standard error goes to `errors`
  // (appended), if given. It dies with its parent.
  explicit Child(const std::function<int()>& body, const std::filesystem::path& errors = {});
  ~Child();  // kills and waits
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void Kill();
  // Returns false while the child still runs after `time`.
  bool WaitFor(std::chrono::microseconds time);
  // Waits at most a minute, then kills.
  ChildEnd Wait();
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int pid_fd_ = -1;
};

ChildEnd RunChild(const std::function<int()>& body, const std::filesystem::path& errors = {});

// A Scratch is a directory of its own, removed afterwards: below PREFIXD_RELIABILITY_DIR if that is
// set; else in memory (/dev/shm) where that exists, because little here depends on the device.
class Scratch {
 public:
  explicit Scratch(bool on_device = false);  // true: among the temporary files
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace prefixd::storage::reliability
