// Tests which prompts find and share stored rows of others, and what remains when one is removed;
// on every I/O backend.
#include "tests/storage/store_backends.h"

namespace prefixd::storage {
namespace {

TEST_P(StoreTest, MatchIsDownToTheTokenAndBranchesShare) {
  const auto base = Iota(100);
  const auto root = Put(*store_, model_, base);
  ASSERT_OK(root);
  // The branch begins inside the parent, off any block boundary.
  const auto branch = Join(std::span(base).first(41), Iota(60, 5000));
  auto match = store_->LongestMatch("m", "t", branch);
  ASSERT_OK(match);
  EXPECT_EQ(match->n_tokens, 41u);
  EXPECT_EQ(match->stored_tokens, 100u);
  const auto branch_id = Put(*store_, model_, branch);
  ASSERT_OK(branch_id);
  const auto info = *store_->GetPrefix(*branch_id);
  EXPECT_EQ(info.own_tokens, 60u);
  EXPECT_EQ(info.n_tokens, 101u);
  EXPECT_EQ(info.chain, (std::vector<SegmentId>{*root, *branch_id}));
  EXPECT_EQ(store_->GetPrefix(*root)->children, 1u);
  ExpectPrefix(*branch_id, branch);
  ExpectPrefix(*branch_id, std::span(branch).first(20));  // cut within the parent

  // A third prompt shares 3 tokens of the branch, within the block where it branched off.
  const auto third = Join(std::span(branch).first(44), Iota(10, 9000));
  match = store_->LongestMatch("m", "t", third);
  ASSERT_OK(match);
  EXPECT_EQ(match->id, *branch_id);
  EXPECT_EQ(match->n_tokens, 44u);
  const auto third_id = Put(*store_, model_, third);
  ASSERT_OK(third_id);
  EXPECT_EQ(store_->GetPrefix(*third_id)->chain,
            (std::vector<SegmentId>{*root, *branch_id, *third_id}));
  ExpectPrefix(*third_id, third);

  // One prompt continues behind the end, the other is the end itself.
  const auto longer = Join(base, Iota(3, 100));
  const auto longer_id = Put(*store_, model_, longer);
  ASSERT_OK(longer_id);
  match = store_->LongestMatch("m", "t", Join(longer, Iota(5, 77)));
  EXPECT_EQ(match->id, *longer_id);
  EXPECT_EQ(match->n_tokens, 103u);
  match = store_->LongestMatch("m", "t", base);
  EXPECT_EQ(match->n_tokens, 100u);
  EXPECT_EQ(match->id, *root);

  EXPECT_EQ(store_->LongestMatch("m", "t", Iota(50, 1))->n_tokens, 0u);
  EXPECT_EQ(store_->LongestMatch("m", "t", Join(Iota(3), Iota(9, 500)))->n_tokens, 3u);
  EXPECT_EQ(store_->LongestMatch("m", "t", {})->n_tokens, 0u);
}

TEST_P(StoreTest, TenantsAndModelsNeverMeet) {
  const auto tokens = Iota(64);
  ASSERT_OK(store_->PutModel(TestModel("other")));
  const auto id = Put(*store_, model_, tokens, "alice");
  ASSERT_OK(id);
  EXPECT_EQ(store_->LongestMatch("m", "alice", tokens)->n_tokens, 64u);
  EXPECT_EQ(store_->LongestMatch("m", "bob", tokens)->n_tokens, 0u);
  EXPECT_EQ(store_->LongestMatch("m", "", tokens)->n_tokens, 0u);
  EXPECT_EQ(store_->LongestMatch("other", "alice", tokens)->n_tokens, 0u);
  EXPECT_EQ(store_->LongestMatch("m", "bob", Iota(3))->n_tokens, 0u);
  const auto bobs = Put(*store_, model_, tokens, "bob");
  ASSERT_OK(bobs);
  EXPECT_NE(*bobs, *id);
}

TEST_P(StoreTest, WhatIsStoredIsNotWrittenAgain) {
  const auto tokens = Iota(200);
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  const uint64_t before = store_->stats().bytes_written;
  const auto again = Put(*store_, model_, tokens);
  ASSERT_OK(again);
  EXPECT_EQ(*again, *id);
  const auto shorter = Put(*store_, model_, std::span(tokens).first(77));
  ASSERT_OK(shorter);
  EXPECT_EQ(*shorter, *id);
  auto writer = store_->BeginPut("m", "t", tokens, "");
  ASSERT_OK(writer);
  EXPECT_EQ((*writer)->range().size(), 0u);
  EXPECT_EQ(store_->stats().bytes_written, before);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 1u);
}

TEST_P(StoreTest, OfTwoConcurrentPutsOfOnePromptOneRemains) {
  const auto tokens = Iota(300);
  auto a = store_->BeginPut("m", "t", tokens, "a"), b = store_->BeginPut("m", "t", tokens, "b");
  ASSERT_OK(a);
  ASSERT_OK(b);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 2u);
  ASSERT_OK(WriteAll(**a, model_.geometry, tokens, 100, true));
  ASSERT_OK(WriteAll(**b, model_.geometry, tokens, 64, false));
  const auto first = (*b)->Commit(), second = (*a)->Commit();
  ASSERT_OK(first);
  ASSERT_OK(second);
  EXPECT_EQ(*first, *second);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 1u);
  ExpectPrefix(*first, tokens);

  // Both prompts begin alike and are put before either is stored: each is whole.
  const auto c = Join(Iota(150, 9000), Iota(50)), d = Join(Iota(150, 9000), Iota(50, 60));
  auto wc = store_->BeginPut("m", "t", c, ""), wd = store_->BeginPut("m", "t", d, "");
  ASSERT_OK(WriteAll(**wc, model_.geometry, c, 100, true));
  ASSERT_OK(WriteAll(**wd, model_.geometry, d, 100, true));
  const auto ic = (*wc)->Commit(), id = (*wd)->Commit();
  ASSERT_OK(ic);
  ASSERT_OK(id);
  EXPECT_EQ(store_->LongestMatch("m", "t", c)->id, *ic);
  EXPECT_EQ(store_->LongestMatch("m", "t", d)->id, *id);
  ExpectPrefix(*ic, c);
  ExpectPrefix(*id, d);
}

