// Defines the storage types of KV rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace prefixd {

enum class DType : uint8_t { kF32 = 1, kF16 = 2, kBf16 = 3 };

constexpr size_t DTypeBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

}  // namespace prefixd
