// Holds one read of the disk and checks that nothing waits for it but the call that needs it; that
// a match reads token ids and no more; and that blobs which cannot be read now are neither lost nor
// taken for damaged.
#include <future>

#include "base/call_scope.h"
#include "storage/catalog/store_dir.h"
#include "storage/store/open_store.h"
#include "tests/storage/io/faulty_engine.h"
#include "tests/storage/store_fixture.h"
#include "tests/support/ends.h"

namespace prefixd::storage {
namespace {

using prefixd::testing::Ends;

class StoreWaitsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    options_ = TestOptions(dir_.path());
    plan_->reads_only = true;
    Open();
  }

  void Open() {
    store_.reset();
    auto opened = OpenStoreWithEngine(options_, [this](std::unique_ptr<IoEngine> inner) {
      auto engine = std::make_unique<FaultyEngine>(std::move(inner), plan_);
      engine_ = engine.get();
      return engine;
    });
    ASSERT_OK(opened);
    store_ = *std::move(opened);
    ASSERT_OK(store_->PutModel(model_));
  }

  bool EndsWhileHeld(const std::function<void()>& call) {
    return Ends(call, [this] { engine_->Release(); });
  }

  std::filesystem::path Blob(const SegmentId& id, std::string_view name) const {
    return BlobPath(options_.dir, id, name);
  }

  TempDir dir_;
  StoreOptions options_;
  ModelRecord model_ = TestModel();
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  FaultyEngine* engine_ = nullptr;  // owned by the store
  std::unique_ptr<PrefixStore> store_;
};

TEST_F(StoreWaitsTest, ACommitSearchesWithoutHoldingUpOthers) {
  const auto removed = Put(*store_, model_, Iota(64, 5000));
  ASSERT_OK(removed);
  const auto tokens = Iota(150);
  auto first = store_->BeginPut(model_.name, "t", tokens, "");
  auto second = store_->BeginPut(model_.name, "t", tokens, "");
  ASSERT_OK(first);
  ASSERT_OK(second);
  ASSERT_OK(WriteAll(**first, model_.geometry, tokens, 50, true));
  ASSERT_OK(WriteAll(**second, model_.geometry, tokens, 50, true));
  const auto id = (*first)->Commit();
  ASSERT_OK(id);
  plan_->Arm(Fault::kHang, 1, false);  // the second commit compares the ids of the first
  auto committed = std::async(std::launch::async, [&] { return (*second)->Commit(); });
  plan_->AwaitInjected();
  EXPECT_TRUE(EndsWhileHeld([&] {
    ASSERT_OK(store_->SetLifetime(*removed, {.pinned = true, .expires_unix_ms = {}}));
    ASSERT_OK(store_->Remove(*removed));
    ASSERT_OK(Put(*store_, model_, Iota(64, 9000)));
    EXPECT_EQ(store_->stats().segments, 2u);
  }));
  engine_->Release();
  const auto same = committed.get();
  ASSERT_OK(same);
  EXPECT_EQ(*same, *id);  // equal prompts found each other
  EXPECT_EQ(store_->stats().segments, 2u);
}

// The search of a commit does not see what others commit meanwhile, and goes again.
TEST_F(StoreWaitsTest, ACommitFindsWhatWasCommittedDuringItsSearch) {
  // Less than a block in common: the search reads the other prompt's ids, and continues neither.
  std::vector<uint32_t> tokens = Iota(5);
  for (const uint32_t token : Iota(150, 9000)) tokens.push_back(token);
  auto first = store_->BeginPut(model_.name, "t", tokens, "");
  auto second = store_->BeginPut(model_.name, "t", tokens, "");
  ASSERT_OK(first);
  ASSERT_OK(second);
  ASSERT_OK(WriteAll(**first, model_.geometry, tokens, 50, true));
  ASSERT_OK(WriteAll(**second, model_.geometry, tokens, 50, true));
  ASSERT_OK(Put(*store_, model_, Iota(64)));
  plan_->Arm(Fault::kHang, 1, false);
  auto committed = std::async(std::launch::async, [&] { return (*second)->Commit(); });
  plan_->AwaitInjected();
  const auto id = (*first)->Commit();
  engine_->Release();
  ASSERT_OK(id);
  const auto same = committed.get();
  ASSERT_OK(same);
  EXPECT_EQ(*same, *id);
  EXPECT_EQ(store_->stats().segments, 2u);
}

