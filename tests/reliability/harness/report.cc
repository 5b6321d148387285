#include "tests/reliability/harness/report.h"

#include <fstream>
#include <iterator>

#include "tests/reliability/workload/checker.h"

namespace prefixd::storage::reliability {
namespace fs = std::filesystem;

std::string Where(const std::string& harness, const std::string& what) {
  return harness + ": " + what;
}

std::string Tail(const fs::path& file) {
  constexpr size_t kMost = 1500;
  std::ifstream in(file, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(in), {});
  if (text.empty()) return "";
  if (text.size() > kMost) text = "..." + text.substr(text.size() - kMost);
  return "; it said: " + text;
}

void CheckInChild(const std::string& harness, const fs::path& dir, Truth& truth, Journal& journal,
                  Journal& report, const fs::path& errors) {
  const ChildEnd end = RunChild(
      [&] {
        CheckStore(dir, truth, journal, /*use=*/true);
        return 0;
      },
      errors);
  Absorb(journal, truth, report, Where(harness, "after the crash"));
  if (!end.exited || end.code != 0) {
    report.Violation(Where(harness, "the check: " + end.Describe() + Tail(errors)));
  }
}

void CheckSessionsInChild(const std::string& harness, const fs::path& dir,
                          const testing::SyntheticPrompt& all, SharedProgress& progress,
                          Journal& report, const fs::path& errors) {
  const ChildEnd end = RunChild(
      [&] {
        Persister persister(dir, all, progress, report);
        if (persister.Open()) persister.Check();
        return 0;
      },
      errors);
  if (!end.exited || end.code != 0) {
    report.Violation(Where(harness, "the check: " + end.Describe() + Tail(errors)));
  }
}

}  // namespace prefixd::storage::reliability
