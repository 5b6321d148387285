// Fuzzes how a client reads where its rows lie.
#include "protocol/row_copies.h"

#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

using namespace prefixd::wire;

struct Memory {
  Bytes region = Bytes(1 << 16), k = Bytes(512), v = Bytes(1024);
  RowArrays arrays() { return {.k = k, .v = v}; }
};

bool Inside(std::span<const std::byte> of, const std::byte* at, size_t n) {
  return at >= of.data() && n <= of.size() && static_cast<size_t>(at - of.data()) <= of.size() - n;
}

// What passes stays within its memory, fills the arrays, and passes again when it is written anew.
bool Check(std::span<const std::byte> bytes, Memory& memory) {
  const auto decoded = DecodeCopies(bytes, memory.region, memory.arrays());
  if (!decoded.ok()) return false;
  uint64_t all = 0;
  for (const RowCopy& copy : decoded->copies) {
    for (uint32_t i = 0; i < copy.n; ++i) {
      FUZZ_EXPECT(Inside(memory.region, copy.from + size_t{i} * copy.step, copy.bytes));
      const std::byte* const to = copy.to + copy.place(i) * copy.to_step;
      FUZZ_EXPECT(Inside(memory.k, to, copy.bytes) || Inside(memory.v, to, copy.bytes));
    }
    all += uint64_t{copy.n} * copy.bytes;
  }
  FUZZ_EXPECT(all == memory.k.size() + memory.v.size());
  return true;
}

// Draws copies that cover both arrays, in parts of 32 bytes.
void CheckDrawn(FuzzedDataProvider& in, Memory& memory) {
  std::vector<RowCopy> copies;
  std::vector<std::vector<uint16_t>> places;
  places.reserve(64);
  for (Bytes* array : {&memory.k, &memory.v}) {
    for (size_t at = 0; at < array->size();) {
      const auto most = static_cast<uint32_t>((array->size() - at) / 32);
      RowCopy copy;
      copy.bytes = 32;
      copy.n = in.ConsumeIntegralInRange<uint32_t>(1, most);
      copy.step = in.ConsumeIntegralInRange<uint32_t>(0, 512);
      copy.from = memory.region.data() + in.ConsumeIntegralInRange<size_t>(0, 1 << 15);
      copy.to = array->data() + at;
      copy.to_step = 32;
      if (in.ConsumeBool()) {
        auto& order = places.emplace_back(copy.n);
        for (uint16_t i = 0; i < copy.n; ++i) order[i] = static_cast<uint16_t>(copy.n - 1 - i);
        copy.places = order.data();
      }
      copies.push_back(copy);
      at += size_t{copy.n} * 32;
    }
  }
  Bytes bytes = EncodeCopies(copies, memory.region, memory.arrays());
  FUZZ_EXPECT(bytes.size() == EncodedCopiesBytes(copies));
  FUZZ_EXPECT(Check(bytes, memory));
  Damage(in, bytes);
  Check(bytes, memory);
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  Memory memory;
  if (in.ConsumeBool()) return CheckDrawn(in, memory);
  Check(Rest(in), memory);
}

}  // namespace prefixd::fuzz
