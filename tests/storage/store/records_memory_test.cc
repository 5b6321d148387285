// Tests that what the store keeps of each stored prefix in memory is counted, by tenant, and bounds
// how many there may be.
#include <string>
#include <vector>

#include "base/memory_budget.h"
#include "storage/catalog/catalog.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {
namespace {

class RecordsMemoryTest : public OpenStoreTest {
 protected:
  void OpenWith(uint64_t capacity, double tenant_share) {
    store_.reset();
    memory_ = MemoryBudget::Create({.capacity = capacity, .tenant_share = tenant_share});
    options_.memory = memory_;
    options_.host_tier_bytes = 0;
    Open();
  }
  Result<SegmentId> PutOne(uint32_t i, const std::string& tenant) {
    return Put(*store_, model_, Iota(20, i * 100), tenant);
  }
  uint64_t records() const { return memory_->used(MemoryKind::kCatalog) - kCatalogMemoryBytes; }
  uint64_t Held(const std::string& tenant) const {
    for (const auto& t : memory_->tenants()) {
      if (t.tenant == tenant) return t.bytes;
    }
    return 0;
  }

  std::shared_ptr<MemoryBudget> memory_;
};

TEST_F(RecordsMemoryTest, EachPrefixIsCountedWhileItIsStored) {
  OpenWith(1ull << 30, 1);
  EXPECT_EQ(records(), 0u);
  const auto a = PutOne(1, "t");
  ASSERT_OK(a);
  const uint64_t one = records();
  EXPECT_GT(one, 500u);
  const auto longer = Put(*store_, model_, Join(Iota(20, 100), Iota(30, 7000)), "t");
  ASSERT_OK(longer);
  EXPECT_EQ(records(), 2 * one);
  ASSERT_OK(PutOne(2, "u"));
  EXPECT_EQ(records(), 3 * one);
  EXPECT_GE(Held("u"), one);
  ASSERT_OK(store_->Compact(*longer, 1000));
  EXPECT_LT(records(), 3 * one);  // two segments became one, with two names
  EXPECT_GT(records(), 2 * one);
  ASSERT_OK(store_->Remove(*a));
  ASSERT_OK(store_->Remove(*longer));
  EXPECT_EQ(records(), one);
}

TEST_F(RecordsMemoryTest, APutWithoutRoomForItsRecordIsRefused) {
  OpenWith(1ull << 30, 0.5);
  ASSERT_OK(PutOne(1, "t"));
  const uint64_t one = records();
  // The tenant's share, but for less than a record takes.
  const auto most =
      memory_->Of("t").Take(MemoryKind::kSessions, (512ull << 20) - Held("t") - one / 8);
  ASSERT_OK(most);
  const auto refused = PutOne(2, "t");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted);
  EXPECT_NE(refused.error().message.find("remove prefixes"), std::string::npos)
      << refused.error().message;
  EXPECT_EQ(store_->stats().segments, 1u);
  EXPECT_OK(PutOne(2, "u"));
}

// A store has what it has: with less memory it opens all the same, and prefixes can be removed.
TEST_F(RecordsMemoryTest, AStoreWithMoreThanThereIsRoomForOpens) {
  OpenWith(1ull << 30, 1);
  std::vector<SegmentId> ids;
  for (uint32_t i = 0; i < 40; ++i) {
    const auto id = PutOne(i, "t");
    ASSERT_OK(id);
    ids.push_back(*id);
  }
  const uint64_t all = records();
  OpenWith(kCatalogMemoryBytes + all / 2, 1);
  EXPECT_EQ(records(), all);
  EXPECT_EQ(store_->stats().segments, ids.size());
  EXPECT_CODE(PutOne(50, "t"), Code::kResourceExhausted);
  for (const SegmentId& id : ids) EXPECT_OK(store_->Remove(id));
  EXPECT_EQ(records(), 0u);
}

}  // namespace
}  // namespace prefixd::storage
