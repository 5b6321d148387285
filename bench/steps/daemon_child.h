// The real daemon as a child process, with a store and a socket in a directory that goes with it.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "measure/disk/scratch_folder.h"
#include "prefixd/result.h"

namespace prefixd::bench {

class DaemonChild {
 public:
  // `store`: where the store lies and stays; empty: in dir(), which is made in `parent` and goes
  // with this; what a killed benchmark left there goes with the next Start. The path of a socket
  // must be short, so `parent` too.
  explicit DaemonChild(std::filesystem::path store = {}, std::filesystem::path parent = "/tmp")
      : store_(std::move(store)), parent_(std::move(parent)) {}
  ~DaemonChild();  // kills it
  DaemonChild(const DaemonChild&) = delete;
  DaemonChild& operator=(const DaemonChild&) = delete;

  // Starts `program` with two compute threads, plus `args`, in a session of its own as a service
  // manager does. Returns when it serves; kUnavailable, with what it said, when it does not. After
  // Stop it starts over the same store.
  Status Start(const std::string& program, const std::vector<std::string>& args);
  // Ends the daemon, if it was started, as a service manager does, and waits for it. kInternal,
  // with what it said, where it ends otherwise than with status 0.
  Status Stop();
  // Ends it as a crash does (kill -9), and waits for it. kInternal where it had ended by itself.
  Status Kill();
  pid_t pid() const { return pid_; }
  // What else its user stores, as long as this lives.
  const std::filesystem::path& dir() const { return folder_->path(); }
  std::string address() const { return "unix:" + (dir() / "s").string(); }

 private:
  int End(int signal);  // as waitpid says
  std::string Said() const;

  const std::filesystem::path store_, parent_;
  std::optional<ScratchFolder> folder_;  // since the first Start
  pid_t pid_ = -1;
};

}  // namespace prefixd::bench
