// Tests segments that travel to a remote tier and back, and a tier that lies or fails.
#include "storage/store/remote_segment.h"

#include <algorithm>
#include <numeric>

#include "storage/remote/remote_memory.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

// A TestTier's objects can be spoiled, and it can stop answering.
class TestTier final : public MemoryRemoteTier {
 public:
  Status PutIfAbsent(std::string_view object, std::span<const std::byte> bytes) override {
    PREFIXD_TRY(Answer());
    return MemoryRemoteTier::PutIfAbsent(object, bytes);
  }
  Status Read(std::string_view object, std::span<const RemoteRange> ranges) const override {
    PREFIXD_TRY(Answer());
    return MemoryRemoteTier::Read(object, ranges);
  }
  void Flip(const std::string& object, uint64_t at) { objects_.at(object)[at] ^= std::byte{4}; }
  uint64_t Bytes(const std::string& object) { return objects_.at(object).size(); }

  mutable int answers = 1 << 30;  // left before it stops

 private:
  Status Answer() const {
    if (answers-- > 0) return {};
    return Error{Code::kUnavailable, "the tier does not answer"};
  }
};

class RemoteTest : public ::testing::Test {
 protected:
  std::unique_ptr<PrefixStore> Open(const char* name) {
    StoreOptions options = TestOptions(dir_.path());
    options.dir = dir_.path() / name;
    auto store = PrefixStore::Open(options);
    EXPECT_TRUE(store.ok()) << store.error().ToString();
    return std::move(*store);
  }

  static std::string Check(PrefixStore& store, const SegmentId& id,
                           const std::vector<uint32_t>& tokens) {
    const auto prefix = store.OpenPrefix(id, 0);
    if (!prefix.ok()) return prefix.error().ToString();
    const auto compared = Compare(**prefix, tokens);
    return compared.ok() ? *compared : compared.error().ToString();
  }

  void SetUp() override {
    home_ = Open("home");
    ASSERT_OK(home_->PutModel(model_));
    root_tokens_ = Iota(150);
    tokens_ = Join(root_tokens_, Iota(90, 7000));
    const auto root = Put(*home_, model_, root_tokens_), leaf = Put(*home_, model_, tokens_);
    ASSERT_OK(root);
    ASSERT_OK(leaf);
    root_ = *root;
    leaf_ = *leaf;
    ReclusterOptions recluster;
    recluster.chunk_tokens = 64;
    recluster.order = [this](uint32_t, uint32_t, uint32_t,
                             std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
      std::vector<uint32_t> order(rows.size() / model_.geometry.row(0).bytes());
      std::iota(order.rbegin(), order.rend(), 0);
      return order;
    };
    ASSERT_OK(home_->Recluster(root_, recluster));
  }

  TempDir dir_;
  ModelRecord model_ = TestModel();
  std::unique_ptr<PrefixStore> home_;
  TestTier tier_;
  std::vector<uint32_t> root_tokens_, tokens_;
  SegmentId root_, leaf_;
};

