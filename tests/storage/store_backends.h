// Provides an empty store and its model, on each I/O backend.
#pragma once

#include <memory>
#include <span>

#include "tests/storage/open_store.h"

namespace prefixd::storage {

class StoreTest : public OpenStore<::testing::TestWithParam<IoBackend>> {
 protected:
  void SetUp() override {
    options_.io = GetParam();
    auto opened = PrefixStore::Open(options_);
    if (GetParam() == IoBackend::kUring && !opened.ok() &&
        opened.error().code == Code::kUnavailable) {
      GTEST_SKIP() << opened.error().ToString();
    }
    ASSERT_OK(opened);
    store_ = std::move(*opened);
    ASSERT_OK(store_->PutModel(model_));
  }
};

inline std::string BackendName(const ::testing::TestParamInfo<IoBackend>& param) {
  return param.param == IoBackend::kUring ? "uring" : "threads";
}

}  // namespace prefixd::storage
