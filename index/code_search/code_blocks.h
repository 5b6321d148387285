// Memory of codes: aligned for vector loads and, where large, backed by huge pages. Internal.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace prefixd::index {

class CodeMemory {
 public:
  // Zeroed. bad_alloc as with any allocation.
  explicit CodeMemory(size_t bytes);
  std::span<std::byte> bytes() { return {data_.get(), size_}; }
  std::span<const std::byte> bytes() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  size_t size_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace prefixd::index
