#include "storage/io/errors.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cerrno>
#include <memory>
#include <system_error>

namespace prefixd::storage {

Error ErrnoError(int error, std::string what) {
  const bool exhausted =
      error == ENOSPC || error == EDQUOT || error == ENOMEM || error == EMFILE || error == ENFILE;
  return {exhausted ? Code::kResourceExhausted : Code::kIo,
          what + ": " + std::generic_category().message(error)};
}

namespace {

constexpr const char* kLogger = "prefixd";

// Returns the program's own logger, else one that writes warnings to standard error: standard
// output belongs to the program that embeds the store.
std::shared_ptr<spdlog::logger> Logger() {
  if (auto logger = spdlog::get(kLogger)) return logger;
  try {
    auto logger = spdlog::stderr_logger_mt(kLogger);
    logger->set_level(spdlog::level::warn);
    return logger;
  } catch (const spdlog::spdlog_ex&) {  // another thread was first
    return spdlog::get(kLogger);
  }
}

void Log(spdlog::level::level_enum level, std::string_view message) {
  if (const auto logger = Logger()) logger->log(level, "{}", message);
}

}  // namespace

void LogInfo(std::string_view message) { Log(spdlog::level::info, message); }
void LogWarning(std::string_view message) { Log(spdlog::level::warn, message); }

}  // namespace prefixd::storage
