// Provides a store with something of every kind in it; all of it must be there after its catalog
// was lost.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "storage/catalog/catalog.h"
#include "storage/catalog/store_dir.h"
#include "storage/recover/recover.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {

namespace fs = std::filesystem;
using Tokens = std::vector<uint32_t>;

class RecoverTest : public OpenStoreTest {
 protected:
  void SetUp() override { Open(); }

  SegmentId Stored(const Tokens& tokens) {
    const SegmentId id = OpenStoreTest::Stored(tokens);
    prompts_[id] = tokens;
    return id;
  }

  // Fills the store: chains, branches, a reclustered segment, compacted ones, a second tenant,
  // blobs.
  void Fill() {
    const Tokens base = Iota(40), longer = Join(base, Iota(50, 1000));
    a_ = Stored(base);
    b_ = Stored(longer);
    c_ = Stored(Join(Iota(25), Iota(30, 2000)));
    const Tokens one = Iota(30, 5000), two = Join(one, Iota(20, 6000));
    d_ = Stored(one);
    e_ = Stored(two);
    ASSERT_OK(store_->Recluster(a_, Reversed(row_bytes_)));
    compacted_ = store_->Compact(e_, 1000).value();
    const auto other = Put(*store_, model_, Iota(60, 9000), "another tenant");
    ASSERT_OK(other);
    ASSERT_OK(store_->PutBlob(b_, "note", "maker", std::vector<std::byte>(100)));
  }

  void ExpectAll() {
    for (const auto& [id, tokens] : prompts_) {
      ExpectWhole(id, tokens);
      EXPECT_EQ(store_->LongestMatch("m", "t", tokens)->n_tokens, tokens.size());
    }
    EXPECT_EQ(store_->ListPrefixes().size(), prompts_.size() + 1);
    EXPECT_EQ(store_->LongestMatch("m", "another tenant", Iota(60, 9000))->n_tokens, 60u);
    EXPECT_EQ(store_->LongestMatch("m", "t", Iota(60, 9000))->n_tokens, 0u);
    EXPECT_TRUE(store_->GetBlob(b_, "note", "maker").ok());
    EXPECT_TRUE(store_->Verify(nullptr, nullptr)->damaged.empty());
    EXPECT_TRUE(store_->GetPrefix(a_)->reclustered);
    EXPECT_EQ(store_->GetPrefix(d_)->chain, std::vector<SegmentId>{compacted_});
  }

  RecoverReport Recovered(bool verify_data = false) {
    RecoverOptions options;
    options.dir = options_.dir;
    options.verify_data = verify_data;
    options.encryption_key_file = options_.encryption_key_file;
    uint64_t last_done = 0, last_total = 0;
    units_.clear();
    const auto report =
        RecoverCatalog(options, [&](uint64_t done, uint64_t total, std::string_view unit) {
          if (units_.empty() || units_.back() != unit) {
            EXPECT_EQ(last_done, last_total);
            last_done = 0;
            units_.emplace_back(unit);
          }
          EXPECT_GE(done, last_done);
          last_done = done;
          last_total = total;
          return true;
        });
    EXPECT_TRUE(report.ok()) << report.error().ToString();
    EXPECT_EQ(last_done, last_total);
    return report.ok() ? *report : RecoverReport{};
  }

  fs::path catalog() const { return options_.dir / "catalog"; }

  const size_t row_bytes_ = model_.geometry.row(0).bytes();
  std::vector<std::string> units_;  // of the last recovery's progress, one after the other
  std::map<SegmentId, Tokens> prompts_;
  SegmentId a_, b_, c_, d_, e_, compacted_;
};

}  // namespace prefixd::storage
