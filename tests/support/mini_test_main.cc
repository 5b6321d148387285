// Defines main() and the reporting of mini_test.h; prefixd_test() adds it where GoogleTest is
// missing.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/mini_test.h"

namespace testing::mini {

void Report(Outcome outcome, const char* file, int line, const std::string& what,
            const std::string& message) {
  State& state = TheState();
  (outcome == Outcome::kFailure ? state.failed : state.skipped) = true;
  std::printf("%s:%d: %s\n", file, line, what.c_str());
  if (!message.empty()) std::printf("    %s\n", message.c_str());
  for (const std::string& trace : state.traces) std::printf("    trace: %s\n", trace.c_str());
  std::fflush(stdout);
}

namespace {

// The body does not run when SetUp fails, as in GoogleTest.
void RunOne(const TestCase& test) {
  State& state = TheState();
  state.failed = state.skipped = false;
  state.traces.clear();
  try {
    const std::unique_ptr<Test> instance = test.make();
    instance->SetUp();
    if (!state.failed && !state.skipped) instance->TestBody();
    instance->TearDown();
  } catch (const std::exception& e) {
    Report(Outcome::kFailure, "unknown file", 0, "uncaught exception", e.what());
  } catch (...) {
    Report(Outcome::kFailure, "unknown file", 0, "uncaught exception of unknown type", "");
  }
}

std::vector<std::string> Patterns(std::string_view filter) {
  std::vector<std::string> patterns(1);
  for (const char c : filter) {
    if (c == ':') {
      patterns.emplace_back();
    } else if (c != '*') {
      patterns.back() += c;
    }
  }
  return patterns;
}

// A Filter is what a name must contain one of, and what it must contain none of.
struct Filter {
  std::vector<std::string> wanted, left_out;

  explicit Filter(std::string_view text) {
    const size_t minus = text.find('-');
    wanted = Patterns(text.substr(0, minus));
    if (minus != std::string_view::npos) left_out = Patterns(text.substr(minus + 1));
  }
  bool Matches(const std::string& name) const {
    const auto contains = [&](const std::string& pattern) {
      return name.find(pattern) != std::string::npos;
    };
    return std::any_of(wanted.begin(), wanted.end(), contains) &&
           std::none_of(left_out.begin(), left_out.end(), contains);
  }
};

int RunAll(const Filter& filter) {
  size_t run = 0;
  std::vector<std::string> failed, skipped;
  for (const TestCase& test : TheState().tests) {
    const std::string name = test.full_name();
    if (!filter.Matches(name)) continue;
    ++run;
    std::printf("[ RUN      ] %s\n", name.c_str());
    std::fflush(stdout);
    RunOne(test);
    const char* verdict = "[       OK ]";
    if (TheState().failed) {
      verdict = "[  FAILED  ]";
      failed.push_back(name);
    } else if (TheState().skipped) {
      verdict = "[  SKIPPED ]";
      skipped.push_back(name);
    }
    std::printf("%s %s\n", verdict, name.c_str());
    std::fflush(stdout);
  }
  std::printf("[==========] %zu tests: %zu passed, %zu skipped, %zu failed\n", run,
              run - failed.size() - skipped.size(), skipped.size(), failed.size());
  for (const std::string& name : skipped) std::printf("[  SKIPPED ] %s\n", name.c_str());
  for (const std::string& name : failed) std::printf("[  FAILED  ] %s\n", name.c_str());
  if (run == 0) std::printf("no test matches the filter\n");
  return failed.empty() && run > 0 ? 0 : 1;
}

}  // namespace
}  // namespace testing::mini

int main(int argc, char** argv) {
  std::string_view filter = "*";
  constexpr std::string_view kFilterFlag = "--gtest_filter=";
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg.starts_with(kFilterFlag)) {
      filter = arg.substr(kFilterFlag.size());
    } else if (arg == "--gtest_list_tests") {
      for (const auto& test : testing::mini::TheState().tests) {
        std::printf("%s\n", test.full_name().c_str());
      }
      return 0;
    } else {
      std::printf("unknown argument '%s'; known: --gtest_filter=, --gtest_list_tests\n", argv[i]);
      return 1;
    }
  }
  return testing::mini::RunAll(testing::mini::Filter(filter));
}
