// Tests what open segment files keep in memory: tables, token ids and row orders.
#include <filesystem>
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

  // Stores `n` prompts of a tenant.
  std::vector<SegmentId> StoredFor(const std::string& tenant, uint32_t n) {
    std::vector<SegmentId> ids;
    for (uint32_t i = 0; i < n; ++i) {
      std::vector<uint32_t> tokens(20);
      std::iota(tokens.begin(), tokens.end(), i * 100);
      const auto id = Put(*store_, model_, tokens, tenant);
      EXPECT_TRUE(id.ok()) << id.error().ToString();
      if (id.ok()) ids.push_back(*id);
    }
    return ids;
  }
  static uint64_t OpenSegments() {
    uint64_t n = 0;
    for (const auto& fd : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;  // the listing's own
      n += std::filesystem::read_symlink(fd.path(), gone).extension() == ".seg";
    }
    return n;
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

// Sessions keep the files of their chains open: there are so many at most, whoever asks, and a
// tenant that has many leaves some to others.
TEST_F(OpenFilesTest, OpenPrefixesHaveABoundThatTenantsShare) {
  constexpr uint64_t kMost = 16;
  options_.max_open_files = kMost;
  Open();
  const auto greedy = StoredFor("greedy", 20), other = StoredFor("other", 3);
  Open();
  using Opened = std::shared_ptr<const StoredPrefix>;
  std::vector<Opened> held;
  Error refusal;
  for (const SegmentId& id : greedy) {
    auto opened = store_->OpenPrefix(id, 0);
    if (!opened.ok()) refusal = opened.error();
    if (opened.ok()) held.push_back(*std::move(opened));
  }
  EXPECT_EQ(held.size(), 12u);
  EXPECT_EQ(refusal.code, Code::kResourceExhausted);
  EXPECT_GT(refusal.retry_after_ms, 0u);
  EXPECT_NE(refusal.message.find("LimitNOFILE"), std::string::npos) << refusal.message;
  std::vector<Opened> others;
  for (const SegmentId& id : other) {
    auto opened = store_->OpenPrefix(id, 0);
    ASSERT_OK(opened);
    others.push_back(*std::move(opened));
  }
  EXPECT_EQ(OpenSegments(), held.size() + others.size());
  EXPECT_FALSE(store_->GetPrefix(greedy.back())->quarantined);
  // What is open is shared, and what is closed makes room.
  for (size_t i = 0; i < held.size(); ++i) EXPECT_OK(store_->OpenPrefix(greedy[i], 0));
  EXPECT_EQ(OpenSegments(), held.size() + others.size());
  held.clear();
  EXPECT_OK(store_->OpenPrefix(greedy.back(), 0));
}

// Files that only the cache has open give way.
TEST_F(OpenFilesTest, IdleFilesTakeNobodysPlace) {
  options_.max_open_files = 8;
  Open();
  const auto ids = StoredFor("one", 20), others = StoredFor("two", 20);
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < ids.size(); ++i) {
      EXPECT_OK(store_->OpenPrefix(ids[i], 0));
      EXPECT_OK(store_->OpenPrefix(others[i], 0));
    }
  }
}

}  // namespace
}  // namespace prefixd::storage
