#include "daemon/process/logging.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "daemon/process/log_event.h"

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
    unsigned char before = 0;
    for (size_t i = 0; i < std::min(text.size(), kMaxLineBytes); ++i) {
      const auto byte = static_cast<unsigned char>(text[i]);
      // U+0080 to U+009F command terminals, too: 0xc2 and one byte more, which may stand alone.
      const auto c1 = [](unsigned char b) { return b >= 0x80 && b < 0xa0; };
      const bool begins_c1 =
          byte == 0xc2 && i + 1 < text.size() && c1(static_cast<unsigned char>(text[i + 1]));
      const bool ends_c1 = c1(byte) && (before < 0x80 || before == 0xc2);
      before = byte;
      if (byte >= 0x20 && byte != 0x7f && !begins_c1 && !ends_c1) {
        out.push_back(text[i]);
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

// What LogEvent gives the formatter, which runs on the same thread.
struct Event {
  std::string_view what;
  const nlohmann::json& fields;
};
thread_local const Event* current_event = nullptr;

// Writes an object a line.
class JsonFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& msg, spdlog::memory_buf_t& out) override {
    const auto since = msg.time.time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since);
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(since - seconds);
    const std::time_t whole = seconds.count();
    std::tm tm{};
    ::gmtime_r(&whole, &tm);
    char time[40];
    const size_t n = std::strftime(time, sizeof(time), "%Y-%m-%dT%H:%M:%S", &tm);
    std::snprintf(time + n, sizeof(time) - n, ".%03dZ", static_cast<int>(ms.count()));
    const std::string_view text = current_event != nullptr
                                      ? current_event->what
                                      : std::string_view(msg.payload.data(), msg.payload.size());
    const spdlog::string_view_t level = spdlog::level::to_string_view(msg.level);
    nlohmann::ordered_json line = {{"time", time},
                                   {"level", std::string_view(level.data(), level.size())},
                                   {"message", text.substr(0, kMaxLineBytes)}};
    if (current_event != nullptr) {
      for (const auto& [name, value] : current_event->fields.items()) line[name] = value;
    }
    const std::string written =
        line.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::ordered_json::error_handler_t::replace);
    out.append(written.data(), written.data() + written.size());
    out.push_back('\n');
  }
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<JsonFormatter>();
  }
};

spdlog::level::level_enum LevelOf(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

}  // namespace

bool Logs(LogLevel level) { return spdlog::should_log(LevelOf(level)); }

void LogEvent(LogLevel level, std::string_view what, const nlohmann::json& fields) {
  if (!Logs(level)) return;
  std::string text(what);
  for (const auto& [name, value] : fields.items()) {
    text += (text.size() == what.size() ? ": " : ", ") + name + "=" +
            value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
  const Event event{what, fields};
  const Event* const before = std::exchange(current_event, &event);
  spdlog::log(LevelOf(level), "{}", text);
  current_event = before;
}

Status SetUpLogging(const std::string& level, const std::string& file, const std::string& format) {
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
    if (format == "json") {
      logger->set_formatter(std::make_unique<JsonFormatter>());
    } else {
      auto formatter = std::make_unique<spdlog::pattern_formatter>();
      formatter->add_flag<PrintableText>('*').set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %*");
      logger->set_formatter(std::move(formatter));
    }
    spdlog::set_default_logger(std::move(logger));
  } catch (const spdlog::spdlog_ex& e) {
    return Error{Code::kIo, std::string("log.file: ") + e.what()};
  }
  return {};
}

}  // namespace prefixd::daemon
