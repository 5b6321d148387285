// Reads and writes the little-endian fields of serialised summaries. Internal to attention/.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "prefixd/result.h"

namespace prefixd {

static_assert(std::endian::native == std::endian::little, "stored summaries are little-endian");

class ByteWriter {
 public:
  template <typename T>
  void Put(T value) {
    const auto* p = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), p, p + sizeof(T));
  }
  // Values beyond float32 saturate, so that a stored summary never holds an infinity.
  template <typename T>
  void PutFloats(std::span<const T> values) {
    constexpr double kMax = std::numeric_limits<float>::max();
    for (T v : values) {
      const double d = v;
      Put(static_cast<float>(d > kMax ? kMax : d < -kMax && std::isfinite(d) ? -kMax : d));
    }
  }
  std::vector<std::byte> Take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

// Reads must not pass the end: check remaining() first (asserts guard the caller's size check).
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  size_t remaining() const { return bytes_.size(); }
  template <typename T>
  T Get() {
    T value;
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_ = bytes_.subspan(sizeof(T));
    return value;
  }
  template <typename T>
  std::vector<T> GetFloats(size_t n) {
    std::vector<T> values(n);
    for (T& v : values) v = static_cast<T>(Get<float>());
    return values;
  }

 private:
  std::span<const std::byte> bytes_;
};

// Checks the head of a stored summary, a header of `header_bytes` that begins with `magic` and
// `version`, and returns a reader behind these two. kCorrupt where it begins otherwise; the message
// names the expected summary, `name`.
inline Result<ByteReader> ReadHead(std::span<const std::byte> bytes, size_t header_bytes,
                                   uint32_t magic, uint16_t version, const std::string& name) {
  const auto corrupt = [&](const std::string& what) {
    return Error{Code::kCorrupt, name + ": " + what};
  };
  ByteReader in(bytes);
  if (in.remaining() < header_bytes) return corrupt("shorter than its header");
  if (in.Get<uint32_t>() != magic) return corrupt("not one");
  const auto found = in.Get<uint16_t>();
  if (found != version) return corrupt("unknown version " + std::to_string(found));
  return in;
}

template <typename T>
bool AllFinite(std::span<const T> values) {
  for (T v : values) {
    if (!std::isfinite(v)) return false;
  }
  return true;
}

}  // namespace prefixd
