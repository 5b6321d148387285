// Knows what the committed stores of each format version hold (tests/data/store-v<version>).
#pragma once

#include <string>
#include <vector>

#include "storage/segment/prefix_info.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {

// Of all versions: 40 tokens, 30 that continue them, 20 that branch off after 25, one blob.
struct FormatStore {
  const std::vector<uint32_t> a = Iota(40, 1000), b = Join(a, Iota(30, 2000)),
                              c = Join(Iota(25, 1000), Iota(20, 3000));
  // From version 2 on: a prompt with an encoding and a time to live far ahead, one whose rows are
  // derived, one that was compacted out of two (the shorter one is a name in it), one that was
  // removed.
  const std::vector<uint32_t> encoded = Iota(48, 4000), derived = Iota(32, 5000),
                              shorter = Iota(32, 6000), compacted = Join(shorter, Iota(16, 6500)),
                              removed = Iota(32, 7000);
  static constexpr int64_t kExpires = 1ll << 52;  // Unix ms

  static std::string Blob(uint32_t version) {
    return "derived data of version " + std::to_string(version);
  }
};

}  // namespace prefixd::storage
