// Runs the real daemon as a child process in a directory of its own, for end-to-end tests.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/files.h"

namespace prefixd::testing {

// A directory for a daemon and its socket. It is not below TMPDIR, because the path of a socket
// must be short.
struct DaemonDir : TempDir {
  DaemonDir() : TempDir("/tmp") {}
};

struct Finished {
  int code = -1;  // exit status, or 128 + signal
  std::string out, err;
};
// Runs a program to its end (at most 20 s, then kill -9).
Finished RunProgram(const std::string& program, const std::vector<std::string>& args);

class DaemonProcess {
 public:
  // Starts prefixd with a store and socket below `dir`, plus `args`. kReady waits until it is ready
  // or has ended; kNothing does not wait.
  enum class Await { kReady, kNothing };
  explicit DaemonProcess(const std::filesystem::path& dir,
                         const std::vector<std::string>& args = {}, Await await = Await::kReady);
  ~DaemonProcess();  // kill -9 if it still runs
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  bool ready() const { return !ready_line_.empty(); }
  const std::string& ready_line() const { return ready_line_; }
  std::string address() const { return "unix:" + socket_; }
  const std::string& socket() const { return socket_; }
  std::string tcp_address() const;  // from the ready line; "tls:..." with a certificate
  pid_t pid() const { return pid_; }

  void Signal(int signal);
  // Waits for the daemon's end (at most 20 s, then kill -9) and returns its exit status, or 128 +
  // signal.
  int Wait();
  std::string Stderr() const;

 private:
  std::string socket_, err_file_, ready_line_;
  pid_t pid_ = -1;
  int code_ = -1;
};

}  // namespace prefixd::testing
