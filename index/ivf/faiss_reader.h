// Reads an index from borrowed bytes; FAISS treats a short read as an error. Internal to index/.
#pragma once

#include <faiss/impl/io.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

namespace prefixd::index {

class FaissReader final : public faiss::IOReader {
 public:
  explicit FaissReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  size_t operator()(void* ptr, size_t size, size_t nitems) override {
    if (size == 0) return nitems;
    const size_t whole = std::min(nitems, bytes_.size() / size);
    if (whole != 0) std::memcpy(ptr, bytes_.data(), whole * size);
    bytes_ = bytes_.subspan(whole * size);
    return whole;
  }
  bool at_end() const { return bytes_.empty(); }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace prefixd::index
