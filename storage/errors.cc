#include "storage/errors.h"

#include <spdlog/spdlog.h>

#include <cerrno>
#include <system_error>

namespace prefixd::storage {

Error ErrnoError(int error, std::string what) {
  const bool full = error == ENOSPC || error == EDQUOT;
  return {full ? Code::kResourceExhausted : Code::kIo,
          what + ": " + std::generic_category().message(error)};
}

void LogInfo(std::string_view message) { spdlog::info("storage: {}", message); }
void LogWarning(std::string_view message) { spdlog::warn("storage: {}", message); }

}  // namespace prefixd::storage
