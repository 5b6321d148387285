// Makes random codes of keys in blocks, as index/ stores them, and the keys that they represent in
// float64.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "index/codes/block_codes.h"
#include "tests/support/random_kv.h"

namespace prefixd::testing {

// The codes are arbitrary: they approximate no given keys.
struct RandomBlockCodes {
  BlockCodeBook book;
  size_t n_keys = 0;
  std::vector<std::byte> arrays;  // BlockLayout(key_dim, n_keys)

  RandomBlockCodes() = default;
  RandomBlockCodes(Random& random, uint32_t key_dim, size_t n) : n_keys(n) {
    MakeBook(random, key_dim);
    const BlockLayout layout(key_dim, n);
    arrays.assign(layout.end, std::byte{0});
    CodeBook of_means = book.keys;
    of_means.digits = book.mean_digits;
    const std::span<std::byte> all(arrays);
    for (size_t i = 0; i < n; ++i) Pack(random, book.keys, i, all.first(layout.means));
    for (size_t b = 0; b < layout.n_blocks; ++b) {
      Pack(random, of_means, b, all.subspan(layout.means, layout.tokens - layout.means));
    }
    auto* tokens = reinterpret_cast<uint16_t*>(arrays.data() + layout.tokens);
    std::fill_n(tokens, layout.n_blocks * kCodeBlockKeys, kNoKey);
    for (size_t begin = 0; begin < n; begin += kWindowKeys) {
      const auto in_window = static_cast<uint32_t>(std::min<size_t>(kWindowKeys, n - begin));
      std::iota(tokens + begin, tokens + begin + in_window, uint16_t{0});
      for (uint32_t i = in_window - 1; i > 0; --i) {
        std::swap(tokens[begin + i], tokens[begin + random.Int(0, i)]);
      }
    }
  }

  BlockCodes view() const { return {book.keys.key_dim, n_keys, arrays}; }

  // Returns k^ of the key at `place`: [key_dim].
  std::vector<double> Key(size_t place) const {
    const BlockCodes codes = view();
    std::vector<double> key(book.keys.centre.begin(), book.keys.centre.end());
    uint32_t field = 0, mean_field = 0;
    for (size_t c = 0; c < book.keys.components(); ++c) {
      const double along =
          Coordinate(codes.codes, place, book.keys.digits[c], &field) +
          double{book.mean_ratios[c]} *
              Coordinate(codes.means, place / kCodeBlockKeys, book.mean_digits[c], &mean_field);
      for (size_t d = 0; d < key.size(); ++d) {
        key[d] += along * Bf16ToFloat(book.keys.directions[c * key.size() + d]);
      }
    }
    return key;
  }

 private:
  void MakeBook(Random& random, uint32_t key_dim) {
    CodeBook& keys = book.keys;
    keys.key_dim = key_dim;
    keys.centre = random.Normals(key_dim, 0.3f);
    uint32_t room = CodeFields(key_dim), room_of_means = room;
    const uint32_t components = random.Chance(0.1) ? random.Int(0, key_dim) : key_dim;
    for (uint32_t c = 0; c < components; ++c) {
      const uint32_t digits = random.Int(0, std::min(room, kMaxCodeDigits));
      const uint32_t of_mean = random.Int(0, std::min(room_of_means, kMaxCodeDigits));
      room -= digits;
      room_of_means -= of_mean;
      keys.digits.push_back(static_cast<uint8_t>(digits));
      book.mean_digits.push_back(static_cast<uint8_t>(of_mean));
      // Means reach about as far as keys around them.
      book.mean_ratios.push_back(static_cast<float>(
          random.Uniform(0.2, 2) * double(1u << 2 * digits) / double(1u << 2 * of_mean)));
      book.variances.push_back(static_cast<float>(random.Uniform(0, 1)));
      for (const float x : random.Normals(key_dim, 1.0f / static_cast<float>(1u << 2 * digits))) {
        keys.directions.push_back(FloatToBf16(x));
      }
    }
  }

  static void Pack(Random& random, const CodeBook& of, size_t i, std::span<std::byte> codes) {
    std::vector<uint8_t> coordinates;
    for (const uint8_t digits : of.digits) {
      coordinates.push_back(static_cast<uint8_t>(random.Int(0, (1u << 2 * digits) - 1)));
    }
    PackCode(of, coordinates, i, codes);
  }

  double Coordinate(const std::byte* codes, size_t place, uint32_t digits, uint32_t* field) const {
    double value = 0;
    for (uint32_t j = 0; j < digits; ++j, ++*field) {
      const CodePlace at = PlaceOfCode(book.keys.key_dim, place, *field);
      value += double(1u << 2 * j) * (std::to_integer<uint32_t>(codes[at.byte]) >> at.shift & 3);
    }
    return value;
  }
};

}  // namespace prefixd::testing
