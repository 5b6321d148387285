#include "runtime/rates/rates_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "storage/catalog/store_dir.h"
#include "storage/io/file.h"

namespace prefixd {
namespace {

constexpr const char* kFile = "rates";
constexpr uint64_t kMaxBytes = 16 << 20;

}  // namespace

void LoadRates(const std::filesystem::path& store_dir, MeasuredRates& rates) {
  const auto path = store_dir / kFile;
  const auto fd = storage::OpenFile(path, O_RDONLY);
  if (!fd.ok()) return;
  const auto bytes = storage::FileBytes(fd->get(), path);
  if (!bytes.ok() || *bytes > kMaxBytes) return;
  std::string text(*bytes, '\0');
  const ssize_t n = ::pread(fd->get(), text.data(), text.size(), 0);
  text.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
  rates.Load(text);
}

Status SaveRates(const std::filesystem::path& store_dir, MeasuredRates& rates) {
  if (!rates.changed()) return {};
  return storage::WriteFileAtomically(store_dir / kFile, rates.Save());
}

}  // namespace prefixd
