#include "daemon/process/logging.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string_view>

namespace prefixd::daemon {
namespace {

constexpr size_t kMaxLineBytes = 4096;

// Writes what a line says. Names of tenants, models and files come from clients: none of them may
// begin a line of its own or speak to a terminal.
class PrintableText final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& msg, const std::tm&,
              spdlog::memory_buf_t& out) override {
    constexpr std::string_view kHex = "0123456789abcdef";
    const std::string_view text(msg.payload.data(), msg.payload.size());
    for (const char c : text.substr(0, kMaxLineBytes)) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte >= 0x20 && byte != 0x7f) {
        out.push_back(c);
      } else {
        const char escaped[] = {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
        out.append(std::begin(escaped), std::end(escaped));
      }
    }
    constexpr std::string_view kCut = " ...";
    if (text.size() > kMaxLineBytes) out.append(kCut.data(), kCut.data() + kCut.size());
  }
  std::unique_ptr<spdlog::custom_flag_formatter> clone() const override {
    return std::make_unique<PrintableText>();
  }
};

}  // namespace

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
    auto formatter = std::make_unique<spdlog::pattern_formatter>();
    formatter->add_flag<PrintableText>('*').set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %*");
    logger->set_formatter(std::move(formatter));
    spdlog::set_default_logger(std::move(logger));
  } catch (const spdlog::spdlog_ex& e) {
    return Error{Code::kIo, std::string("log.file: ") + e.what()};
  }
  return {};
}

}  // namespace prefixd::daemon
