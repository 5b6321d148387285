// Tests what says where rows lie: the same copies on the other side, and none that leave their
// memory.
#include "protocol/row_copies.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::wire {
namespace {

struct Memory {
  std::vector<std::byte> region = std::vector<std::byte>(64 << 10);
  std::vector<std::byte> k = std::vector<std::byte>(4096), v = std::vector<std::byte>(8192);
  RowArrays arrays() { return {.k = k, .v = v}; }
};

// Draws copies that cover both arrays: pages of parts, some of them in any order.
std::vector<RowCopy> DrawCopies(Memory& memory, std::vector<std::vector<uint16_t>>& places,
                                std::mt19937_64& rng) {
  std::vector<RowCopy> copies;
  for (std::vector<std::byte>* array : {&memory.k, &memory.v}) {
    for (size_t at = 0; at < array->size();) {
      RowCopy copy;
      copy.bytes = 64u << (rng() % 3);
      copy.n = 1 + static_cast<uint32_t>(rng() % 8);
      if (at + size_t{copy.n} * copy.bytes > array->size()) {
        copy.n = 1;
        copy.bytes = static_cast<uint32_t>(array->size() - at);
      }
      copy.step = copy.bytes + static_cast<uint32_t>(rng() % 100);
      copy.from = memory.region.data() + rng() % (memory.region.size() - 8192 * 4);
      copy.to = array->data() + at;
      copy.to_step = copy.bytes;
      if (rng() % 2 == 0) {
        std::vector<uint16_t>& order = places.emplace_back(copy.n);
        std::iota(order.begin(), order.end(), 0);
        std::ranges::shuffle(order, rng);
        copy.places = order.data();
      }
      copies.push_back(copy);
      at += size_t{copy.n} * copy.bytes;
    }
  }
  return copies;
}

TEST(RowCopies, ArriveAsTheyWereSent) {
  std::mt19937_64 rng(prefixd::testing::Seed("RowCopies"));
  for (int round = 0; round < 100; ++round) {
    Memory here, there;
    std::vector<std::vector<uint16_t>> places;
    places.reserve(1000);
    const auto copies = DrawCopies(here, places, rng);
    const auto bytes = EncodeCopies(copies, here.region, here.arrays());
    EXPECT_EQ(bytes.size(), EncodedCopiesBytes(copies));
    const auto back = DecodeCopies(bytes, there.region, there.arrays());
    ASSERT_TRUE(back.ok()) << back.error().message;
    ASSERT_EQ(back->copies.size(), copies.size());
    for (size_t i = 0; i < copies.size(); ++i) {
      const RowCopy &sent = copies[i], &came = back->copies[i];
      EXPECT_EQ(came.from - there.region.data(), sent.from - here.region.data());
      const bool key = sent.to >= here.k.data() && sent.to < here.k.data() + here.k.size();
      const auto sent_at = sent.to - (key ? here.k : here.v).data();
      EXPECT_EQ(came.to - (key ? there.k : there.v).data(), sent_at);
      EXPECT_EQ(came.bytes, sent.bytes);
      EXPECT_EQ(came.n, sent.n);
      EXPECT_EQ(came.step, sent.step);
      EXPECT_EQ(came.to_step, sent.to_step);
      for (uint32_t j = 0; j < sent.n; ++j) EXPECT_EQ(came.place(j), sent.place(j));
    }
  }
}

// Whatever a daemon sends, copies stay within their memory.
TEST(RowCopies, NoneLeaveTheirMemory) {
  std::mt19937_64 rng(prefixd::testing::Seed("RowCopies.Hostile"));
  int passed = 0;
  for (int round = 0; round < 20000; ++round) {
    Memory memory;
    std::vector<std::vector<uint16_t>> places;
    places.reserve(1000);
    auto bytes = EncodeCopies(DrawCopies(memory, places, rng), memory.region, memory.arrays());
    const int changes = static_cast<int>(rng() % 3);
    for (int i = 0; i < changes; ++i) {
      const size_t at = rng() % bytes.size();
      if (rng() % 2 == 0) {
        bytes[at] = std::byte(rng());
      } else {
        const uint64_t large = rng() >> (rng() % 64);
        std::memcpy(bytes.data() + at, &large, std::min<size_t>(8, bytes.size() - at));
      }
    }
    if (rng() % 10 == 0) bytes.resize(rng() % bytes.size());
    const auto decoded = DecodeCopies(bytes, memory.region, memory.arrays());
    if (!decoded.ok()) {
      EXPECT_EQ(decoded.error().code, Code::kUnavailable);
      continue;
    }
    ++passed;
    uint64_t all = 0;
    for (const RowCopy& copy : decoded->copies) {
      const auto inside = [](const std::vector<std::byte>& of, const std::byte* at, size_t n) {
        return at >= of.data() && n <= of.size() &&
               static_cast<size_t>(at - of.data()) <= of.size() - n;
      };
      for (uint32_t i = 0; i < copy.n; ++i) {
        ASSERT_TRUE(inside(memory.region, copy.from + size_t{i} * copy.step, copy.bytes));
        const std::byte* const to = copy.to + copy.place(i) * copy.to_step;
        ASSERT_TRUE(inside(memory.k, to, copy.bytes) || inside(memory.v, to, copy.bytes));
      }
      all += uint64_t{copy.n} * copy.bytes;
    }
    ASSERT_EQ(all, memory.k.size() + memory.v.size());
  }
  EXPECT_GT(passed, 1000);
  Memory memory;
  EXPECT_FALSE(DecodeCopies({}, memory.region, memory.arrays()).ok());
  EXPECT_FALSE(DecodeCopies(EncodeCopies({}, memory.region, memory.arrays()), memory.region,
                            memory.arrays())
                   .ok());  // no rows at all
}

}  // namespace
}  // namespace prefixd::wire
