// Tests what open segment files keep in memory: tables, token ids and row orders.
#include <numeric>
#include <vector>

#include "base/memory_budget.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {
namespace {

class OpenFilesTest : public OpenStoreTest {
 protected:
  static constexpr uint32_t kTokens = 2000, kFiles = 24;
  // Row orders both ways, and token ids; tables come on top.
  static constexpr uint64_t kFileBytes = kTokens * (4 * 4 + 4);

  // Stores reclustered segments, opens the store anew and reads all of them.
  void StoreAndRead(uint64_t tables_bytes) {
    memory_ = MemoryBudget::Create({.capacity = 1ull << 30});
    options_.memory = memory_;
    options_.tables_bytes = tables_bytes;
    options_.host_tier_bytes = 0;
    Open();
    for (uint32_t i = 0; i < kFiles; ++i) {
      std::vector<uint32_t> tokens(kTokens);
      std::iota(tokens.begin(), tokens.end(), i * kTokens);
      ids_.push_back(Stored(tokens));
      prompts_.push_back(std::move(tokens));
      ASSERT_OK(store_->Recluster(ids_.back(), Backwards()));
    }
    Open();
    for (uint32_t i = 0; i < kFiles; ++i) ExpectWhole(ids_[i], prompts_[i]);
  }

  ReclusterOptions Backwards() const {
    ReclusterOptions options;
    options.chunk_tokens = 512;
    options.order = [row = model_.geometry.row(0).bytes()](
                        uint32_t, uint32_t, uint32_t, auto rows) -> Result<std::vector<uint32_t>> {
      std::vector<uint32_t> order(rows.size() / row);
      std::iota(order.rbegin(), order.rend(), 0u);
      return order;
    };
    return options;
  }

  uint64_t tables() const { return memory_->used(MemoryKind::kTables); }

  std::shared_ptr<MemoryBudget> memory_;
  std::vector<SegmentId> ids_;
  std::vector<std::vector<uint32_t>> prompts_;
};

TEST_F(OpenFilesTest, TheCacheIsBoundedByItsBytes) {
  constexpr uint64_t kBound = 5 * kFileBytes;
  StoreAndRead(kBound);
  EXPECT_LE(tables(), kBound + 2 * kFileBytes);  // the last one grew behind the last look
  EXPECT_GE(tables(), kFileBytes);
  for (uint32_t i = 0; i < kFiles; ++i) ExpectWhole(ids_[i], prompts_[i]);
}

TEST_F(OpenFilesTest, EveryFileCountsAndIdleOnesGoWhenMemoryIsShort) {
  StoreAndRead(1ull << 30);
  EXPECT_GE(tables(), kFiles * kFileBytes);
  const auto open = store_->OpenPrefix(ids_[0], 0);
  ASSERT_OK(open);
  const uint64_t rest = memory_->capacity() - memory_->used();
  const auto most = memory_->Shared().Take(MemoryKind::kMessages, rest + (kFiles - 2) * kFileBytes);
  ASSERT_OK(most);
  EXPECT_LT(tables(), 3 * kFileBytes);
  EXPECT_EQ(*Compare(**open, prompts_[0]), "");  // its file is in use, and stays
  const auto refused = store_->OpenPrefix(ids_[1], 0);
  if (!refused.ok()) {
    EXPECT_CODE(refused, Code::kResourceExhausted);
    EXPECT_GT(refused.error().retry_after_ms, 0u);
  }
  EXPECT_FALSE(store_->GetPrefix(ids_[1])->quarantined);
}

}  // namespace
}  // namespace prefixd::storage
