// Opens a store in a temporary directory: the start of most tests of storage/.
#pragma once

#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "storage/catalog/store_dir.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {

// Base: ::testing::Test, or ::testing::TestWithParam of something.
template <typename Base>
class OpenStore : public Base {
 protected:
  // Opens the store, or closes it and opens it anew, with the current options.
  void Open() {
    store_.reset();
    auto opened = PrefixStore::Open(options_);
    ASSERT_OK(opened);
    store_ = *std::move(opened);
    ASSERT_OK(store_->PutModel(model_));
  }

  SegmentId Stored(std::span<const uint32_t> tokens) {
    const auto id = Put(*store_, model_, tokens);
    EXPECT_TRUE(id.ok()) << id.error().ToString();
    return id.ok() ? *id : SegmentId{};
  }

  // Checks that the prefix begins with `tokens`, and has their rows.
  void ExpectPrefix(const SegmentId& id, std::span<const uint32_t> tokens) {
    ExpectRows(id, static_cast<uint32_t>(tokens.size()), tokens);
  }
  // Checks that the prefix is `tokens` and no more.
  void ExpectWhole(const SegmentId& id, std::span<const uint32_t> tokens) {
    ExpectRows(id, 0, tokens);
  }

  void ExpectSound() {
    const auto report = store_->Verify(nullptr, nullptr);
    ASSERT_OK(report);
    EXPECT_TRUE(report->damaged.empty());
  }

  std::filesystem::path FileOf(const SegmentId& id) const {
    return SegmentPath(options_.dir, id.bytes);
  }

  TempDir dir_;
  StoreOptions options_ = TestOptions(dir_.path());
  ModelRecord model_ = TestModel();
  std::unique_ptr<PrefixStore> store_;

 private:
  void ExpectRows(const SegmentId& id, uint32_t n_tokens, std::span<const uint32_t> tokens) {
    const auto prefix = store_->OpenPrefix(id, n_tokens);
    ASSERT_OK(prefix);
    ASSERT_EQ((*prefix)->n_tokens(), tokens.size());
    const auto difference = Compare(**prefix, tokens);
    ASSERT_OK(difference);
    ASSERT_EQ(*difference, "");
  }
};

using OpenStoreTest = OpenStore<::testing::Test>;

// Reclusters every chunk back to front.
inline ReclusterOptions Reversed(size_t row_bytes, uint32_t chunk_tokens = 32) {
  ReclusterOptions options;
  options.chunk_tokens = chunk_tokens;
  options.order = [row_bytes](uint32_t, uint32_t, uint32_t,
                              std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
    EXPECT_EQ(rows.size() % row_bytes, 0u);  // rows come as given, whatever their encoding
    std::vector<uint32_t> order(rows.size() / row_bytes);
    std::iota(order.rbegin(), order.rend(), 0);
    return order;
  };
  return options;
}

}  // namespace prefixd::storage
