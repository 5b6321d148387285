#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "tensors/safetensors.h"

namespace prefixd {
namespace {

Error OsError(const std::filesystem::path& path, const char* what, int error) {
  const bool full = error == ENOSPC || error == EDQUOT;
  return {full ? Code::kResourceExhausted : Code::kIo,
          path.string() + ": cannot " + what + ": " + std::strerror(error)};
}

// A file under construction: closed and removed unless committed.
class TemporaryFile {
 public:
  static Result<TemporaryFile> Create(const std::filesystem::path& target) {
    std::string name = target.string() + ".XXXXXX";
    const int fd = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd < 0) return OsError(target, "create a temporary file beside it", errno);
    return TemporaryFile(fd, std::move(name));
  }
  TemporaryFile(TemporaryFile&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), name_(std::exchange(other.name_, {})) {}
  TemporaryFile& operator=(TemporaryFile&&) = delete;
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!name_.empty()) ::unlink(name_.c_str());
  }

  Status Write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return OsError(name_, "write", errno);
      bytes = bytes.subspan(static_cast<size_t>(n));
    }
    return {};
  }

  Status CommitAs(const std::filesystem::path& target) {
    if (::fchmod(fd_, 0644) != 0) return OsError(name_, "set the mode of", errno);
    if (::fsync(fd_) != 0) return OsError(name_, "sync", errno);
    if (::close(std::exchange(fd_, -1)) != 0) return OsError(name_, "close", errno);
    if (::rename(name_.c_str(), target.c_str()) != 0) return OsError(target, "rename to", errno);
    name_.clear();
    return SyncDirectory(target);
  }

 private:
  TemporaryFile(int fd, std::string name) : fd_(fd), name_(std::move(name)) {}

  static Status SyncDirectory(const std::filesystem::path& target) {
    const std::filesystem::path parent = target.parent_path();
    const std::filesystem::path directory = parent.empty() ? "." : parent;
    const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return OsError(directory, "open", errno);
    const int rc = ::fsync(fd);
    const int error = errno;
    ::close(fd);
    if (rc != 0) return OsError(directory, "sync", error);
    return {};
  }

  int fd_;
  std::string name_;
};

Status CheckTensor(const TensorToWrite& tensor, const std::filesystem::path& path) {
  const auto refuse = [&](const std::string& what) {
    return InvalidArgument(path.string() + ": tensor " + QuoteName(tensor.name) + " " + what);
  };
  if (tensor.name.empty() || tensor.name == kSafetensorsMetadataKey) {
    return refuse("cannot be called that");
  }
  uint64_t bits = TensorTypeBits(tensor.type);
  for (const uint64_t dim : tensor.shape) {
    if (__builtin_mul_overflow(bits, dim, &bits)) return refuse("has an impossible shape");
  }
  if (bits % 8 != 0 || bits / 8 != tensor.bytes.size()) {
    return refuse("of shape " + ShapeString(tensor.shape) + " does not have " +
                  std::to_string(tensor.bytes.size()) + " bytes");
  }
  return {};
}

// Length and JSON, padded with spaces to a multiple of 8 bytes so that the data stays aligned.
// Nothing if a name or a metadata string is not UTF-8.
std::optional<std::string> BuildHeader(std::span<const TensorToWrite* const> order,
                                       const std::map<std::string, std::string>& metadata) {
  nlohmann::json object = nlohmann::json::object();
  if (!metadata.empty()) object[std::string(kSafetensorsMetadataKey)] = metadata;
  uint64_t offset = 0;
  for (const TensorToWrite* tensor : order) {
    object[tensor->name] = {{"dtype", TensorTypeName(tensor->type)},
                            {"shape", tensor->shape},
                            {"data_offsets", {offset, offset + tensor->bytes.size()}}};
    offset += tensor->bytes.size();
  }
  std::string text;
  try {
    text = object.dump();
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string header(8, '\0');
  for (size_t i = 0; i < 8; ++i) header[i] = static_cast<char>(text.size() >> (8 * i));
  return header + text;
}

}  // namespace

Status WriteSafetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::vector<const TensorToWrite*> order;
  for (const TensorToWrite& tensor : tensors) {
    PREFIXD_TRY(CheckTensor(tensor, path));
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const TensorToWrite* a, const TensorToWrite* b) {
    const uint32_t a_bits = TensorTypeBits(a->type), b_bits = TensorTypeBits(b->type);
    return a_bits != b_bits ? a_bits > b_bits : a->name < b->name;
  });
  std::vector<std::string_view> names;
  for (const TensorToWrite* tensor : order) names.push_back(tensor->name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    return InvalidArgument(path.string() + ": two tensors are called " + QuoteName(*twice));
  }
  const auto header = BuildHeader(order, metadata);
  if (!header) return InvalidArgument(path.string() + ": a tensor name or metadata is not UTF-8");
  if (header->size() - 8 > kSafetensorsMaxHeaderBytes) {
    return InvalidArgument(path.string() + ": the header would exceed 100 MB");
  }

  PREFIXD_ASSIGN(TemporaryFile file, TemporaryFile::Create(path));
  PREFIXD_TRY(file.Write(std::as_bytes(std::span(*header))));
  for (const TensorToWrite* tensor : order) PREFIXD_TRY(file.Write(tensor->bytes));
  return file.CommitAs(path);
}

}  // namespace prefixd
