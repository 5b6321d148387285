#include "daemon/logging.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <filesystem>

namespace prefixd::daemon {

Status SetUpLogging(const std::string& level, const std::string& file) {
  // Without this check spdlog would silently make missing directories.
  const auto parent = std::filesystem::path(file).parent_path();
  std::error_code ignored;
  if (!parent.empty() && !std::filesystem::is_directory(parent, ignored)) {
    return Error{Code::kIo, "log.file: there is no directory " + parent.string()};
  }
  try {
    auto logger = file.empty() ? spdlog::stderr_logger_mt("prefixd")
                               : spdlog::basic_logger_mt("prefixd", file);
    logger->set_level(spdlog::level::from_str(level));
    logger->flush_on(spdlog::level::info);
    logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %v");
    spdlog::set_default_logger(std::move(logger));
  } catch (const spdlog::spdlog_ex& e) {
    return Error{Code::kIo, std::string("log.file: ") + e.what()};
  }
  return {};
}

}  // namespace prefixd::daemon
