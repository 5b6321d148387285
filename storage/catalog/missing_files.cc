#include "storage/catalog/missing_files.h"

#include <fstream>

#include "storage/catalog/store_dir.h"

namespace prefixd::storage {
namespace {

std::filesystem::path PathIn(const std::filesystem::path& snapshot) { return snapshot / "missing"; }

}  // namespace

Status WriteMissingFiles(const std::filesystem::path& snapshot,
                         const std::vector<std::string>& names) {
  if (names.empty()) return {};
  std::string text;
  for (const std::string& name : names) text += name + "\n";
  return WriteFileAtomically(PathIn(snapshot), text);
}

Result<std::vector<std::string>> ReadMissingFiles(const std::filesystem::path& snapshot) {
  std::error_code failed;
  if (!std::filesystem::exists(PathIn(snapshot), failed) && !failed) {
    return std::vector<std::string>();
  }
  std::ifstream in(PathIn(snapshot));
  std::vector<std::string> names;
  for (std::string line; std::getline(in, line);) names.push_back(line);
  if (in.bad() || names.empty()) {
    return Error{Code::kIo, "cannot read " + PathIn(snapshot).string()};
  }
  return names;
}

}  // namespace prefixd::storage
