// The store as its users see it, on every I/O backend.
#include <fstream>
#include <thread>

#include "storage/segment_format.h"
#include "storage/store_core.h"
#include "tests/storage/store_backends.h"

namespace prefixd::storage {
namespace {

TEST_P(StoreTest, PutSurvivesReopenByteForByte) {
  const auto tokens = Iota(1000);
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  ExpectPrefix(*id, tokens);
  Reopen();
  EXPECT_EQ(store_->stats().recovered_orphans, 0u);
  const auto match = store_->LongestMatch("m", "t", tokens);
  ASSERT_OK(match);
  EXPECT_EQ(match->id, *id);
  EXPECT_EQ(match->n_tokens, 1000u);
  ExpectPrefix(*id, tokens);
  ExpectPrefix(*id, std::span(tokens).first(333));
  EXPECT_EQ(store_->ListModels().size(), 1u);
  const auto info = store_->GetPrefix(*id);
  ASSERT_OK(info);
  EXPECT_EQ(info->own_tokens, 1000u);
  EXPECT_EQ(info->label, "label");
  EXPECT_EQ(info->own_bytes, std::filesystem::file_size(SegmentFileOf(*id)));
}

TEST_P(StoreTest, GeometriesFromTinyRowsToRowsOfTwoPages) {
  struct Case {
    uint32_t layers, heads, dim;
    DType dtype;
  };
  int i = 0;
  for (const Case c :
       {Case{1, 1, 1, DType::kBf16}, Case{3, 2, 64, DType::kF16}, Case{2, 1, 400, DType::kF32},
        Case{1, 3, 1024, DType::kF32}, Case{2, 2, 129, DType::kBf16}}) {
    const ModelRecord model =
        TestModel("g" + std::to_string(i++), TestGeometry(c.layers, c.heads, c.dim, c.dtype));
    ASSERT_OK(store_->PutModel(model));
    const auto tokens = Iota(157, 5);
    const auto id = Put(*store_, model, tokens, "t", 10, i % 2 == 0);
    ASSERT_OK(id);
    ExpectPrefix(*id, tokens);
  }
}

TEST_P(StoreTest, RowsInAnyOrder) {
  std::mt19937_64 rng(Seed("StoreTest.RowsInAnyOrder"));
  const auto tokens = Iota(400);
  const auto states = States(tokens);
  auto writer = store_->BeginPut("m", "t", tokens, "");
  ASSERT_OK(writer);
  std::vector<std::array<uint32_t, 3>> calls;  // layer, first, n
  for (uint32_t l = 0; l < 2; ++l) {
    for (uint32_t t = 0; t < 400;) {
      const uint32_t n = std::min<uint32_t>(400 - t, 1 + rng() % 90);
      calls.push_back({l, t, n});
      t += n;
    }
  }
  std::shuffle(calls.begin(), calls.end(), rng);
  for (const auto& [l, t, n] : calls) {
    EXPECT_CODE((*writer)->Commit(), Code::kFailedPrecondition);  // incomplete, and still usable
    ASSERT_OK((*writer)->WriteRows(l, t, n, RowsOf(model_.geometry, states, l, t, n)));
    EXPECT_CODE((*writer)->WriteRows(l, t, n, RowsOf(model_.geometry, states, l, t, n)),
                Code::kInvalidArgument);
  }
  const auto id = (*writer)->Commit();
  ASSERT_OK(id);
  ExpectPrefix(*id, tokens);
  EXPECT_CODE((*writer)->Commit(), Code::kFailedPrecondition);
}

TEST_P(StoreTest, MissingRowsAreNamed) {
  const auto tokens = Iota(50);
  const auto states = States(tokens);
  auto writer = store_->BeginPut("m", "t", tokens, "");
  ASSERT_OK(writer);
  ASSERT_OK((*writer)->WriteRows(0, 0, 50, RowsOf(model_.geometry, states, 0, 0, 50)));
  ASSERT_OK((*writer)->WriteRows(1, 0, 20, RowsOf(model_.geometry, states, 1, 0, 20)));
  ASSERT_OK((*writer)->WriteRows(1, 21, 29, RowsOf(model_.geometry, states, 1, 21, 29)));
  const auto id = (*writer)->Commit();
  ASSERT_FALSE(id.ok());
  EXPECT_EQ(id.error().code, Code::kFailedPrecondition);
  EXPECT_NE(id.error().message.find("layer 1 lacks token 20"), std::string::npos)
      << id.error().message;
}

TEST_P(StoreTest, BadRequestsAreRefused) {
  const auto tokens = Iota(50);
  EXPECT_CODE(store_->BeginPut("nobody", "t", tokens, ""), Code::kNotFound);
  EXPECT_CODE(store_->BeginPut("m", "t", {}, ""), Code::kInvalidArgument);
  EXPECT_CODE(store_->LongestMatch("nobody", "t", tokens), Code::kNotFound);
  EXPECT_CODE(store_->OpenPrefix(SegmentId{}, 0), Code::kNotFound);
  EXPECT_CODE(store_->GetPrefix(SegmentId{}), Code::kNotFound);
  EXPECT_CODE(store_->Remove(SegmentId{}), Code::kNotFound);
  EXPECT_CODE(store_->GetModel("nobody"), Code::kNotFound);
  ModelRecord other = TestModel("other");
  other.name = "m";
  EXPECT_CODE(store_->PutModel(other), Code::kAlreadyExists);
  EXPECT_TRUE(store_->PutModel(model_).ok());
  auto writer = store_->BeginPut("m", "t", tokens, "");
  ASSERT_OK(writer);
  std::vector<std::byte> rows(2 * 50 * 80);
  EXPECT_CODE((*writer)->WriteRows(2, 0, 50, rows), Code::kInvalidArgument);
  EXPECT_CODE((*writer)->WriteRows(0, 1, 50, rows), Code::kInvalidArgument);
  EXPECT_CODE((*writer)->WriteRows(0, 0xffffffff, 2, rows), Code::kInvalidArgument);
  EXPECT_CODE((*writer)->WriteRows(0, 0, 49, rows), Code::kInvalidArgument);
  (*writer)->Abort();
  EXPECT_CODE((*writer)->WriteRows(0, 0, 50, rows), Code::kFailedPrecondition);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 0u);

  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  EXPECT_CODE(store_->OpenPrefix(*id, 51), Code::kInvalidArgument);
  const auto prefix = store_->OpenPrefix(*id, 40);
  ASSERT_OK(prefix);
  std::vector<std::byte> out(80);
  const std::vector<uint32_t> beyond{40}, descending{5, 4};
  EXPECT_CODE((*prefix)->ReadRows(0, 0, beyond, out, nullptr), Code::kInvalidArgument);
  EXPECT_CODE((*prefix)->ReadRange(0, 0, {40, 41}, out, nullptr), Code::kInvalidArgument);
  EXPECT_CODE((*prefix)->ReadRange(2, 0, {0, 1}, out, nullptr), Code::kInvalidArgument);
  EXPECT_CODE((*prefix)->ReadRange(0, 2, {0, 1}, out, nullptr), Code::kInvalidArgument);
  EXPECT_CODE((*prefix)->ReadRange(0, 0, {0, 2}, out, nullptr), Code::kInvalidArgument);
  out.resize(160);
  EXPECT_CODE((*prefix)->ReadRows(0, 0, descending, out, nullptr), Code::kInvalidArgument);
}

TEST_P(StoreTest, MatchIsDownToTheTokenAndBranchesShare) {
  const auto base = Iota(100);
  const auto root = Put(*store_, model_, base);
  ASSERT_OK(root);
  // Ends inside the parent, off any block boundary.
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

  // A third one shares 3 tokens of the branch, within the block where it branched off.
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

  // A continuation behind the end, and the end itself.
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

  // Prompts that begin alike, both put from nothing: each is whole.
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

TEST_P(StoreTest, AbortedAndForgottenPutsLeaveNothing) {
  const auto tokens = Iota(5000);
  {
    auto writer = store_->BeginPut("m", "t", tokens, "");
    ASSERT_OK(writer);
    ASSERT_OK(WriteAll(**writer, model_.geometry, tokens, 512, true));
    EXPECT_EQ(store_->LongestMatch("m", "t", tokens)->n_tokens, 0u);
  }
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 0u);
  EXPECT_EQ(store_->stats().puts_aborted, 1u);
  EXPECT_TRUE(store_->ListPrefixes().empty());
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
  ASSERT_OK(store_->Remove(*root));  // its name; the tokens stay for the longer one
  EXPECT_EQ(store_->ListPrefixes().size(), 1u);
  EXPECT_CODE(store_->Remove(*root), Code::kNotFound);
  Reopen();
  EXPECT_EQ(store_->ListPrefixes().size(), 1u);
  ExpectPrefix(*again, longer);
  ASSERT_OK(store_->Remove(*again));
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 0u);
  EXPECT_EQ(store_->LongestMatch("m", "t", longer)->n_tokens, 0u);
  EXPECT_EQ(store_->stats().bytes_on_disk, 0u);
  Reopen();
  EXPECT_TRUE(store_->ListPrefixes().empty());
}

