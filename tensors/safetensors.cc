#include "tensors/safetensors.h"

#include <algorithm>
#include <utility>

#include "attention/rows/rows.h"

namespace prefixd {

Result<SafetensorsFile> SafetensorsFile::Open(const std::filesystem::path& path) {
  PREFIXD_ASSIGN(MappedFile file, MappedFile::Open(path));
  PREFIXD_ASSIGN(SafetensorsHeader header, ParseSafetensorsHeader(file.bytes(), path.string()));
  return SafetensorsFile(path, std::move(file), std::move(header));
}

const TensorInfo* SafetensorsFile::Find(std::string_view name) const {
  const auto it = std::lower_bound(
      header_.tensors.begin(), header_.tensors.end(), name,
      [](const TensorInfo& info, std::string_view wanted) { return info.name < wanted; });
  return it != header_.tensors.end() && it->name == name ? &*it : nullptr;
}

std::span<const std::byte> SafetensorsFile::Bytes(const TensorInfo& info) const {
  return file_.bytes().subspan(header_.data_start + info.begin, info.end - info.begin);
}

Result<std::vector<float>> SafetensorsFile::ReadFloats(std::string_view name,
                                                       std::span<const uint64_t> shape) const {
  const TensorInfo* info = Find(name);
  if (info == nullptr) {
    return InvalidArgument(path_.string() + ": has no tensor " + QuoteName(name) +
                           "; the file is of another model or incomplete");
  }
  if (!std::equal(shape.begin(), shape.end(), info->shape.begin(), info->shape.end())) {
    return InvalidArgument(path_.string() + ": tensor " + QuoteName(name) + " has shape " +
                           ShapeString(info->shape) + " but " + ShapeString(shape) +
                           " is expected; the file is of another model");
  }
  const auto dtype = FloatDType(info->type);
  if (!dtype) {
    return InvalidArgument(path_.string() + ": tensor " + QuoteName(name) + " is " +
                           std::string(TensorTypeName(info->type)) +
                           "; only F32, F16 and BF16 can be read: convert the file");
  }
  std::vector<float> out(info->elements);
  ToFloat(*dtype, Bytes(*info).data(), out);
  return out;
}

}  // namespace prefixd