TEST_F(RemoteTest, AChainTravelsAndIsItselfThere) {
  uint64_t last = 0;
  ASSERT_OK(home_->Push(leaf_, tier_, [&](uint64_t done, uint64_t total, std::string_view) {
    EXPECT_LE(done, total);
    last = done;
    return true;
  }));
  EXPECT_GT(last, 0u);
  ASSERT_OK(home_->Push(leaf_, tier_, nullptr));  // nothing to do
  auto other = Open("other");
  ASSERT_OK(other->Pull(leaf_, tier_, nullptr));
  ASSERT_OK(other->Pull(leaf_, tier_, nullptr));
  for (const bool reopened : {false, true}) {
    if (reopened) {
      other.reset();
      other = Open("other");
    }
    EXPECT_EQ(Check(*other, leaf_, tokens_), "");
    EXPECT_EQ(Check(*other, root_, root_tokens_), "");
    EXPECT_TRUE(other->GetPrefix(root_)->reclustered);
    EXPECT_EQ(other->LongestMatch("m", "t", tokens_)->n_tokens, tokens_.size());
    EXPECT_TRUE(other->Verify(nullptr, nullptr)->damaged.empty());
  }
  const auto longer = Join(tokens_, Iota(40, 90'000));
  const auto more = Put(*other, model_, longer);
  ASSERT_OK(more);
  EXPECT_EQ(Check(*other, *more, longer), "");
  ASSERT_OK(DeleteRemote(tier_, leaf_));
  ASSERT_OK(DeleteRemote(tier_, root_));
  ASSERT_OK(DeleteRemote(tier_, root_));
  EXPECT_TRUE(tier_.List().empty());
}

TEST_F(RemoteTest, APushThatDiesHalfwayCanBeDoneAgain) {
  for (int answers = 0;; ++answers) {
    tier_.answers = answers;
    const Status pushed = home_->Push(leaf_, tier_, nullptr);
    tier_.answers = 1 << 30;
    if (pushed.ok()) break;
    ASSERT_EQ(pushed.error().code, Code::kUnavailable);
    auto other = Open("other");
    EXPECT_CODE(other->Pull(leaf_, tier_, nullptr), Code::kNotFound);
    EXPECT_TRUE(other->ListPrefixes().empty());
    ASSERT_LT(answers, 100);
  }
  auto other = Open("other");
  ASSERT_OK(other->Pull(leaf_, tier_, nullptr));
  EXPECT_EQ(Check(*other, leaf_, tokens_), "");
}

TEST_F(RemoteTest, APullThatDiesHalfwayLeavesWhatIsWhole) {
  ASSERT_OK(home_->Push(leaf_, tier_, nullptr));
  for (int answers = 0;; ++answers) {
    std::filesystem::remove_all(dir_.path() / "other");
    auto other = Open("other");
    tier_.answers = answers;
    const Status pulled = other->Pull(leaf_, tier_, nullptr);
    tier_.answers = 1 << 30;
    if (pulled.ok()) break;
    ASSERT_EQ(pulled.error().code, Code::kUnavailable);
    for (const PrefixInfo& info : other->ListPrefixes()) {
      EXPECT_EQ(Check(*other, info.id, info.id == root_ ? root_tokens_ : tokens_), "");
    }
    EXPECT_EQ(FilesIn(dir_.path() / "other" / "segments"), other->ListPrefixes().size());
    ASSERT_OK(other->Pull(leaf_, tier_, nullptr));
    EXPECT_EQ(Check(*other, leaf_, tokens_), "");
    ASSERT_LT(answers, 100);
  }
  auto stopped = Open("stopped");
  EXPECT_CODE(
      stopped->Pull(leaf_, tier_, [](uint64_t, uint64_t, std::string_view) { return false; }),
      Code::kCancelled);
  EXPECT_EQ(FilesIn(dir_.path() / "stopped" / "segments"), 0u);
}

TEST_F(RemoteTest, WhatATierSpoilsIsNeverServed) {
  std::mt19937_64 rng(Seed("RemoteTest.WhatATierSpoilsIsNeverServed"));
  ASSERT_OK(home_->Push(leaf_, tier_, nullptr));
  auto other = Open("other");
  const auto objects = tier_.List();
  for (int i = 0; i < 400; ++i) {
    const std::string& object = objects[rng() % objects.size()];
    const uint64_t at = rng() % tier_.Bytes(object);
    tier_.Flip(object, at);
    const Status pulled = other->Pull(leaf_, tier_, nullptr);
    // A flip in the root shows again after the leaf's: everything stored by then is whole.
    if (pulled.ok()) {
      EXPECT_EQ(Check(*other, leaf_, tokens_), "") << object << " at " << at;
    } else {
      EXPECT_EQ(CodeName(pulled.error().code), CodeName(Code::kCorrupt)) << object;
    }
    for (const SegmentId& id : {leaf_, root_}) {
      if (!other->GetPrefix(id).ok()) continue;
      EXPECT_EQ(Check(*other, id, id == root_ ? root_tokens_ : tokens_), "");
      ASSERT_OK(other->Remove(id));
    }
    tier_.Flip(object, at);
  }
  ASSERT_OK(other->Pull(leaf_, tier_, nullptr));
  EXPECT_EQ(Check(*other, leaf_, tokens_), "");
}

TEST_F(RemoteTest, SinglePagesAreReadAndVerified) {
  ASSERT_OK(home_->Push(root_, tier_, nullptr));
  const auto segment = RemoteSegment::Open(tier_, root_);
  ASSERT_OK(segment);
  EXPECT_EQ(segment->tokens(), root_tokens_);
  std::vector<std::byte> page(kPageBytes);
  for (uint64_t p = 1; p < segment->layout().token_page; ++p) {
    ASSERT_OK(segment->ReadPages(tier_, p, 1, page));
  }
  const auto objects = tier_.List();
  const auto part = std::find_if(objects.begin(), objects.end(),
                                 [](const std::string& name) { return name.ends_with("/0"); });
  tier_.Flip(*part, 2 * kPageBytes + 17);
  EXPECT_CODE(segment->ReadPages(tier_, 3, 1, page), Code::kCorrupt);
  ASSERT_OK(segment->ReadPages(tier_, 4, 1, page));
}

}  // namespace
}  // namespace prefixd::storage
