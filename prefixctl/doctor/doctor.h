// Examines the machine for what prefixd needs. Each check tries the thing itself where that can be
// done without changing anything, and says what to do about what is missing.
//
// Thread-safety: free functions; any thread.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace prefixd::ctl {

// kWarn: it costs speed or safety; kFail: prefixd cannot work, or not safely.
enum class Level { kOk = 0, kWarn = 1, kFail = 2 };

struct Finding {
  std::string name;  // "io_uring", "open files", ...
  Level level = Level::kOk;
  std::string found;
  std::string advice;  // empty where all is well
};

// doctor_disk.cc: io_uring, O_DIRECT, file system, space and permissions of the store's directory,
// or of the nearest directory above it that exists; and the daemon's socket.
std::vector<Finding> ExamineDisk(const std::filesystem::path& dir);
Finding ExamineSocket(const std::string& socket);
// doctor_limits.cc: descriptors, locked memory, huge pages, shared memory, control groups.
std::vector<Finding> ExamineLimits();
// doctor_machine.cc: kernel, processor, graphics processor, clocks.
std::vector<Finding> ExamineMachine();

// Returns the first line of a small file such as those below /proc; empty: it cannot be read.
std::string FirstLine(const std::filesystem::path& path);

}  // namespace prefixd::ctl
