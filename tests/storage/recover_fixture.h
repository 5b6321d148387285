// A store with something of every kind in it, which is to be there after its catalog was lost.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>

#include "storage/catalog.h"
#include "storage/recover.h"
#include "storage/store_dir.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {

namespace fs = std::filesystem;
using Tokens = std::vector<uint32_t>;

inline SettleOptions Reversed(size_t row_bytes) {
  SettleOptions options;
  options.chunk_tokens = 32;
  options.order = [row_bytes](uint32_t, uint32_t, uint32_t,
                              std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
    std::vector<uint32_t> order(rows.size() / row_bytes);
    std::iota(order.rbegin(), order.rend(), 0);
    return order;
  };
  return options;
}

class RecoverTest : public ::testing::Test {
 protected:
  void SetUp() override { Open(); }

  void Open() {
    store_.reset();
    auto store = PrefixStore::Open(options_);
    ASSERT_OK(store);
    store_ = std::move(*store);
    ASSERT_OK(store_->PutModel(model_));
  }

  SegmentId Stored(const Tokens& tokens) {
    const auto id = Put(*store_, model_, tokens);
    EXPECT_TRUE(id.ok()) << id.error().ToString();
    if (!id.ok()) return {};
    prompts_[*id] = tokens;
    return *id;
  }

  // Chains, branches, a settled segment, merged ones, a second tenant, blobs.
  void Fill() {
    const Tokens base = Iota(40), longer = Join(base, Iota(50, 1000));
    a_ = Stored(base);
    b_ = Stored(longer);
    c_ = Stored(Join(Iota(25), Iota(30, 2000)));
    const Tokens one = Iota(30, 5000), two = Join(one, Iota(20, 6000));
    d_ = Stored(one);
    e_ = Stored(two);
    ASSERT_OK(store_->Settle(a_, Reversed(row_bytes_)));
    merged_ = store_->Merge(e_, 1000).value();
    const auto other = Put(*store_, model_, Iota(60, 9000), "another tenant");
    ASSERT_OK(other);
    ASSERT_OK(store_->PutBlob(b_, "note", "maker", std::vector<std::byte>(100)));
  }

  void ExpectAll() {
    for (const auto& [id, tokens] : prompts_) {
      const auto prefix = store_->OpenPrefix(id, 0);
      ASSERT_OK(prefix);
      const auto compared = Compare(**prefix, tokens);
      ASSERT_OK(compared);
      EXPECT_EQ(*compared, "");
      EXPECT_EQ(store_->LongestMatch("m", "t", tokens)->n_tokens, tokens.size());
    }
    EXPECT_EQ(store_->ListPrefixes().size(), prompts_.size() + 1);
    EXPECT_EQ(store_->LongestMatch("m", "another tenant", Iota(60, 9000))->n_tokens, 60u);
    EXPECT_EQ(store_->LongestMatch("m", "t", Iota(60, 9000))->n_tokens, 0u);
    EXPECT_TRUE(store_->GetBlob(b_, "note", "maker").ok());
    EXPECT_TRUE(store_->Verify(nullptr, nullptr)->damaged.empty());
    EXPECT_TRUE(store_->GetPrefix(a_)->settled);
    EXPECT_EQ(store_->GetPrefix(d_)->chain, std::vector<SegmentId>{merged_});
  }

  RecoverReport Recovered(bool verify_data = false) {
    RecoverOptions options;
    options.dir = options_.dir;
    options.verify_data = verify_data;
    uint64_t last_done = 0, last_total = 0;
    const auto report =
        RecoverCatalog(options, [&](uint64_t done, uint64_t total, std::string_view) {
          EXPECT_GE(done, last_done);
          last_done = done;
          last_total = total;
          return true;
        });
    EXPECT_TRUE(report.ok()) << report.error().ToString();
    EXPECT_EQ(last_done, last_total);
    return report.ok() ? *report : RecoverReport{};
  }

  fs::path FileOf(const SegmentId& id) const { return SegmentPath(options_.dir, id.bytes); }
  fs::path catalog() const { return options_.dir / "catalog"; }

  TempDir dir_;
  StoreOptions options_ = TestOptions(dir_.path());
  ModelRecord model_ = TestModel();
  const size_t row_bytes_ = model_.geometry.row().bytes();
  std::unique_ptr<PrefixStore> store_;
  std::map<SegmentId, Tokens> prompts_;
  SegmentId a_, b_, c_, d_, e_, merged_;
};

}  // namespace prefixd::storage
