// Tests the store as its users see it, on every I/O backend.
#include <fstream>
#include <thread>

#include "storage/segment/segment_format.h"
#include "tests/storage/store_backends.h"

namespace prefixd::storage {
namespace {

TEST_P(StoreTest, PutSurvivesReopenByteForByte) {
  const auto tokens = Iota(1000);
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  ExpectPrefix(*id, tokens);
  Open();
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
  EXPECT_EQ(info->own_bytes, std::filesystem::file_size(FileOf(*id)));
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
  Open();
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
    EXPECT_FALSE(std::filesystem::exists(path));  // no reader can take it for sound again
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
  Open();
  EXPECT_CODE(Put(*store_, model_, Iota(400, 9000)), Code::kResourceExhausted);
  EXPECT_CODE(store_->PutBlob(*id, "b", "p", std::vector<std::byte>(30'000)),
              Code::kResourceExhausted);
  ExpectPrefix(*id, tokens);
  ASSERT_OK(store_->Remove(*id));
  ASSERT_OK(Put(*store_, model_, Iota(400, 9000)));
  // Reserved bytes of an unfinished put count, and come back when it is dropped.
  options_.quota_bytes = 2 * used + 1000;
  Open();
  auto writer = store_->BeginPut("m", "t", tokens, "");
  ASSERT_OK(writer);
  EXPECT_CODE(store_->BeginPut("m", "t", Iota(400, 20000), ""), Code::kResourceExhausted);
  writer->reset();
  EXPECT_TRUE(store_->BeginPut("m", "t", Iota(400, 20000), "").ok());

  options_.quota_bytes = 0;
  options_.min_free_bytes = 1ull << 60;
  Open();
  EXPECT_CODE(store_->BeginPut("m", "t", tokens, ""), Code::kResourceExhausted);
  ExpectPrefix(store_->ListPrefixes().at(0).id, Iota(400, 9000));
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 1u);
}

TEST_P(StoreTest, ReadStatsSayWhatMoved) {
  const auto tokens = Iota(1000);
  const auto id = Put(*store_, model_, tokens);
  const auto prefix = store_->OpenPrefix(*id, 0);
  ASSERT_OK(prefix);
  const size_t row = model_.geometry.row(0).bytes();  // 80 bytes, 51 a page
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
        // All threads share a beginning, and half of the prompts.
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
