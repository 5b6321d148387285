// Builds pages that end in an XXH3-64 of the bytes before it: segment headers and footers.
#pragma once

#include <xxhash.h>

#include "storage/segment/segment_format.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {

using Page = std::array<std::byte, storage::kPageBytes>;

inline Page PageOf(const Bytes& bytes) {
  Page page{};
  std::copy_n(bytes.begin(), std::min(bytes.size(), page.size()), page.begin());
  return page;
}

inline void PutChecksumRight(Page& page) {
  constexpr size_t kAt = storage::kPageBytes - sizeof(uint64_t);
  const uint64_t sum = XXH3_64bits(page.data(), kAt);
  std::memcpy(page.data() + kAt, &sum, sizeof(sum));
}

// Checks that an image that decodes is encoded to one that decodes equal. Returns whether it
// decodes.
template <typename Image>
bool CheckPage(const Page& page) {
  const auto decoded = Image::Decode(page);
  if (!decoded.ok()) {
    FUZZ_EXPECT(!decoded.error().message.empty());
    return false;
  }
  Page again;
  decoded->Encode(again);
  const auto back = Image::Decode(again);
  FUZZ_EXPECT(back.ok() && *back == *decoded);
  return true;
}

}  // namespace prefixd::fuzz
