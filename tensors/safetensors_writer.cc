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

Error WriteError(const std::filesystem::path& path, const char* what, int error) {
  const bool full = error == ENOSPC || error == EDQUOT;
  return {full ? Code::kResourceExhausted : Code::kIo,
          path.string() + ": cannot " + what + ": " + std::strerror(error)};
}

// Owns a file under construction: closes it, and removes it unless it was committed.
class TemporaryFile {
 public:
  static Result<TemporaryFile> Create(const std::filesystem::path& target) {
    std::string name = target.string() + ".XXXXXX";
    const int fd = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd < 0) return WriteError(target, "create a temporary file beside it", errno);
    return TemporaryFile(fd, std::move(name));
  }
  TemporaryFile(TemporaryFile&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), name_(std::exchange(other.name_, {})) {}
  TemporaryFile& operator=(TemporaryFile&&) = delete;
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!name_.empty()) ::unlink(name_.c_str());
  }

  Status WriteAt(uint64_t at, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(at));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return WriteError(name_, "write", errno);
      bytes = bytes.subspan(static_cast<size_t>(n));
      at += static_cast<uint64_t>(n);
    }
    return {};
  }

  Status CommitAs(const std::filesystem::path& target, mode_t mode) {
    if (::fchmod(fd_, mode) != 0) return WriteError(name_, "set the mode of", errno);
    if (::fsync(fd_) != 0) return WriteError(name_, "sync", errno);
    if (::close(std::exchange(fd_, -1)) != 0) return WriteError(name_, "close", errno);
    if (::rename(name_.c_str(), target.c_str()) != 0) return WriteError(target, "rename to", errno);
    name_.clear();
    return SyncDirectory(target);
  }

 private:
  TemporaryFile(int fd, std::string name) : fd_(fd), name_(std::move(name)) {}

  static Status SyncDirectory(const std::filesystem::path& target) {
    const std::filesystem::path parent = target.parent_path();
    const std::filesystem::path directory = parent.empty() ? "." : parent;
    const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return WriteError(directory, "open", errno);
    const int rc = ::fsync(fd);
    const int error = errno;
    ::close(fd);
    if (rc != 0) return WriteError(directory, "sync", error);
    return {};
  }

  int fd_;
  std::string name_;
};

// Checks a tensor's name and shape and sets `end` to its size in bytes.
Status CheckTensor(TensorInfo& tensor, const std::filesystem::path& path) {
  const auto refuse = [&](const char* what) {
    return InvalidArgument(path.string() + ": tensor " + QuoteName(tensor.name) + " " + what);
  };
  if (tensor.name.empty() || tensor.name == kSafetensorsMetadataKey) {
    return refuse("cannot be called that");
  }
  uint64_t bits = TensorTypeBits(tensor.type);
  tensor.elements = 1;
  for (const uint64_t dim : tensor.shape) {
    tensor.elements *= dim;
    if (__builtin_mul_overflow(bits, dim, &bits)) return refuse("has an impossible shape");
  }
  if (bits % 8 != 0) return refuse("has a shape that ends within a byte");
  tensor.begin = 0, tensor.end = bits / 8;
  return {};
}

