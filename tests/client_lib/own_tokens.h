// Appends own tokens to sessions of a client and of the embedded reference, which must give the
// same.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "tests/client_lib/client_refusals.h"

namespace prefixd::testing {

class OwnTokens : public ClientRefusals {
 protected:
  std::vector<std::byte> Rows(uint32_t n, uint32_t heads, uint64_t salt) const {
    std::mt19937_64 rng(salt);
    std::normal_distribution<float> normal;
    std::vector<float> x(size_t{n} * heads * kDim);
    for (float& e : x) e = normal(rng);
    std::vector<std::byte> bytes(x.size() * 2);
    FromFloat(DType::kBf16, x, bytes.data());
    return bytes;
  }
  struct Answer {
    std::vector<float> y, lse;
  };
  static Answer Room(uint32_t n) {
    return {std::vector<float>(n * kQHeads * kDim), std::vector<float>(n * kQHeads)};
  }
  // Appends an own token to both, which must give the same.
  void StepBoth(Session& mine, Session& theirs, uint32_t layer, uint64_t salt, bool info = false) {
    const auto q = Queries(1, salt);
    const auto own_k = Rows(1, 2, salt + 1), own_v = Rows(1, 2, salt + 2);
    Answer a = Room(1), b = Room(1);
    StepInfo said;
    const Status one = mine.StepAppend(layer, q, own_k, own_v, a.y, a.lse, info ? &said : nullptr);
    ASSERT_TRUE(one.ok()) << one.error().message;
    ASSERT_TRUE(theirs.StepAppend(layer, q, own_k, own_v, b.y, b.lse, nullptr).ok());
    ExpectNear(a.y, b.y);
    ExpectNear(a.lse, b.lse);
    EXPECT_EQ(said.ledger.steps, info ? 2u : 0u);
  }
  void AppendBoth(Session& mine, Session& theirs, uint32_t layer, uint32_t n, uint64_t salt) {
    const auto k = Rows(n, 2, salt), v = Rows(n, 2, salt + 1);
    const Status one = mine.Append(layer, n, k, v);
    ASSERT_TRUE(one.ok()) << one.error().message;
    ASSERT_TRUE(theirs.Append(layer, n, k, v).ok());
  }
  void ExactBoth(Session& mine, Session& theirs, uint32_t layer, uint32_t n, uint64_t salt) {
    const auto q = Queries(n, salt);
    Answer a = Room(n), b = Room(n);
    const Status one = mine.AttendExact(layer, n, q, a.y, a.lse);
    ASSERT_TRUE(one.ok()) << one.error().message;
    ASSERT_TRUE(theirs.AttendExact(layer, n, q, b.y, b.lse).ok());
    ExpectNear(a.y, b.y);
    ExpectNear(a.lse, b.lse);
  }
};

}  // namespace prefixd::testing
