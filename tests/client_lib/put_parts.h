// Provides puts of some of a model's heads, on every kind of client: the fixture of their tests.
#pragma once

#include <span>
#include <vector>

#include "tests/client_lib/client_refusals.h"

namespace prefixd::testing {

inline constexpr HeadRange kFirst{0, 1}, kSecond{1, 1};
inline constexpr uint32_t kPatience = 600000;  // ms

class PutParts : public ClientRefusals {
 protected:
  void SetUp() override {
    ClientRefusals::SetUp();
    ASSERT_TRUE(client_->RegisterModel(prompt_.model).ok());
  }

  PutSpec Spec(HeadRange heads, uint32_t wait_ms = 0) const {
    PutSpec spec{prompt_.model.name, "", prompt_.tokens, "parts"};
    spec.heads = heads;
    spec.wait_ms = wait_ms;
    return spec;
  }
  Result<std::unique_ptr<PutStream>> Begin(HeadRange heads, uint32_t wait_ms = 0) const {
    return client_->BeginPut(Spec(heads, wait_ms));
  }

  // The keys (or values) of one head; the model has two.
  static std::vector<std::byte> Half(std::span<const std::byte> all, HeadRange heads) {
    constexpr size_t kRow = kDim * 2;
    std::vector<std::byte> out;
    for (size_t at = heads.first * kRow; at < all.size(); at += 2 * kRow) {
      out.insert(out.end(), all.begin() + ptrdiff_t(at), all.begin() + ptrdiff_t(at + kRow));
    }
    return out;
  }
  Status Write(PutStream& put, HeadRange heads, uint32_t layers = 2) const {
    for (uint32_t layer = 0; layer < layers; ++layer) {
      PREFIXD_TRY(put.Write(layer, 0, kTokens, Half(prompt_.k[layer], heads),
                            Half(prompt_.v[layer], heads)));
    }
    return {};
  }

  // Steps each half with a session of its own, and all heads with a third; exact attention, too.
  void ExpectHalvesOfAWholeStep(Store& first, Store& second, Store& whole) {
    const StepPolicy policy{.estimator = EstimatorKind::kMoment, .k = 24};
    const auto all = Attach(whole, policy);
    const std::vector<std::shared_ptr<Session>> ranks = {Attach(first, policy),
                                                         Attach(second, policy)};
    ASSERT_TRUE(all && ranks[0] && ranks[1]);
    const KvGeometry& g = prompt_.model.geometry;
    const size_t group = g.group_size(0);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const auto q = Queries(1, 7 + layer);
      std::vector<float> y(kQHeads * kDim), lse(kQHeads), y2(y), lse2(lse), y3(y), lse3(lse);
      StepInfo info;
      ASSERT_TRUE(all->Step(layer, q, y, lse, &info).ok());
      std::vector<StepRequest> requests;
      for (uint32_t h = 0; h < 2; ++h) {
        const auto own_q = std::span<const float>(q).subspan(h * group * kDim, group * kDim);
        const auto own = [&](std::vector<float>& of, size_t n) {
          return std::span<float>(of).subspan(h * group * n, group * n);
        };
        StepInfo part;
        const Status stepped =
            ranks[h]->Step(layer, {h, 1}, own_q, own(y2, kDim), own(lse2, 1), &part);
        ASSERT_TRUE(stepped.ok()) << stepped.error().message;
        EXPECT_EQ(part.k_per_head, std::vector<uint32_t>{info.k_per_head[h]});
        EXPECT_EQ(part.rho_z.size(), group);
        EXPECT_EQ(part.ledger.steps, 1u);
        // One session may step both halves, in one batch.
        requests.push_back(
            {all.get(), layer, own_q, own(y3, kDim), own(lse3, 1), nullptr, {}, {h, 1}});
      }
      whole.StepBatch(requests);
      EXPECT_TRUE(requests[0].status.ok() && requests[1].status.ok());
      EXPECT_EQ(y2, y);
      EXPECT_EQ(lse2, lse);
      EXPECT_EQ(y3, y);
      EXPECT_EQ(lse3, lse);

      constexpr uint32_t n = 3;
      const auto block = Queries(n, 9 + layer);
      std::vector<float> block_y(block.size()), block_lse(n * kQHeads);
      ASSERT_TRUE(all->AttendExact(layer, n, block, block_y, block_lse).ok());
      for (uint32_t h = 0; h < 2; ++h) {
        std::vector<float> part, want_y, want_lse, got_y(n * group * kDim), got_lse(n * group);
        for (uint32_t t = 0; t < n; ++t) {
          const size_t at = t * kQHeads + h * group;
          part.insert(part.end(), &block[at * kDim], &block[at * kDim] + group * kDim);
          want_y.insert(want_y.end(), &block_y[at * kDim], &block_y[at * kDim] + group * kDim);
          want_lse.insert(want_lse.end(), &block_lse[at], &block_lse[at] + group);
        }
        ASSERT_TRUE(ranks[h]->AttendExact(layer, {h, 1}, n, part, got_y, got_lse).ok());
        EXPECT_EQ(got_y, want_y);
        EXPECT_EQ(got_lse, want_lse);
      }
    }
  }

  void ExpectNothingReserved() const {
    const auto stats = client_->Stats();
    ASSERT_TRUE(stats.ok());
    for (const TenantStats& tenant : stats->tenants) EXPECT_EQ(tenant.reserved_bytes, 0u);
  }
  void Ready(const std::string& prefix) {
    const Status ready =
        client_->WaitReady(prefix, [](uint64_t, uint64_t, std::string_view) { return true; });
    ASSERT_TRUE(ready.ok()) << ready.error().message;
  }
};

}  // namespace prefixd::testing