// Returns length and JSON, padded with spaces to a multiple of 8 bytes so that the data stays
// aligned. Returns nothing if a name or a metadata string is not UTF-8.
std::optional<std::string> BuildHeader(std::span<const TensorInfo> tensors,
                                       const std::map<std::string, std::string>& metadata) {
  nlohmann::json object = nlohmann::json::object();
  if (!metadata.empty()) object[std::string(kSafetensorsMetadataKey)] = metadata;
  for (const TensorInfo& tensor : tensors) {
    object[tensor.name] = {{"dtype", TensorTypeName(tensor.type)},
                           {"shape", tensor.shape},
                           {"data_offsets", {tensor.begin, tensor.end}}};
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

struct SafetensorsWriter::Impl {
  std::filesystem::path path;
  TemporaryFile file;
  mode_t mode;
  uint64_t data_start, missing;     // bytes
  std::vector<TensorInfo> tensors;  // sorted by name
};

SafetensorsWriter::SafetensorsWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

Result<SafetensorsWriter> SafetensorsWriter::Create(
    const std::filesystem::path& path, std::vector<TensorInfo> tensors,
    const std::map<std::string, std::string>& metadata, uint32_t mode) {
  for (TensorInfo& tensor : tensors) PREFIXD_TRY(CheckTensor(tensor, path));
  std::ranges::sort(tensors, [](const TensorInfo& a, const TensorInfo& b) {
    const uint32_t a_bits = TensorTypeBits(a.type), b_bits = TensorTypeBits(b.type);
    return a_bits != b_bits ? a_bits > b_bits : a.name < b.name;
  });
  uint64_t end = 0;
  for (TensorInfo& tensor : tensors) {
    tensor.begin = end;
    if (__builtin_add_overflow(end, tensor.end, &end)) {
      return InvalidArgument(path.string() + ": the tensors are larger than a file can be");
    }
    tensor.end = end;
  }
  std::ranges::sort(tensors, {}, &TensorInfo::name);
  const auto twice = std::ranges::adjacent_find(tensors, {}, &TensorInfo::name);
  if (twice != tensors.end()) {
    return InvalidArgument(path.string() + ": two tensors are called " + QuoteName(twice->name));
  }
  const auto header = BuildHeader(tensors, metadata);
  if (!header) return InvalidArgument(path.string() + ": a tensor name or metadata is not UTF-8");
  if (header->size() - 8 > kSafetensorsMaxHeaderBytes) {
    return InvalidArgument(path.string() + ": the header would exceed 100 MB");
  }
  PREFIXD_ASSIGN(TemporaryFile file, TemporaryFile::Create(path));
  PREFIXD_TRY(file.WriteAt(0, std::as_bytes(std::span(*header))));
  return SafetensorsWriter(std::unique_ptr<Impl>(
      new Impl{path, std::move(file), mode, header->size(), end, std::move(tensors)}));
}

Status SafetensorsWriter::Write(std::string_view name, uint64_t at,
                                std::span<const std::byte> bytes) {
  const auto tensor = std::ranges::lower_bound(impl_->tensors, name, {}, &TensorInfo::name);
  if (tensor == impl_->tensors.end() || tensor->name != name) {
    return InvalidArgument(impl_->path.string() + ": there is no tensor " + QuoteName(name));
  }
  const uint64_t size = tensor->end - tensor->begin;
  if (at > size || bytes.size() > size - at || bytes.size() > impl_->missing) {
    return InvalidArgument(impl_->path.string() + ": tensor " + QuoteName(name) + " of shape " +
                           ShapeString(tensor->shape) + " has " + std::to_string(size) +
                           " bytes; " + std::to_string(bytes.size()) + " at " + std::to_string(at) +
                           " do not fit");
  }
  PREFIXD_TRY(impl_->file.WriteAt(impl_->data_start + tensor->begin + at, bytes));
  impl_->missing -= bytes.size();
  return {};
}

Status SafetensorsWriter::Commit() {
  if (impl_->missing > 0) {
    return Error{Code::kFailedPrecondition, impl_->path.string() + ": " +
                                                std::to_string(impl_->missing) +
                                                " bytes of its tensors were not written"};
  }
  return impl_->file.CommitAs(impl_->path, impl_->mode);
}

Status WriteSafetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::vector<TensorInfo> infos;
  for (const TensorToWrite& tensor : tensors) {
    TensorInfo& info = infos.emplace_back();
    info.name = tensor.name, info.type = tensor.type, info.shape = tensor.shape;
    PREFIXD_TRY(CheckTensor(info, path));
    if (info.end != tensor.bytes.size()) {
      return InvalidArgument(path.string() + ": tensor " + QuoteName(tensor.name) + " of shape " +
                             ShapeString(tensor.shape) + " does not have " +
                             std::to_string(tensor.bytes.size()) + " bytes");
    }
  }
  PREFIXD_ASSIGN(auto writer, SafetensorsWriter::Create(path, std::move(infos), metadata));
  for (const TensorToWrite& tensor : tensors) {
    PREFIXD_TRY(writer.Write(tensor.name, 0, tensor.bytes));
  }
  return writer.Commit();
}

}  // namespace prefixd