TEST_F(StoreWaitsTest, ADamagedBlobIsReadWithoutHoldingUpOthers) {
  const auto id = Put(*store_, model_, Iota(64));
  ASSERT_OK(id);
  const std::vector<std::byte> bytes(5000, std::byte{7}), newer(100, std::byte{8});
  // It is read, read again, and twice more before it is deleted.
  for (const auto& at : {std::pair(3u, true), {4u, true}, {4u, false}, {3u, false}}) {
    SCOPED_TRACE(at.first);
    const bool replaced = at.second;
    ASSERT_OK(store_->PutBlob(*id, "b", "p", bytes));
    FlipByte(Blob(*id, "b"), 300, 1);
    plan_->Arm(Fault::kHang, at.first, false);
    auto read = std::async(std::launch::async, [&] { return store_->GetBlob(*id, "b", "p"); });
    plan_->AwaitInjected();
    EXPECT_TRUE(EndsWhileHeld([&] {
      EXPECT_GT(store_->stats().bytes_on_disk, 0u);
      EXPECT_EQ(store_->ListBlobs(*id), std::vector<std::string>{"b"});
      if (replaced) ASSERT_OK(store_->PutBlob(*id, "b", "p", newer));
    }));
    engine_->Release();
    EXPECT_CODE(read.get(), Code::kCorrupt);
    // What replaced the damaged blob meanwhile stays.
    const auto now = store_->GetBlob(*id, "b", "p");
    if (replaced) {
      ASSERT_OK(now);
      EXPECT_EQ(*now, newer);
    } else {
      EXPECT_CODE(now, Code::kNotFound);
      EXPECT_TRUE(store_->ListBlobs(*id).empty());
    }
  }
}

TEST_F(StoreWaitsTest, AMatchOfAColdPrefixReadsItsIdsAlone) {
  model_ = TestModel("wide", TestGeometry(8, 4, 64));
  Open();
  const auto tokens = Iota(2000);
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  const uint64_t pages = std::filesystem::file_size(SegmentPath(options_.dir, id->bytes)) / 4096;
  const uint64_t table_pages = (pages * 8 + 4095) / 4096;
  ASSERT_GT(table_pages, 4u);
  Open();
  plan_->Arm(Fault::kEio, UINT64_MAX, false);  // counts operations
  const auto match = store_->LongestMatch(model_.name, "t", tokens);
  ASSERT_OK(match);
  EXPECT_EQ(match->n_tokens, 2000u);
  // Header, footer, two pages of ids and the page of the table that covers them.
  EXPECT_EQ(plan_->bytes, 5u * 4096);
  plan_->Disarm();
  // Opening it for reading brings the table.
  plan_->Arm(Fault::kEio, UINT64_MAX, false);
  const auto prefix = store_->OpenPrefix(*id, 0);
  ASSERT_OK(prefix);
  EXPECT_EQ(plan_->bytes, table_pages * 4096);
  const auto difference = Compare(**prefix, tokens);
  ASSERT_OK(difference);
  EXPECT_EQ(*difference, "");
}

TEST_F(StoreWaitsTest, DamageToTheTableIsFoundWhenRowsAreNeeded) {
  model_ = TestModel("wide", TestGeometry(8, 4, 64));
  Open();
  const auto tokens = Iota(2000);
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  store_.reset();
  const auto path = SegmentPath(options_.dir, id->bytes);
  const uint64_t pages = std::filesystem::file_size(path) / 4096;
  const uint64_t table = pages - 1 - (pages * 8 + 4095) / 4096;
  FlipByte(path, table * 4096 + 80, 1);  // the entry of a page of rows
  Open();
  const auto match = store_->LongestMatch(model_.name, "t", tokens);
  ASSERT_OK(match);
  EXPECT_EQ(match->n_tokens, 2000u);
  EXPECT_CODE(store_->OpenPrefix(*id, 0), Code::kCorrupt);
  EXPECT_EQ(store_->LongestMatch(model_.name, "t", tokens)->n_tokens, 0u);  // quarantined
  // The scrub's reading finds the same, and lifts nothing.
  const auto report = store_->Verify(nullptr, nullptr);
  ASSERT_OK(report);
  EXPECT_EQ(report->damaged.size(), 1u);
}

