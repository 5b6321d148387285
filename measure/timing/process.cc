#include "measure/timing/process.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace prefixd::bench {

Result<Holding> Look(pid_t pid) {
  const std::string proc = "/proc/" + std::to_string(pid);
  const Error gone{Code::kUnavailable, "process " + std::to_string(pid) + " has ended"};
  Holding h;
  std::ifstream status(proc + "/status");
  if (!status) return gone;
  for (std::string line; std::getline(status, line);) {
    std::istringstream words(line);
    std::string key;
    double value = 0;
    words >> key >> value;
    if (key == "VmRSS:") h.rss_mib = value / 1024;
    if (key == "RssAnon:") h.anonymous_mib = value / 1024;
    if (key == "RssShmem:") h.shared_mib = value / 1024;
    if (key == "Threads:") h.threads = static_cast<uint64_t>(value);
  }
  std::error_code ec;
  for (const auto& fd : std::filesystem::directory_iterator(proc + "/fd", ec)) {
    const std::string to = std::filesystem::read_symlink(fd.path(), ec).string();
    if (to.starts_with("socket:")) {
      ++h.sockets;
    } else if (to.starts_with("/memfd:")) {
      ++h.memory_files;
    } else {
      ++h.files;
    }
  }
  std::ifstream maps(proc + "/maps");
  for (std::string line; std::getline(maps, line);) {
    ++h.mappings;
    if (line.find("/memfd:") != std::string::npos) ++h.memory_mappings;
  }
  std::ifstream stat(proc + "/stat");
  std::string text((std::istreambuf_iterator<char>(stat)), std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return gone;
  std::istringstream fields(text.substr(name_end + 2));
  std::string skipped;
  for (int i = 0; i < 11; ++i) fields >> skipped;
  double user = 0, system = 0;
  fields >> user >> system;
  h.cpu_seconds = (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
  return h;
}

}  // namespace prefixd::bench