TEST_P(StoreTest, BlobsAreReplacedVerifiedAndBoundToTheirProducer) {
  const auto id = Put(*store_, model_, Iota(64));
  ASSERT_OK(id);
  std::vector<std::byte> bytes(100'000);
  FillRow(1, 2, 3, bytes);
  ASSERT_OK(store_->PutBlob(*id, "moments.l0", "v1", bytes));
  EXPECT_EQ(*store_->GetBlob(*id, "moments.l0", "v1"), bytes);
  EXPECT_CODE(store_->GetBlob(*id, "moments.l0", "v2"), Code::kNotFound);
  EXPECT_CODE(store_->GetBlob(*id, "other", "v1"), Code::kNotFound);
  EXPECT_CODE(store_->PutBlob(*id, "../x", "v1", bytes), Code::kInvalidArgument);
  EXPECT_CODE(store_->PutBlob(SegmentId{}, "x", "v1", bytes), Code::kNotFound);
  const std::vector<std::byte> smaller(10, std::byte{7});
  ASSERT_OK(store_->PutBlob(*id, "moments.l0", "v2", smaller));
  ASSERT_OK(store_->PutBlob(*id, "empty", "", {}));
  Reopen();
  EXPECT_EQ(*store_->GetBlob(*id, "moments.l0", "v2"), smaller);
  EXPECT_TRUE(store_->GetBlob(*id, "empty", "")->empty());
  EXPECT_EQ(store_->ListBlobs(*id), (std::vector<std::string>{"empty", "moments.l0"}));
  const auto path = BlobPath(options_.dir, *id, "moments.l0");
  const auto size = std::filesystem::file_size(path);
  for (uint64_t i = 0; i < size; ++i) {
    FlipByte(path, i, static_cast<uint8_t>(1 << (i % 8)));
    const auto damaged = store_->GetBlob(*id, "moments.l0", "v2");
    ASSERT_FALSE(damaged.ok()) << i;
    EXPECT_EQ(CodeName(damaged.error().code), CodeName(Code::kCorrupt)) << i;
    EXPECT_FALSE(std::filesystem::exists(path));  // nobody will take it for good again
    ASSERT_OK(store_->PutBlob(*id, "moments.l0", "v2", smaller));
  }
  EXPECT_EQ(*store_->GetBlob(*id, "moments.l0", "v2"), smaller);
}

TEST_P(StoreTest, QuotaAndFullDiskRefusePutsAndKeepServing) {
  const auto tokens = Iota(400);
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  const uint64_t used = store_->stats().bytes_on_disk;
  options_.eviction = Eviction::kNever;
  options_.quota_bytes = used + 20'000;
  Reopen();
  EXPECT_CODE(Put(*store_, model_, Iota(400, 9000)), Code::kResourceExhausted);
  EXPECT_CODE(store_->PutBlob(*id, "b", "p", std::vector<std::byte>(30'000)),
              Code::kResourceExhausted);
  ExpectPrefix(*id, tokens);
  ASSERT_OK(store_->Remove(*id));
  ASSERT_OK(Put(*store_, model_, Iota(400, 9000)));
  // What an unfinished put has reserved counts, and comes back when it is dropped.
  options_.quota_bytes = 2 * used + 1000;
  Reopen();
  auto writer = store_->BeginPut("m", "t", tokens, "");
  ASSERT_OK(writer);
  EXPECT_CODE(store_->BeginPut("m", "t", Iota(400, 20000), ""), Code::kResourceExhausted);
  writer->reset();
  EXPECT_TRUE(store_->BeginPut("m", "t", Iota(400, 20000), "").ok());

  options_.quota_bytes = 0;
  options_.min_free_bytes = 1ull << 60;
  Reopen();
  EXPECT_CODE(store_->BeginPut("m", "t", tokens, ""), Code::kResourceExhausted);
  ExpectPrefix(store_->ListPrefixes().at(0).id, Iota(400, 9000));
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 1u);
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

TEST_P(StoreTest, ReadStatsSayWhatMoved) {
  const auto tokens = Iota(1000);
  const auto id = Put(*store_, model_, tokens);
  const auto prefix = store_->OpenPrefix(*id, 0);
  ASSERT_OK(prefix);
  const size_t row = model_.geometry.row().bytes();  // 80 bytes, 51 a page
  const std::vector<uint32_t> ids{0, 1, 50, 51, 500};
  std::vector<std::byte> out(ids.size() * row);
  ReadStats cold, warm;
  ASSERT_OK((*prefix)->ReadRows(0, 1, ids, out, &cold));
  EXPECT_EQ(cold.pages_ssd, 3u);
  EXPECT_EQ(cold.bytes[static_cast<size_t>(Tier::kSsd)], 3 * kPageBytes);
  EXPECT_EQ(cold.pages_host, 0u);
  ASSERT_OK((*prefix)->ReadRows(0, 1, ids, out, &warm));
  EXPECT_EQ(warm.pages_ssd, 0u);
  EXPECT_EQ(warm.pages_host, 3u);
  EXPECT_EQ(warm.bytes[static_cast<size_t>(Tier::kHost)], ids.size() * row);
  EXPECT_EQ(store_->stats().host_hits, 3u);
}

TEST_P(StoreTest, ConcurrentPutsReadsAndMatches) {
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t i = 0; i < 6; ++i) {
        // All threads share a beginning; half of the prompts are everybody's.
        const auto tokens =
            Join(Iota(100), Iota(150, i % 2 == 0 ? 1000 * i : 100'000 * (t + 1) + i));
        const auto id = Put(*store_, model_, tokens, "t", 64, t % 2 == 0);
        if (!id.ok()) {
          ++failures;
          continue;
        }
        const auto prefix = store_->OpenPrefix(*id, static_cast<uint32_t>(tokens.size()));
        const auto match = store_->LongestMatch("m", "t", tokens);
        if (!prefix.ok() || !match.ok() || match->n_tokens != tokens.size()) {
          ++failures;
          continue;
        }
        const auto difference = Compare(**prefix, tokens);
        failures += !difference.ok() || !difference->empty();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(failures, 0);
  EXPECT_TRUE(store_->Verify(nullptr, nullptr)->damaged.empty());
}

INSTANTIATE_TEST_SUITE_P(Backends, StoreTest,
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads), BackendName);

}  // namespace
}  // namespace prefixd::storage
