#include "measure/timing/run_facts.h"

#include <ctime>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/build_info.h"

namespace prefixd::bench {
namespace {

// Returns the arguments as the process received them: each ends with a zero.
std::vector<std::string> Arguments() {
  std::ifstream in("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> out;
  for (std::string argument; std::getline(in, argument, '\0');) out.push_back(argument);
  return out;
}

std::string Machine() {
  std::ifstream in("/proc/cpuinfo");
  std::string model = "unknown processor";
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) != 0 || colon == std::string::npos) continue;
    model = line.substr(colon + 2);
    break;
  }
  return model + ", " + std::to_string(std::thread::hardware_concurrency()) + " cores";
}

std::string Today() {
  const std::time_t now = std::time(nullptr);
  std::tm day{};
  char text[16] = "";
  if (gmtime_r(&now, &day) != nullptr) std::strftime(text, sizeof text, "%Y-%m-%d", &day);
  return text;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> RunFacts() {
  std::vector<std::string> arguments = Arguments();
  if (arguments.empty()) arguments.push_back("unknown");
  const std::string program = std::filesystem::path(arguments[0]).filename().string();
  std::string command = program;
  for (size_t i = 1; i < arguments.size(); ++i) command += " " + arguments[i];
  return {{"program", program},
          {"command", command},
          {"commit", std::string(BuildCommit())},
          {"date", Today()},
          {"machine", Machine()}};
}

std::string QuotedJson(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

std::string RunFactsJson() {
  std::string out = "{";
  for (const auto& [name, value] : RunFacts()) {
    if (out.size() > 1) out += ", ";
    out += QuotedJson(name) + ": " + QuotedJson(value);
  }
  return out + "}";
}

}  // namespace prefixd::bench
