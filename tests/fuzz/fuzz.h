// Provides what the fuzz targets share. The last byte of an input (numbers are taken from there)
// chooses the use of the rest: raw bytes, bytes whose checksum is put right first (a fuzzer never
// guesses one), or values made from them. A broken expectation ends the process; libFuzzer keeps
// the input.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#define FUZZ_EXPECT(condition)                                                      \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                 \
    }                                                                               \
  } while (false)

namespace prefixd::fuzz {

using Bytes = std::vector<std::byte>;

// Runs a target on one input; each target defines its own (entry.cc calls it).
void RunOne(FuzzedDataProvider& in);

inline Bytes Rest(FuzzedDataProvider& in) {
  const auto bytes = in.ConsumeRemainingBytes<uint8_t>();
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  return {data, data + bytes.size()};
}

template <typename T>
T Whole(FuzzedDataProvider& in) {
  return in.ConsumeIntegral<T>();
}

template <size_t N>
void Fill(FuzzedDataProvider& in, std::array<uint8_t, N>& out) {
  const auto bytes = in.ConsumeBytes<uint8_t>(N);
  std::copy(bytes.begin(), bytes.end(), out.begin());
}

// Changes a few bytes of a well-formed image.
inline void Damage(FuzzedDataProvider& in, std::span<std::byte> bytes) {
  if (bytes.empty()) return;
  for (int i = in.ConsumeIntegralInRange<int>(0, 4); i > 0; --i) {
    bytes[in.ConsumeIntegralInRange<size_t>(0, bytes.size() - 1)] = std::byte(Whole<uint8_t>(in));
  }
}

// Checks that a well-formed image passes, and that a damaged one passes or is refused.
template <typename Image, typename Check>
void CheckDamaged(FuzzedDataProvider& in, Image image, const Check& check) {
  check(image);
  Damage(in, image);
  check(image);
}

// Does the same for an image whose checksum would hide everything else: once more with the checksum
// put right.
template <typename Image, typename Check, typename PutRight>
void CheckDamaged(FuzzedDataProvider& in, Image image, const Check& check,
                  const PutRight& put_right) {
  check(image);
  Damage(in, image);
  check(image);
  put_right(image);
  check(image);
}

}  // namespace prefixd::fuzz
