// Reading and writing safetensors files (the format: tensors/safetensors_header.h).
//
// A SafetensorsFile maps the file and validates all of it that can be validated without reading
// the tensors: once Open has returned, every span it hands out is inside the file. Move-only; its
// const methods may be called from any number of threads. Spans live as long as the file object.
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
  // kNotFound or kIo when the file cannot be read, kCorrupt when it is damaged, truncated or
  // something else.
  static Result<SafetensorsFile> Open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }  // sorted by name
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  std::span<const std::byte> file_bytes() const { return file_.bytes(); }

  const TensorInfo* Find(std::string_view name) const;  // nullptr if there is none
  // Little-endian elements, row-major; not aligned. `info` is one of tensors().
  std::span<const std::byte> Bytes(const TensorInfo& info) const;

  // The elements of a tensor that must be there with this shape, as float32.
  // kInvalidArgument: missing, another shape, or a dtype other than F32, F16, BF16.
  Result<std::vector<float>> ReadFloats(std::string_view name,
                                        std::span<const uint64_t> shape) const;

 private:
  SafetensorsFile(std::filesystem::path path, MappedFile file, SafetensorsHeader header)
      : path_(std::move(path)), file_(std::move(file)), header_(std::move(header)) {}

  std::filesystem::path path_;
  MappedFile file_;
  SafetensorsHeader header_;
};

// One tensor to write; everything is borrowed for the call. `bytes` holds little-endian elements.
struct TensorToWrite {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<uint64_t> shape;
  std::span<const std::byte> bytes;
};

// A file whose tensors come piece by piece, in any order: for what does not fit into memory. It is
// a temporary file beside `path` until Commit. Move-only; used by one thread at a time.
class SafetensorsWriter {
 public:
  // tensors: names, types and shapes. They are laid out by falling element size, then name, so that
  // all are aligned to their size. mode: of the file, as chmod's. kInvalidArgument: a bad or
  // repeated name, an impossible shape; kIo, kResourceExhausted (disk full).
  static Result<SafetensorsWriter> Create(const std::filesystem::path& path,
                                          std::vector<TensorInfo> tensors,
                                          const std::map<std::string, std::string>& metadata,
                                          uint32_t mode = 0644);
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();  // without Commit nothing is left behind

  // Bytes of tensor `name` from its byte `at` on, each once. kInvalidArgument: no such place.
  Status Write(std::string_view name, uint64_t at, std::span<const std::byte> bytes);
  // The file is there, all of it, and durable. kFailedPrecondition when bytes are missing.
  Status Commit();

 private:
  struct Impl;
  explicit SafetensorsWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Writes a file that Open accepts: all of it or nothing (temporary file beside `path`, fsync,
// rename, fsync of the directory), as SafetensorsWriter lays it out. kInvalidArgument also: bytes
// that do not fit the shape.
Status WriteSafetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                        const std::map<std::string, std::string>& metadata);

}  // namespace prefixd