TEST_P(StoreTest, RemovalWaitsForReadersAndKeepsWhatOthersContinue) {
  const auto base = Iota(64);
  const auto longer = Join(base, Iota(64, 1000));
  const auto root = Put(*store_, model_, base), leaf = Put(*store_, model_, longer);
  ASSERT_OK(root);
  ASSERT_OK(leaf);
  const std::vector<std::byte> blob(100);
  ASSERT_OK(store_->PutBlob(*leaf, "summary", "p", blob));
  {
    const auto open = store_->OpenPrefix(*leaf, 0);
    ASSERT_OK(open);
    EXPECT_CODE(store_->Remove(*leaf), Code::kFailedPrecondition);
  }
  {
    auto writer = store_->BeginPut("m", "t", Join(longer, base), "");
    ASSERT_OK(writer);
    EXPECT_CODE(store_->Remove(*leaf), Code::kFailedPrecondition);
  }
  ASSERT_OK(store_->Remove(*leaf));
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 1u);
  EXPECT_EQ(store_->LongestMatch("m", "t", longer)->n_tokens, 64u);
  const auto again = Put(*store_, model_, longer);
  ASSERT_OK(again);
  ASSERT_OK(store_->Remove(*root));  // removes its name; the tokens stay for the longer one
  EXPECT_EQ(store_->ListPrefixes().size(), 1u);
  EXPECT_CODE(store_->Remove(*root), Code::kNotFound);
  Open();
  EXPECT_EQ(store_->ListPrefixes().size(), 1u);
  ExpectPrefix(*again, longer);
  ASSERT_OK(store_->Remove(*again));
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 0u);
  EXPECT_EQ(store_->LongestMatch("m", "t", longer)->n_tokens, 0u);
  EXPECT_EQ(store_->stats().bytes_on_disk, 0u);
  Open();
  EXPECT_TRUE(store_->ListPrefixes().empty());
}

TEST_P(StoreTest, AFewCommonTokensDoNotChainPrompts) {
  const std::vector<uint32_t> bos = {256};
  const auto first = Put(*store_, model_, Join(bos, Iota(100)));
  const auto second = Put(*store_, model_, Join(bos, Iota(100, 7000)));
  ASSERT_OK(first);
  ASSERT_OK(second);
  EXPECT_EQ(store_->GetPrefix(*second)->chain.size(), 1u);
  EXPECT_TRUE(store_->Remove(*first).ok());
  ExpectPrefix(*second, Join(bos, Iota(100, 7000)));
}

}  // namespace
}  // namespace prefixd::storage
