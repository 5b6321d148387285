// How the rows of a segment are encoded on the disk; decided per prefix when it is put. Whatever
// the encoding, readers get rows in the geometry's dtype.
//
//   as given: the geometry's dtype, bit for bit
//   8 bit:    a key is a float32 scale, then key_dim int8; the value likewise. x = scale * code,
//             scale = max|x| / 127 over the key (value). Half the bytes of a 16-bit row at an error
//             of at most scale / 2 per element (and the rounding to the dtype when read).
//
// Thread-safety: pure functions; RowEncoder: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "attention/kv_shape.h"
#include "attention/result.h"

namespace prefixd::storage {

enum class RowEncoding : uint8_t { kAsGiven = 0, kInt8 = 1 };
inline bool KnownEncoding(uint32_t value) { return value <= 1; }
std::string_view EncodingName(RowEncoding encoding);  // "as-given", "int8"
Result<RowEncoding> EncodingFromName(std::string_view name);

struct StoredBytes {
  uint32_t key = 0, value = 0;
};
// Of one token of one KV head.
StoredBytes StoredRowBytes(const RowShape& row, RowEncoding encoding);

// What an encoding cost: root mean square error over root mean square of what was given.
struct EncodingError {
  double key = 0, value = 0;
};

// Encodes rows and keeps account of the error, against what readers will get.
class RowEncoder {
 public:
  RowEncoder(const RowShape& row, RowEncoding encoding) : row_(row), encoding_(encoding) {}

  // rows: [n][row bytes] as given. The result [n][stored bytes] is `rows` itself when nothing is to
  // be done, else valid until the next call.
  std::span<const std::byte> Encode(std::span<const std::byte> rows);
  EncodingError error() const;

 private:
  struct Sums {
    double given = 0, lost = 0;
  };
  void EncodeItem(const std::byte* given, uint32_t dim, std::byte* out, Sums& sums);

  const RowShape row_;
  const RowEncoding encoding_;
  std::vector<std::byte> out_;
  std::vector<float> floats_;
  Sums key_, value_;
};

// One stored key (or value) of `dim` elements to `out`, in `dtype`. Not for kAsGiven, which is a
// copy.
void DecodeItem(const std::byte* stored, uint32_t dim, DType dtype, std::byte* out);

}  // namespace prefixd::storage