TEST_F(StoreWaitsTest, ABlobThatCannotBeReadNowIsReadAgainAndKept) {
  const auto id = Put(*store_, model_, Iota(64));
  ASSERT_OK(id);
  const std::vector<std::byte> bytes(5000, std::byte{7});
  ASSERT_OK(store_->PutBlob(*id, "b", "p", bytes));
  for (const Fault fault : {Fault::kEio, Fault::kShort, Fault::kEintr}) {
    plan_->Arm(fault, 1, false);
    const auto again = store_->GetBlob(*id, "b", "p");
    ASSERT_OK(again);
    EXPECT_EQ(*again, bytes);
    EXPECT_EQ(plan_->injected, 1u);
    plan_->Arm(fault, 1, true);
    EXPECT_CODE(store_->GetBlob(*id, "b", "p"), Code::kIo);
    EXPECT_LE(plan_->injected, 5u);
    plan_->Disarm();
    ASSERT_OK(store_->GetBlob(*id, "b", "p"));
  }
  EXPECT_EQ(store_->stats().checksum_failures, 0u);
}

TEST_F(StoreWaitsTest, AVerificationThatIsCancelledAtABlobFindsNoDamage) {
  const auto id = Put(*store_, model_, Iota(64));
  ASSERT_OK(id);
  ASSERT_OK(store_->PutBlob(*id, "b", "p", std::vector<std::byte>(5000, std::byte{7})));
  plan_->Arm(Fault::kEio, UINT64_MAX, false);  // counts operations
  ASSERT_OK(store_->Verify(&*id, nullptr));
  plan_->Arm(Fault::kHang, plan_->counted, false);  // the last one is the blob's
  CallCanceller canceller;
  auto verified = std::async(std::launch::async, [&] {
    const CallScope scope(CallLimits::Of(0, &canceller));
    return store_->Verify(&*id, nullptr);
  });
  plan_->AwaitInjected();
  canceller.Cancel();
  EXPECT_TRUE(EndsWhileHeld([&] { EXPECT_CODE(verified.get(), Code::kCancelled); }));
}

TEST_F(StoreWaitsTest, APromptOnABadSectorIsAMissAndIsStoredAnew) {
  const auto tokens = Iota(150);
  const auto old = Put(*store_, model_, tokens);
  ASSERT_OK(old);
  Open();
  plan_->bad_sector = 100;  // in the header
  const auto miss = store_->LongestMatch(model_.name, "t", tokens);
  ASSERT_OK(miss);
  EXPECT_EQ(miss->n_tokens, 0u);
  const auto anew = Put(*store_, model_, tokens);
  ASSERT_OK(anew);
  EXPECT_NE(*anew, *old);
  plan_->bad_sector = -1;
  EXPECT_EQ(store_->LongestMatch(model_.name, "t", tokens)->n_tokens, tokens.size());
}

TEST_F(StoreWaitsTest, ARemovalWaitsForWhoHoldsItForAMoment) {
  const auto id = Put(*store_, model_, Iota(150));
  ASSERT_OK(id);
  // Of a few tries one goes by without a pause of this thread that is longer than the wait.
  Status removed = Error{Code::kInternal, "no try"};
  for (int i = 0; i < 5 && !removed.ok(); ++i) {
    auto open = store_->OpenPrefix(*id, 0);
    ASSERT_OK(open);
    EXPECT_CODE(store_->Remove(*id), Code::kFailedPrecondition);  // as long as it stays
    std::promise<void> begun;
    auto removal = std::async(std::launch::async, [&] {
      begun.set_value();
      return store_->Remove(*id);
    });
    begun.get_future().wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    open->reset();
    removed = removal.get();
  }
  EXPECT_OK(removed);
}

}  // namespace
}  // namespace prefixd::storage
