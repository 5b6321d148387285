// Tests copies of shared sets' rows: their contents, their memory, and their use in steps.
#include "runtime/step/gathered_rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "tests/runtime/runtime_fixture.h"
#include "tests/runtime/step/plain_sharing.h"

namespace prefixd::testing {
namespace {

constexpr size_t kHost = static_cast<size_t>(Tier::kHost);

std::vector<uint32_t> Ids(size_t n) {
  std::vector<uint32_t> ids(n);
  for (size_t i = 0; i < n; ++i) ids[i] = static_cast<uint32_t>(3 * i);
  return ids;
}

TEST(GatheredRows, HoldWhatWasPut) {
  Random random(Seed("GatheredRowsHoldWhatWasPut"));
  GatheredRowCache pool(64 << 20);
  for (int round = 0; round < 200; ++round) {
    const DType dtype = round % 3 == 0 ? DType::kF32 : DType::kBf16;
    const RowShape shape{1 + random.Int(0, 140), 1 + random.Int(0, 140), dtype};
    const size_t n = 1 + random.Int(0, 200);
    std::vector<std::byte> keys(n * shape.key_bytes() + 8), values(n * shape.value_bytes() + 8);
    for (std::byte& b : keys) b = std::byte(random.Int(0, 255));
    for (std::byte& b : values) b = std::byte(random.Int(0, 255));
    std::vector<RowRef> refs;  // backwards, and not aligned
    for (size_t i = n; i-- > 0;) {
      refs.push_back(
          {&keys[round % 8 + i * shape.key_bytes()], &values[round % 8 + i * shape.value_bytes()]});
    }
    const RowsView rows = ScatteredRows(refs, shape);
    const auto copy = pool.Take(Ids(n), shape);
    ASSERT_TRUE(copy);
    for (size_t begin = 0; begin < n; begin += 64) {
      copy->Put(rows, begin, std::min<size_t>(64, n - begin));
    }
    EXPECT_EQ(copy->ids, Ids(n));
    const RowsView view = copy->view(shape);
    ASSERT_EQ(view.count, n);
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(std::memcmp(view.key(i), rows.key(i), shape.key_bytes()), 0) << i;
      ASSERT_EQ(std::memcmp(view.value(i), rows.value(i), shape.value_bytes()), 0) << i;
    }
  }
}

TEST(GatheredRows, MemoryIsUsedAgainWithinTheBound) {
  const RowShape shape{64, 64, DType::kBf16};
  constexpr uint64_t kRoom = 1 << 20;
  GatheredRowCache pool(kRoom);
  EXPECT_EQ(pool.Take({}, shape), nullptr);
  auto copy = pool.Take(Ids(1000), shape);
  ASSERT_TRUE(copy);
  const uint64_t used = pool.used();
  EXPECT_GE(used, 1000 * shape.bytes());
  EXPECT_LE(used, 1200 * shape.bytes());
  const std::byte* place = copy->bytes.data();
  copy.reset();
  EXPECT_EQ(pool.used(), used);
  copy = pool.Take(Ids(900), shape);
  ASSERT_TRUE(copy);
  EXPECT_EQ(copy->bytes.data(), place);
  EXPECT_EQ(pool.used(), used);
  EXPECT_EQ(pool.Take(Ids(4 * kRoom / shape.bytes()), shape), nullptr);
  // No other set gets memory that is in use.
  auto second = pool.Take(Ids(1000), shape), third = pool.Take(Ids(1000), shape);
  ASSERT_TRUE(second && third);
  EXPECT_NE(second->bytes.data(), place);
  EXPECT_EQ(pool.used(), 3 * used);
  EXPECT_EQ(pool.Take(Ids(1000), shape), nullptr);
  EXPECT_EQ(pool.used(), 3 * used);
  // Small sets leave large buffers to large sets, and large sets free the buffers of small ones.
  second.reset();
  third.reset();
  const auto small = pool.Take(Ids(10), shape);
  ASSERT_TRUE(small);
  EXPECT_GT(pool.used(), 3 * used);
  const auto large = pool.Take(Ids(2200), shape);
  ASSERT_TRUE(large);
  EXPECT_LE(pool.used(), kRoom);
}

TEST(GatheredRows, ManyThreadsTakeAndLeave) {
  const RowShape shape{16, 16, DType::kF32};
  GatheredRowCache pool(128 << 10);
  GatheredRowsSlot slot;
  std::vector<std::thread> threads;
  std::atomic<uint64_t> wrong{0}, seen{0};
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::vector<std::byte> row(shape.bytes(), std::byte(t + 1));
      for (int i = 0; i < 500; ++i) {
        const size_t n = 50 + (t * 37 + i * 11) % 300;
        if (auto copy = pool.Take(Ids(n), shape)) {
          copy->Put({row.data(), n, 0, shape}, 0, n);
          slot.Put(std::move(copy));
        }
        const auto got = slot.Get();
        if (!got) continue;
        ++seen;
        const auto bytes = got->bytes.span().first(got->ids.size() * shape.bytes());
        wrong += std::ranges::any_of(bytes, [&](std::byte b) { return b != bytes.front(); });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(seen, 1000u);
  EXPECT_LE(pool.used(), pool.capacity());
}

class GatheredRowsStepTest : public RuntimeTest {
 protected:
  // Runs a block of steps that share one set of each head, all with one query.
  std::vector<Output> Block(const SyntheticPrompt& prompt, uint32_t dilation, int steps,
                            uint32_t block = 64) {
    StepPolicy policy;
    policy.k = 40;
    policy.selector = "exact";
    policy.sharing = {block, 0.5, dilation, false};
    const auto session = Attach(prompt, policy);
    std::vector<Output> outputs;
    if (!session) return outputs;
    const auto q = prompt.Q(0, 500, 1);
    for (int t = 0; t < steps; ++t) outputs.push_back(Step(*session, 0, q));
    return outputs;
  }
};

// Steps find rows once, and read them side by side from then on, with the same bits. Without room
// for copies every step finds them, again with the same bits.
TEST_F(GatheredRowsStepTest, StepsThatShareFindRowsOnce) {
  for (const bool reclustered : {false, true}) {
    for (const uint32_t dilation : {0u, 2u}) {
      SCOPED_TRACE(std::to_string(reclustered) + " " + std::to_string(dilation));
      TempDir dir;
      options_.dir = dir.path() / "store";
      options_.recluster_min_tokens = reclustered ? 100 : 1 << 20;
      options_.gathered_rows_bytes = 64 << 20;
      Open();
      const auto prompt = MakePrompt(spec_.geometry, 1200, 3);
      ASSERT_NE(PutReady(prompt), "");
      ASSERT_OK(store_->WaitRewritten(nullptr));
      const auto with = Block(prompt, dilation, 6);
      ASSERT_EQ(with.size(), 6u);
      // Step 0 finds rows of the set that it retrieves, step 1 those of the set that it shares;
      // later steps read the copy.
      for (size_t t = 2; t < with.size(); ++t) {
        const Ledger& ledger = with[t].info.ledger;
        EXPECT_EQ(ledger.physical_bytes[kHost], 0u) << t;
        EXPECT_EQ(ledger.retrieved_tokens, with[1].info.ledger.retrieved_tokens);
        EXPECT_EQ(ledger.logical_bytes, with[1].info.ledger.logical_bytes);
        EXPECT_EQ(with[t].y, with[1].y);
        EXPECT_EQ(with[t].lse, with[1].lse);
      }
      EXPECT_GT(with[0].info.ledger.physical_bytes[kHost] +
                    with[0].info.ledger.physical_bytes[static_cast<size_t>(Tier::kSsd)],
                0u);
      options_.gathered_rows_bytes = 0;
      Open();
      const auto without = Block(prompt, dilation, 6);
      ExpectSame(with, without);
      for (size_t t = 2; t < without.size(); ++t) {
        EXPECT_GT(without[t].info.ledger.physical_bytes[kHost], 0u) << t;
      }
    }
  }
}

// Encoded rows are decoded once.
TEST_F(GatheredRowsStepTest, OfEncodedRowsTheCopyIsDecoded) {
  options_.encoding = "int8";
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 1200, 3);
  ASSERT_NE(PutReady(prompt), "");
  const auto outputs = Block(prompt, 1, 5);
  ASSERT_EQ(outputs.size(), 5u);
  for (size_t t = 2; t < outputs.size(); ++t) {
    EXPECT_EQ(outputs[t].info.ledger.physical_bytes[kHost], 0u) << t;
    EXPECT_EQ(outputs[t].y, outputs[1].y);
    EXPECT_EQ(outputs[t].lse, outputs[1].lse);
  }
}

// The next session reuses the memory of the last one; the last step of a block makes no copy.
TEST_F(GatheredRowsStepTest, MemoryStaysForTheNextSession) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 1200, 3);
  ASSERT_NE(PutReady(prompt), "");
  ASSERT_EQ(Block(prompt, 1, 5, 2).size(), 5u);
  EXPECT_EQ(store_->Stats().value().gathered_rows_bytes, 0u);
  ASSERT_EQ(Block(prompt, 1, 5).size(), 5u);
  const uint64_t left = store_->Stats().value().gathered_rows_bytes;
  EXPECT_GT(left, 0u);
  ASSERT_EQ(Block(prompt, 1, 5).size(), 5u);
  // The order of heads decides whether a set finds a buffer that is a page too small.
  EXPECT_LE(store_->Stats().value().gathered_rows_bytes, left + 8192);
  EXPECT_GE(store_->Stats().value().gathered_rows_capacity, left);
}

}  // namespace
}  // namespace prefixd::testing
