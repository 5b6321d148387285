#include "measure/disk/fio.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

namespace prefixd::bench {
namespace {

// Starts the program with `out` as its stdout. It ends with this process, however that ends, as
// posix_spawn cannot arrange; and as there no page of a large process is copied or protected, which
// would slow what is measured next. Returns its process id, or an errno below 0.
pid_t Spawn(char* const* argv, int out) {
  const pid_t parent = ::getpid();
  volatile int failed = 0;        // written by the child, in this memory
  const pid_t child = ::vfork();  // NOLINT(clang-analyzer-security.insecureAPI.vfork)
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() == parent) {
      ::dup2(out, STDOUT_FILENO);
      ::execvp(argv[0], argv);
      failed = errno;
    }
    ::_exit(127);
  }
  if (child < 0) return -errno;
  if (failed == 0) return child;
  while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  return -failed;
}

// Runs a program found on PATH and returns its stdout; stderr is inherited.
Result<std::string> Capture(std::vector<std::string> words) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    return Error{Code::kIo, "pipe: " + std::string(strerror(errno))};
  }
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t child = Spawn(argv.data(), ends[1]);
  const int failed = child < 0 ? -child : 0;
  ::close(ends[1]);
  std::string out;
  if (failed == 0) {
    std::array<char, 4096> chunk;
    ssize_t n = 0;
    while ((n = ::read(ends[0], chunk.data(), chunk.size())) > 0 || (n < 0 && errno == EINTR)) {
      if (n > 0) out.append(chunk.data(), static_cast<size_t>(n));
    }
  }
  ::close(ends[0]);
  if (failed == ENOENT) {
    return Error{Code::kNotFound, "there is no '" + words[0] +
                                      "' on PATH; install it (apt-get install " + words[0] + ")"};
  }
  if (failed != 0) {
    return Error{Code::kUnavailable, "cannot start " + words[0] + ": " + strerror(failed)};
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    return Error{Code::kUnavailable, words[0] + " failed; its message is above"};
  }
  return out;
}

}  // namespace

Result<std::string> FioVersion() {
  PREFIXD_ASSIGN(std::string version, Capture({"fio", "--version"}));
  while (!version.empty() && version.back() == '\n') version.pop_back();
  return version;
}

Result<FioFigure> RunFio(const FioJob& job) {
  const bool writes = job.pattern == "write";
  std::vector<std::string> words = {"fio",
                                    "--name=floor",
                                    "--output-format=json",
                                    "--direct=1",
                                    "--thread",
                                    "--randrepeat=0",
                                    "--rw=" + job.pattern,
                                    "--filename=" + job.file.string(),
                                    "--ioengine=" + job.engine,
                                    "--offset=" + std::to_string(job.offset),
                                    "--size=" + std::to_string(job.bytes),
                                    "--bs=" + std::to_string(job.block_bytes),
                                    "--iodepth=" + std::to_string(job.depth)};
  if (job.total_bytes > 0) words.push_back("--io_size=" + std::to_string(job.total_bytes));
  if (writes) {
    std::error_code ec;
    std::filesystem::remove(job.file, ec);  // new, unwritten blocks, as in a put
    words.push_back("--fallocate=native");
    words.push_back("--end_fsync=1");
  } else {
    words.push_back("--readonly");
  }
  PREFIXD_ASSIGN(const std::string out, Capture(std::move(words)));
  const auto report = nlohmann::json::parse(out, nullptr, /*allow_exceptions=*/false);
  if (report.is_discarded() || !report.contains("jobs") || report["jobs"].empty()) {
    return Error{Code::kUnavailable, "fio's report is not the JSON that was asked for"};
  }
  const auto& of_job = report["jobs"][0];
  const auto& moved = of_job[writes ? "write" : "read"];
  FioFigure figure;
  figure.seconds = moved.value("runtime", 0.0) / 1e3;
  figure.bytes_per_second = moved.value("bw_bytes", 0.0);
  figure.operations_per_second = moved.value("iops", 0.0);
  figure.cpu_seconds = (of_job.value("usr_cpu", 0.0) + of_job.value("sys_cpu", 0.0)) / 100 *
                       of_job.value("job_runtime", 0.0) / 1e3;
  if (figure.bytes_per_second <= 0) {
    return Error{Code::kUnavailable, "fio moved nothing; see its messages above"};
  }
  return figure;
}

Status TryFio(const std::filesystem::path& dir) {
  FioJob job;
  job.file = dir / "fio-tried";
  job.bytes = job.block_bytes;
  Status tried;
  // The store's interface decides which engine measures: either will do here.
  for (const char* engine : {"io_uring", "libaio"}) {
    job.engine = engine;
    for (const char* pattern : {"write", "read"}) {
      job.pattern = pattern;
      const auto figure = RunFio(job);
      tried = figure.ok() ? Status() : Status(figure.error());
      if (!tried.ok()) break;
    }
    if (tried.ok()) break;
  }
  std::error_code ec;
  std::filesystem::remove(job.file, ec);
  return tried;
}

}  // namespace prefixd::bench
