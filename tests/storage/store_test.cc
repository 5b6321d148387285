// The store as its users see it, on every I/O backend.
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "storage/segment_format.h"
#include "storage/store_core.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

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

TEST_P(StoreTest, DataPageFlipsGiveCorruptNeverWrongBytes) {
  std::mt19937_64 rng(Seed("StoreTest.DataPageFlips"));
  options_.host_tier_bytes = 0;
  Reopen();
  const auto tokens = Iota(300);
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  const auto path = SegmentFileOf(*id);
  const SegmentLayout layout =
      *SegmentLayout::Of({2, 2, static_cast<uint32_t>(model_.geometry.row().key_bytes()),
                          static_cast<uint32_t>(model_.geometry.row().value_bytes()), 300, 0, 0});
  for (int i = 0; i < 40; ++i) {
    const uint64_t page = 1 + rng() % (layout.token_page - 1);
    const uint64_t offset = page * kPageBytes + rng() % kPageBytes;
    {
      const auto prefix = store_->OpenPrefix(*id, 0);
      ASSERT_OK(prefix);
      FlipByte(path, offset, static_cast<uint8_t>(1 << (rng() % 8)));
      const auto compared = Compare(**prefix, tokens);
      ASSERT_FALSE(compared.ok()) << "page " << page << ": " << *compared;
      EXPECT_EQ(compared.error().code, Code::kCorrupt);
    }
    // Quarantined: a miss for matching, an error for opening, and so after a restart.
    EXPECT_EQ(store_->LongestMatch("m", "t", tokens)->n_tokens, 0u);
    EXPECT_CODE(store_->OpenPrefix(*id, 0), Code::kCorrupt);
    EXPECT_TRUE(store_->GetPrefix(*id)->quarantined);
    if (i == 0) {
      Reopen();
      EXPECT_CODE(store_->OpenPrefix(*id, 0), Code::kCorrupt);
    }
    const auto report = store_->Verify(&*id, nullptr);
    ASSERT_OK(report);
    EXPECT_EQ(report->damaged.size(), 1u);
    // Restored bytes verify again, and verification says so.
    std::vector<std::byte> back;
    {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      char c = 0;
      file.seekg(static_cast<std::streamoff>(offset));
      file.get(c);
      const uint64_t in_page = offset % kPageBytes;
      const uint32_t row = static_cast<uint32_t>(model_.geometry.row().bytes());
      const uint64_t run = (page - 1) / layout.pages_per_run;
      const uint64_t token =
          (page - 1) % layout.pages_per_run * layout.row.per_page + in_page / row;
      std::vector<std::byte> expected(row);
      char right = 0;  // padding is zero
      if (in_page / row < layout.row.per_page && token < 300) {
        FillRow(States(tokens)[token], static_cast<uint32_t>(run / 2),
                static_cast<uint32_t>(run % 2), expected);
        right = static_cast<char>(expected[in_page % row]);
      }
      EXPECT_NE(c, right);
      file.seekp(static_cast<std::streamoff>(offset));
      file.put(right);
    }
    const auto clean = store_->Verify(&*id, nullptr);
    ASSERT_OK(clean);
    EXPECT_TRUE(clean->damaged.empty());
    ExpectPrefix(*id, tokens);
  }
  EXPECT_GT(store_->stats().checksum_failures, 0u);
}

TEST_P(StoreTest, EveryHeaderAndFooterByteFlipIsFoundAtOpen) {
  const auto tokens = Iota(40);
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  const auto path = SegmentFileOf(*id);
  const uint64_t bytes = std::filesystem::file_size(path);
  const SegmentRecord record = [&] {
    auto core = StoreCore::Open(options_, nullptr);
    EXPECT_FALSE(core.ok());  // locked by store_
    store_.reset();
    core = StoreCore::Open(options_, nullptr);
    return (*core)->tree.Records().at(0);
  }();
  auto engine = NewThreadEngine({});
  ASSERT_TRUE(SegmentFile::Open(*engine, path, record, false).ok());
  // Header, token ids, manifest, table and footer: all that Open reads, and what Verify adds.
  // Every bit of both ends is segment_format_test's; here every third byte, through a real file.
  for (uint64_t at = 0; at < bytes; at += 3) {
    const bool data = at >= kPageBytes && at < kPageBytes * 5;  // rows: read on demand
    const bool manifest = at >= bytes - 3 * kPageBytes && at < bytes - 2 * kPageBytes;
    const bool table_padding =
        at >= bytes - 2 * kPageBytes + (bytes / kPageBytes - 2) * 8 && at < bytes - kPageBytes;
    if (data || manifest || table_padding) continue;
    FlipByte(path, at, static_cast<uint8_t>(1 << (at % 8)));
    const auto opened = SegmentFile::Open(*engine, path, record, false);
    ASSERT_FALSE(opened.ok()) << "byte " << at;
    FlipByte(path, at, static_cast<uint8_t>(1 << (at % 8)));
  }
  ASSERT_TRUE(SegmentFile::Open(*engine, path, record, false).ok());
}

