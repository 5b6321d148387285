#include "prefixctl/show/output.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>

namespace prefixd::ctl {

std::string Bytes(uint64_t n) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = double(n);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

std::string Time(int64_t unix_ms) {
  if (unix_ms <= 0) return "-";
  const std::time_t seconds = unix_ms / 1000;
  std::tm tm{};
  char text[32];
  if (::gmtime_r(&seconds, &tm) == nullptr) return "-";
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &tm);
  return text;
}

std::string Duration(uint64_t ms) {
  const uint64_t s = ms / 1000;
  char text[48];
  std::snprintf(text, sizeof(text), "%llu d %02u:%02u:%02u",
                static_cast<unsigned long long>(s / 86400), unsigned(s / 3600 % 24),
                unsigned(s / 60 % 60), unsigned(s % 60));
  return text;
}

void PrintJson(const nlohmann::json& json) {
  std::puts(json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

Status FinishOutput() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return {};
  return Error{Code::kIo, std::string("cannot write the output: ") + std::strerror(errno)};
}

namespace {

// Returns the length of the UTF-8 character at the start of `text`, in bytes; 0 when it is none.
size_t CharacterBytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const size_t n = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  if (n == 0 || first > 0xf4 || n > text.size()) return 0;
  for (size_t i = 1; i < n; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  return n;
}

// A character that has terminals write from right to left what comes behind it.
bool TurnsDirection(std::string_view character) {
  return (character >= "\xe2\x80\xaa" && character <= "\xe2\x80\xae") ||  // U+202A to U+202E
         (character >= "\xe2\x81\xa6" && character <= "\xe2\x81\xa9");    // U+2066 to U+2069
}

size_t Characters(std::string_view text) {
  return static_cast<size_t>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace

std::string Printable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t n = CharacterBytes(text);
    const auto first = static_cast<unsigned char>(text[0]);
    const bool c1 = n == 2 && first == 0xc2 && static_cast<unsigned char>(text[1]) < 0xa0;
    if (n == 1 && (first == '\n' || first == '\t')) {
      out += first == '\n' ? "\\n" : "\\t";
    } else if (n == 0 || c1 || TurnsDirection(text.substr(0, n)) || first < 0x20 || first == 0x7f) {
      for (const char c : text.substr(0, std::max<size_t>(n, 1))) {
        char escaped[8];
        std::snprintf(escaped, sizeof(escaped), "\\x%02x", static_cast<unsigned char>(c));
        out += escaped;
      }
    } else {
      out += text.substr(0, n);
    }
    text.remove_prefix(std::max<size_t>(n, 1));
  }
  return out;
}

std::string TableText(const std::vector<std::vector<std::string>>& cells) {
  std::vector<std::vector<std::string>> rows = cells;
  std::vector<size_t> widths;
  for (auto& row : rows) std::ranges::transform(row, row.begin(), Printable);
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Characters(row[i]));
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      text += row[i];
      if (i + 1 < row.size()) text += std::string(widths[i] - Characters(row[i]) + 2, ' ');
    }
    text += '\n';
  }
  return text;
}

void PrintTable(const std::vector<std::vector<std::string>>& rows) {
  std::fputs(TableText(rows).c_str(), stdout);
}

void PrintFields(const std::vector<std::pair<std::string, std::string>>& fields) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& [name, value] : fields) rows.push_back({name, value});
  PrintTable(rows);
}

namespace {

volatile std::sig_atomic_t interrupted = 0;

// After this call the first SIGINT or SIGTERM is only noted; the next one ends the process.
void NoteInterrupts() {
  struct sigaction action = {};
  action.sa_handler = [](int) { interrupted = 1; };
  action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

}  // namespace

ProgressFn ShowProgress(std::string what, bool quiet) {
  NoteInterrupts();
  using Clock = std::chrono::steady_clock;
  struct State {
    Clock::time_point start = Clock::now(), last{};
  };
  auto state = std::make_shared<State>();
  const bool terminal = ::isatty(STDERR_FILENO) == 1;
  return [=](uint64_t done, uint64_t total, std::string_view unit) {
    const auto now = Clock::now();
    const bool last = done >= total;
    const auto pause = terminal ? std::chrono::milliseconds(100) : std::chrono::milliseconds(3000);
    if (interrupted) return false;
    if (quiet || (!last && now - state->last < pause)) return true;
    state->last = now;
    const double percent = total ? 100.0 * double(done) / double(total) : 100.0;
    const double seconds = std::chrono::duration<double>(now - state->start).count();
    std::fprintf(stderr, "%s%s: %llu of %llu %.*s (%.0f%%, %.1f s)%s", terminal ? "\r\033[K" : "",
                 what.c_str(), static_cast<unsigned long long>(done),
                 static_cast<unsigned long long>(total), int(unit.size()), unit.data(), percent,
                 seconds, terminal && !last ? "" : "\n");
    std::fflush(stderr);
    return true;
  };
}

}  // namespace prefixd::ctl
