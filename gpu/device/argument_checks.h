// Defines the checks that every launch of gpu/ begins with. Internal to gpu/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"

namespace prefixd::gpu::internal {

inline Status CheckRange(const char* name, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return {};
  return InvalidArgument(std::string("gpu: ") + name + " is " + std::to_string(value) +
                         "; it must be " + std::to_string(low) + ".." + std::to_string(high));
}

inline Status CheckPointer(const char* name, const void* pointer, size_t alignment) {
  if (!pointer) return InvalidArgument(std::string("gpu: ") + name + " is null");
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
    return InvalidArgument(std::string("gpu: ") + name + " must be " + std::to_string(alignment) +
                           "-byte aligned");
  }
  return {};
}

inline Status CheckWorkspace(size_t given, size_t needed) {
  if (given >= needed) return {};
  return InvalidArgument("gpu: the workspace has " + std::to_string(given) +
                         " bytes; the plan needs " + std::to_string(needed));
}

inline Status CheckDType(DType dtype) {
  if (dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBf16) return {};
  return InvalidArgument("gpu: rows must be f32, f16 or bf16");
}

}  // namespace prefixd::gpu::internal
