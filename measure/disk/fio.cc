#include "measure/disk/fio.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

namespace prefixd::bench {
namespace {

// Runs a program found on PATH and returns its stdout; stderr is inherited.
Result<std::string> Capture(std::vector<std::string> words) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) return Error{Code::kIo, "pipe: " + std::string(strerror(errno))};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclose(&actions, ends[0]);
  posix_spawn_file_actions_addclose(&actions, ends[1]);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t child = 0;
  const int failed = ::posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
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

}  // namespace prefixd::bench
