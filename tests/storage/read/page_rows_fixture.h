// Provides a stored prefix of one head whose rows fill one page each, read through an engine that
// counts, holds and spoils operations as a test sets it.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "storage/store/open_store.h"
#include "tests/storage/io/faulty_engine.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {

class PageRowsTest : public ::testing::Test {
 protected:
  explicit PageRowsTest(uint32_t n_tokens) : tokens_(Iota(n_tokens)) {}

  // Opens the store, or closes it and opens it anew, with the current options. The first call puts
  // the prefix.
  void Open() {
    prefix_.reset();
    store_.reset();
    auto opened = OpenStoreWithEngine(options_, [this](std::unique_ptr<IoEngine> inner) {
      auto engine = std::make_unique<FaultyEngine>(std::move(inner), plan_);
      engine_ = engine.get();
      return engine;
    });
    ASSERT_OK(opened);
    store_ = std::move(*opened);
    ASSERT_OK(store_->PutModel(model_));
    if (id_ == SegmentId{}) {
      const auto id = Put(*store_, model_, tokens_);
      ASSERT_OK(id);
      id_ = *id;
    }
    auto prefix = store_->OpenPrefix(id_, 0);
    ASSERT_OK(prefix);
    prefix_ = *prefix;
  }

  uint64_t ssd_pages() const { return stats_.bytes[static_cast<size_t>(Tier::kSsd)] / kPageBytes; }

  TempDir dir_;
  StoreOptions options_ = TestOptions(dir_.path());
  ModelRecord model_ = TestModel("m", TestGeometry(1, 1, 512, DType::kF32));
  const std::vector<uint32_t> tokens_;  // token t lies in page 1 + t
  const std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  FaultyEngine* engine_ = nullptr;  // owned by the store
  SegmentId id_;
  std::unique_ptr<PrefixStore> store_;
  std::shared_ptr<const StoredPrefix> prefix_;
  ReadStats stats_;
};

}  // namespace prefixd::storage
