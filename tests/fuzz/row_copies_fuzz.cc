// Fuzzes how a client reads where its rows lie.
#include "protocol/row_copies.h"

#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

using namespace prefixd::wire;

bool Inside(std::span<const std::byte> of, const std::byte* at, size_t n) {
  return at >= of.data() && n <= of.size() && static_cast<size_t>(at - of.data()) <= of.size() - n;
}

}  // namespace

// What passes stays within its memory, fills the arrays, and is the same when it is written anew.
void Run(std::span<const std::byte> input) {
  static std::vector<std::byte> region(1 << 16), k(512), v(1024);
  const RowArrays to = {.k = k, .v = v};
  const auto decoded = DecodeCopies(input, region, to);
  if (!decoded.ok()) return;
  uint64_t all = 0;
  for (const RowCopy& copy : decoded->copies) {
    for (uint32_t i = 0; i < copy.n; ++i) {
      FUZZ_EXPECT(Inside(region, copy.from + size_t{i} * copy.step, copy.bytes));
      const std::byte* const at = copy.to + copy.place(i) * copy.to_step;
      FUZZ_EXPECT(Inside(k, at, copy.bytes) || Inside(v, at, copy.bytes));
    }
    all += uint64_t{copy.n} * copy.bytes;
  }
  FUZZ_EXPECT(all == k.size() + v.size());
}

}  // namespace prefixd::fuzz
