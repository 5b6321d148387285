#include "bench/scale/own_store.h"

#include <fstream>
#include <system_error>

#include "measure/disk/scratch.h"

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMarker = ".scale_bench";  // beside the store's own files, which it ignores

Error Refused(const fs::path& dir, const std::string& why) {
  return Error{Code::kFailedPrecondition,
               "'" + dir.string() + "' " + why + "; --dir names a new or an empty directory"};
}

}  // namespace

Status ClaimStore(const fs::path& given, const std::string& content) {
  std::error_code ec;
  fs::path dir = fs::absolute(given, ec).lexically_normal();
  if (!dir.has_filename()) dir = dir.parent_path();  // "store/"
  if (std::ifstream marker(dir / kMarker); marker) {
    std::string made;
    std::getline(marker, made);
    if (made == content) return {};
    return Refused(dir, "has " + made + ", and this call wants " + content);
  }
  PREFIXD_TRY(CheckScratchParent(fs::is_directory(dir, ec) ? dir : dir.parent_path()));
  if (fs::exists(dir, ec) && !fs::is_directory(dir, ec)) return Refused(dir, "is no directory");
  fs::create_directory(dir, ec);
  if (!fs::is_empty(dir, ec) || ec) return Refused(dir, "holds what this benchmark did not make");
  std::ofstream marker(dir / kMarker);
  marker << content << '\n';
  if (marker.flush()) return {};
  return Error{Code::kIo, "cannot write to '" + dir.string() + "'"};
}

}  // namespace prefixd::bench