TEST_P(StoreTest, SwappedZeroedAndStalePagesAreCaught) {
  options_.host_tier_bytes = 0;
  Reopen();
  const auto tokens = Iota(300);
  const auto id = Put(*store_, model_, tokens), other = Put(*store_, model_, Iota(300, 7000));
  ASSERT_OK(id);
  ASSERT_OK(other);
  const auto copy_page = [&](const std::filesystem::path& from, uint64_t a, uint64_t b) {
    std::vector<char> page(kPageBytes);
    std::ifstream in(from, std::ios::binary);
    in.seekg(static_cast<std::streamoff>(a * kPageBytes));
    in.read(page.data(), kPageBytes);
    std::fstream out(SegmentFileOf(*id), std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(static_cast<std::streamoff>(b * kPageBytes));
    out.write(page.data(), kPageBytes);
  };
  const auto keep = dir_.path() / "keep";
  std::filesystem::copy_file(SegmentFileOf(*id), keep);
  const auto zeros = dir_.path() / "zeros";
  std::ofstream(zeros) << std::string(2 * kPageBytes, '\0');
  struct Case {
    std::filesystem::path from;
    uint64_t a, b;
  };
  for (const Case& c : {Case{keep, 2, 3}, Case{zeros, 0, 2}, Case{SegmentFileOf(*other), 2, 2}}) {
    const auto prefix = store_->OpenPrefix(*id, 0);
    ASSERT_OK(prefix);
    copy_page(c.from, c.a, c.b);
    EXPECT_CODE(Compare(**prefix, tokens), Code::kCorrupt);
    copy_page(keep, c.b, c.b);
    EXPECT_TRUE(store_->Verify(nullptr, nullptr)->damaged.empty());
  }
}

TEST_P(StoreTest, ADamagedSegmentCostsItsDescendantsAndNobodyElse) {
  const auto base = Iota(64), longer = Join(base, Iota(64, 500)), apart = Iota(64, 4000);
  const auto root = Put(*store_, model_, base), leaf = Put(*store_, model_, longer),
             sound = Put(*store_, model_, apart);
  ASSERT_OK(leaf);
  store_.reset();
  std::filesystem::remove(SegmentFileOf(*root));
  Reopen();
  EXPECT_CODE(store_->OpenPrefix(*root, 0), Code::kCorrupt);
  EXPECT_CODE(store_->OpenPrefix(*leaf, 0), Code::kCorrupt);
  EXPECT_EQ(store_->LongestMatch("m", "t", longer)->n_tokens, 0u);
  ExpectPrefix(*sound, apart);
  // The prompt can be stored anew beside the ruins, and the ruins removed.
  const auto anew = Put(*store_, model_, longer);
  ASSERT_OK(anew);
  ExpectPrefix(*anew, longer);
  ASSERT_OK(store_->Remove(*leaf));
  ASSERT_OK(store_->Remove(*root));
  ExpectPrefix(*anew, longer);
  Reopen();
  ExpectPrefix(*anew, longer);
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

TEST_P(StoreTest, RecoveryFreesWhatNobodyKnows) {
  const auto id = Put(*store_, model_, Iota(64));
  ASSERT_OK(id);
  ASSERT_OK(store_->PutBlob(*id, "b", "p", std::vector<std::byte>(10)));
  store_.reset();
  const auto segments = options_.dir / "segments";
  const std::string ghost = "00112233445566778899aabbccddeeff";
  std::ofstream(segments / (ghost + ".seg")) << "half";
  std::ofstream(segments / (ghost + ".b.blob")) << "half";
  std::ofstream(segments / (id->ToString() + ".b.blob.3.tmp")) << "half";
  std::ofstream(segments / "README") << "a stranger's file";
  Reopen();
  EXPECT_EQ(store_->stats().recovered_orphans, 3u);
  EXPECT_EQ(FilesIn(segments), 3u);
  ExpectPrefix(*id, Iota(64));
  EXPECT_EQ(store_->GetBlob(*id, "b", "p")->size(), 10u);
}

TEST_P(StoreTest, ALostCatalogIsNotTakenForAnEmptyStore) {
  const auto id = Put(*store_, model_, Iota(64));
  ASSERT_OK(id);
  store_.reset();
  std::filesystem::rename(options_.dir / "catalog", options_.dir / "elsewhere");
  EXPECT_CODE(PrefixStore::Open(options_), Code::kCorrupt);
  std::filesystem::remove_all(options_.dir / "catalog");
  std::filesystem::rename(options_.dir / "elsewhere", options_.dir / "catalog");
  Reopen();
  ExpectPrefix(*id, Iota(64));
}

// A torn record at the end of the log, or rot anywhere in it: what RocksDB drops with it is made
// again from the segments.
TEST_P(StoreTest, ADamagedCommitLogLosesNothing) {
  const auto id = Put(*store_, model_, Iota(64));
  const auto longer = Put(*store_, model_, Iota(130));
  const auto other = Put(*store_, model_, Iota(40, 5000), "other tenant");
  const auto removed = Put(*store_, model_, Iota(50, 9000));
  ASSERT_OK(other);
  ASSERT_OK(removed);
  ASSERT_TRUE(store_->Remove(*removed).ok());
  store_.reset();
  const std::filesystem::path sound = options_.dir;
  std::string log;
  for (const auto& entry : std::filesystem::directory_iterator(sound / "catalog")) {
    if (entry.path().extension() == ".log") log = entry.path().filename().string();
  }
  const uint64_t bytes = std::filesystem::file_size(sound / "catalog" / log);
  for (uint64_t at = 10; at < bytes; at += bytes / 12) {
    options_.dir = dir_.path() / ("rot" + std::to_string(at));
    std::filesystem::copy(sound, options_.dir, std::filesystem::copy_options::recursive);
    FlipByte(options_.dir / "catalog" / log, at);
    Reopen();
    ExpectPrefix(*id, Iota(64));
    ExpectPrefix(*longer, Iota(130));
    ExpectPrefix(*other, Iota(40, 5000));
    EXPECT_EQ(store_->LongestMatch("m", "t", Iota(130))->n_tokens, 130u);
    EXPECT_EQ(store_->LongestMatch("m", "other tenant", Iota(40, 5000))->n_tokens, 40u);
    EXPECT_EQ(store_->LongestMatch("m", "t", Iota(50, 9000))->n_tokens, 0u);
    ASSERT_OK(Put(*store_, model_, Iota(77, 20'000)));
    Reopen();
    EXPECT_EQ(store_->stats().recovered_orphans, 0u);
    ExpectPrefix(*longer, Iota(130));
    store_.reset();
  }
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

TEST_P(StoreTest, ASecondOpenerIsToldTheOwnersPid) {
  const auto second = PrefixStore::Open(options_);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code, Code::kFailedPrecondition);
  EXPECT_NE(second.error().message.find(std::to_string(::getpid())), std::string::npos)
      << second.error().message;
}

TEST_P(StoreTest, ANewerStoreIsRefusedUnchanged) {
  ASSERT_OK(Put(*store_, model_, Iota(64)));
  store_.reset();
  const auto path = options_.dir / "STORE";
  std::string text;
  {
    std::ifstream in(path);
    text.assign(std::istreambuf_iterator<char>(in), {});
  }
  std::string newer = text;
  newer.replace(newer.find("format 2"), 8, "format 9");
  std::ofstream(path) << newer;
  const auto catalog_time = std::filesystem::last_write_time(options_.dir / "catalog");
  EXPECT_CODE(PrefixStore::Open(options_), Code::kFailedPrecondition);
  EXPECT_EQ(std::filesystem::last_write_time(options_.dir / "catalog"), catalog_time);
  std::ofstream(path) << text;
  Reopen();
  EXPECT_EQ(store_->ListPrefixes().size(), 1u);
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

TEST_P(StoreTest, VerifyCountsAndCanBeStopped) {
  ASSERT_OK(Put(*store_, model_, Iota(3000)));
  ASSERT_OK(Put(*store_, model_, Iota(3000, 10000)));
  uint64_t last = 0, total = 0;
  const auto report = store_->Verify(nullptr, [&](uint64_t done, uint64_t of, std::string_view) {
    EXPECT_GE(done, last);
    last = done;
    total = of;
    return true;
  });
  ASSERT_OK(report);
  EXPECT_EQ(report->segments, 2u);
  EXPECT_EQ(last, total);
  EXPECT_EQ(report->bytes, store_->stats().bytes_on_disk);
  EXPECT_CODE(store_->Verify(nullptr, [](uint64_t, uint64_t, std::string_view) { return false; }),
              Code::kCancelled);
  const SegmentId unknown{};
  EXPECT_CODE(store_->Verify(&unknown, nullptr), Code::kNotFound);
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
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads),
                         [](const auto& param) {
                           return param.param == IoBackend::kUring ? "uring" : "threads";
                         });

}  // namespace
}  // namespace prefixd::storage
