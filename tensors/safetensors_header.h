// Parses and strictly validates the header of a safetensors file, independently of any file.
//
//   u64 little-endian N | N bytes of JSON, beginning with '{' | tensor data
//   {"__metadata__": {string: string}, "name": {"dtype", "shape", "data_offsets": [begin, end]}}
//
// Offsets count from the end of the header. As in the reference implementation
// (github.com/huggingface/safetensors), tensors cover the data exactly, without holes, overlap or
// trailing bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"
#include "tensors/tensor_type.h"

namespace prefixd {

inline constexpr uint64_t kSafetensorsMaxHeaderBytes = 100'000'000;
inline constexpr std::string_view kSafetensorsMetadataKey = "__metadata__";

struct TensorInfo {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<uint64_t> shape;  // empty: a scalar
  uint64_t elements = 0;        // product of shape
  uint64_t begin = 0, end = 0;  // bytes, from the end of the header
};

struct SafetensorsHeader {
  uint64_t data_start = 0;                      // bytes from the start of the file
  std::vector<TensorInfo> tensors;              // sorted by name
  std::map<std::string, std::string> metadata;  // "__metadata__"
};

// `file` is the whole file; `label` (its path) opens every message. kCorrupt: the file is
// incomplete or not well-formed.
Result<SafetensorsHeader> ParseSafetensorsHeader(std::span<const std::byte> file,
                                                 std::string_view label);

// Quotes a name or key for a one-line message: control characters are replaced, and the text is cut
// at 120 bytes.
std::string QuoteName(std::string_view name);
// Returns "[2, 3]", for example; "[]" for a scalar.
std::string ShapeString(std::span<const uint64_t> shape);

}  // namespace prefixd
