// An empty store and its model, on each I/O backend.
#pragma once

#include <memory>
#include <span>

#include "tests/storage/store_fixture.h"

namespace prefixd::storage {

class StoreTest : public ::testing::TestWithParam<IoBackend> {
 protected:
  void SetUp() override {
    options_ = TestOptions(dir_.path(), GetParam());
    auto opened = PrefixStore::Open(options_);
    if (GetParam() == IoBackend::kUring && !opened.ok() &&
        opened.error().code == Code::kUnavailable) {
      GTEST_SKIP() << opened.error().ToString();
    }
    ASSERT_OK(opened);
    store_ = std::move(*opened);
    ASSERT_OK(store_->PutModel(model_));
  }

  void Reopen() {
    store_.reset();
    auto opened = PrefixStore::Open(options_);
    ASSERT_OK(opened);
    store_ = std::move(*opened);
  }

  void ExpectPrefix(const SegmentId& id, std::span<const uint32_t> tokens) {
    auto prefix = store_->OpenPrefix(id, static_cast<uint32_t>(tokens.size()));
    ASSERT_OK(prefix);
    const auto difference = Compare(**prefix, tokens);
    ASSERT_OK(difference);
    EXPECT_EQ(*difference, "");
  }

  std::filesystem::path SegmentFileOf(const SegmentId& id) {
    return SegmentPath(options_.dir, id.bytes);
  }

  TempDir dir_;
  StoreOptions options_;
  ModelRecord model_ = TestModel();
  std::unique_ptr<PrefixStore> store_;
};

inline std::string BackendName(const ::testing::TestParamInfo<IoBackend>& param) {
  return param.param == IoBackend::kUring ? "uring" : "threads";
}

}  // namespace prefixd::storage
