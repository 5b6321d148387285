// Reads and writes safetensors files (the format: tensors/safetensors_header.h).
//
// SafetensorsFile maps the file and validates everything that it can without reading the tensors:
// once Open has returned, every span lies inside the file. Spans live as long as the file object.
// Move-only; any number of threads may call its const methods.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"
#include "tensors/mapped_file.h"
#include "tensors/safetensors_header.h"

namespace prefixd {

class SafetensorsFile {
 public:
  // Errors: kNotFound or kIo when the file cannot be read; kCorrupt when it is damaged, truncated
  // or no safetensors file.
  static Result<SafetensorsFile> Open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }  // sorted by name
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  std::span<const std::byte> file_bytes() const { return file_.bytes(); }

  const TensorInfo* Find(std::string_view name) const;  // nullptr if there is none
  // Returns little-endian elements, row-major and not aligned. `info` is one of tensors().
  std::span<const std::byte> Bytes(const TensorInfo& info) const;

  // Returns the elements of tensor `name`, which must have this shape, as float32.
  // kInvalidArgument: it is missing, has another shape, or a dtype other than F32, F16, BF16.
  Result<std::vector<float>> ReadFloats(std::string_view name,
                                        std::span<const uint64_t> shape) const;

 private:
  SafetensorsFile(std::filesystem::path path, MappedFile file, SafetensorsHeader header)
      : path_(std::move(path)), file_(std::move(file)), header_(std::move(header)) {}

  std::filesystem::path path_;
  MappedFile file_;
  SafetensorsHeader header_;
};

// Describes a tensor to write; the writer borrows everything for the call. `bytes` holds
// little-endian elements.
struct TensorToWrite {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<uint64_t> shape;
  std::span<const std::byte> bytes;
};

// Writes a file whose tensors come in pieces and in any order, because they may not fit into
// memory. Until Commit it is a temporary file beside `path`. Move-only; one thread uses it at a
// time.
class SafetensorsWriter {
 public:
  // `tensors` gives names, types and shapes. The writer lays them out by falling element size, then
  // name, so that all are aligned to their size. `mode` is the file's mode, as chmod takes it.
  // Errors: kInvalidArgument for a bad or repeated name or an impossible shape; kIo;
  // kResourceExhausted when the disk is full.
  static Result<SafetensorsWriter> Create(const std::filesystem::path& path,
                                          std::vector<TensorInfo> tensors,
                                          const std::map<std::string, std::string>& metadata,
                                          uint32_t mode = 0644);
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();  // removes the file unless committed

  // Writes bytes of tensor `name` from its byte `at` on; each byte is written once.
  // kInvalidArgument: the tensor has no such bytes.
  Status Write(std::string_view name, uint64_t at, std::span<const std::byte> bytes);
  // Makes the complete file durable and visible at `path`. kFailedPrecondition: bytes are missing.
  Status Commit();

 private:
  struct Impl;
  explicit SafetensorsWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Writes all of a file that Open accepts, or nothing: temporary file beside `path`, fsync, rename,
// fsync of the directory. The layout is SafetensorsWriter's. Further kInvalidArgument: bytes that
// do not fit the shape.
Status WriteSafetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                        const std::map<std::string, std::string>& metadata);

}  // namespace prefixd
