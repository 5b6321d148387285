// Builds one block of host memory that is copied to the device in one piece. Internal to gpu/.
//
// Arrays are laid out one after the other, 16-byte aligned; each Add returns the address the array
// will have on the device, so that structures of device pointers can be added too. Callers make the
// same additions twice: first with null bases, which only measures, then into memory of that size.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>

namespace prefixd::gpu::internal {

class HostImage {
 public:
  // host: 16-byte aligned staging memory, or null to measure; device: the copy's destination.
  HostImage(std::byte* host, std::byte* device) : host_(host), device_(device) {}

  size_t bytes() const { return bytes_; }

  // Returns the device address of the next addition.
  const std::byte* Here() {
    bytes_ = (bytes_ + 15) / 16 * 16;
    return device_ + bytes_;
  }

  template <typename T>
  const T* Add(std::span<const T> values) {
    const std::byte* at = Here();
    AddBytes(values.data(), values.size_bytes());
    return reinterpret_cast<const T*>(at);
  }

  // Adds n values that fill(span) makes; `fill` is not called when only measuring.
  template <typename T, typename Fill>
  const T* AddMade(size_t n, Fill fill) {
    const std::byte* at = Here();
    if (host_ && n > 0) fill(std::span(reinterpret_cast<T*>(host_ + bytes_), n));
    bytes_ += n * sizeof(T);
    return reinterpret_cast<const T*>(at);
  }

  // Adds bytes directly behind the previous addition.
  void AddBytes(const void* data, size_t n) {
    if (host_ && n > 0) std::memcpy(host_ + bytes_, data, n);
    bytes_ += n;
  }

  // Adds the values as float32.
  const float* AddFloats(std::span<const double> values) {
    const std::byte* at = Here();
    for (const double value : values) {
      const float narrow = static_cast<float>(value);
      AddBytes(&narrow, sizeof(narrow));
    }
    return reinterpret_cast<const float*>(at);
  }

  // Adds matrix [rows][columns] as [columns][rows].
  const float* AddTransposed(std::span<const float> matrix, size_t rows, size_t columns) {
    const std::byte* at = Here();
    for (size_t c = 0; c < columns; ++c) {
      for (size_t r = 0; r < rows; ++r) AddBytes(&matrix[r * columns + c], sizeof(float));
    }
    return reinterpret_cast<const float*>(at);
  }

 private:
  std::byte* host_;
  std::byte* device_;
  size_t bytes_ = 0;
};

}  // namespace prefixd::gpu::internal
