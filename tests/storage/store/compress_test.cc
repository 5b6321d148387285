// Tests compressed segments: some rows are left, and what needs the others is refused.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "storage/io/crash_point.h"
#include "storage/recover/recover.h"
#include "storage/remote/remote_memory.h"
#include "storage/segment/prefix_info.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {
namespace {

constexpr uint32_t kKept = 60;
constexpr Acceptance kAny{.compressed = true};

std::string crash_at;  // NOLINT(runtime/string)
void DieThere(const char* name) {
  if (crash_at == name) _exit(42);
}

class CompressTest : public OpenStoreTest {
 protected:
  CompressTest() { Open(); }

  // Every head keeps the first and last tokens, and some of its own in between.
  static std::vector<uint32_t> KeptBy(uint32_t layer, uint32_t head, TokenRange own) {
    std::vector<uint32_t> kept;
    const uint32_t ends = 10, middle = kKept - 2 * ends;
    for (uint32_t i = 0; i < ends; ++i) kept.push_back(own.begin + i);
    for (uint32_t i = 0; i < middle; ++i) {
      kept.push_back(own.begin + ends + i * 2 + (layer + head + i / 9) % 2);
    }
    for (uint32_t i = 0; i < ends; ++i) kept.push_back(own.end - ends + i);
    return kept;
  }

  CompressOptions Options(TokenRange own) {
    CompressOptions options;
    options.kept_rows = kKept;
    options.kept = [own](uint32_t layer, uint32_t head) -> Result<std::vector<uint32_t>> {
      return KeptBy(layer, head, own);
    };
    return options;
  }

  // Checks that exactly the kept rows of the last segment, and all before it, are read.
  void ExpectKept(const SegmentId& id, std::span<const uint32_t> tokens, TokenRange own) {
    const auto opened = store_->OpenPrefix(id, 0);
    ASSERT_OK(opened);
    const StoredPrefix& prefix = **opened;
    ASSERT_TRUE(prefix.compressed());
    const RowFn fill = RowsFrom(States(tokens));
    const RowShape row = model_.geometry.row(0);
    std::vector<std::byte> expected(row.bytes());
    for (uint32_t l = 0; l < model_.geometry.n_layers; ++l) {
      for (uint32_t h = 0; h < model_.geometry.n_kv_heads; ++h) {
        const auto kept = prefix.KeptTokens(l, h);
        ASSERT_OK(kept);
        ASSERT_EQ(*kept, KeptBy(l, h, own));
        std::vector<uint32_t> ids(own.begin);
        std::iota(ids.begin(), ids.end(), 0);
        ids.insert(ids.end(), kept->begin(), kept->end());
        std::vector<std::byte> rows(ids.size() * row.bytes());
        ASSERT_OK(prefix.ReadRows(l, h, ids, rows, nullptr));
        RowViews views;
        ASSERT_OK(prefix.ViewRows(l, h, ids, RowPart::kRow, views, nullptr));
        for (size_t i = 0; i < ids.size(); ++i) {
          fill(ids[i], l, h, expected);
          ASSERT_EQ(std::memcmp(rows.data() + i * row.bytes(), expected.data(), row.bytes()), 0);
          ASSERT_EQ(std::memcmp(views.rows[i].key, expected.data(), row.key_bytes()), 0);
          ASSERT_EQ(std::memcmp(views.rows[i].value, expected.data() + row.key_bytes(),
                                row.value_bytes()),
                    0);
        }
        views.hold.reset();
        // The last tokens lie together, and those that went are refused.
        ASSERT_OK(prefix.ReadRange(l, h, {own.end - 10, own.end},
                                   std::span(rows).first(10 * row.bytes()), nullptr));
        fill(own.end - 1, l, h, expected);
        ASSERT_EQ(std::memcmp(rows.data() + 9 * row.bytes(), expected.data(), row.bytes()), 0);
        std::vector<std::byte> all(tokens.size() * row.bytes());
        EXPECT_CODE(prefix.ReadRange(l, h, {0, own.end}, all, nullptr), Code::kFailedPrecondition);
        const uint32_t gone = own.begin + 10 + 1 - (l + h) % 2;
        EXPECT_CODE(prefix.ReadRows(l, h, {&gone, 1}, all, nullptr), Code::kFailedPrecondition);
        EXPECT_CODE(prefix.VisitRows(
                        l, h, views, [](auto) { return Status(); }, nullptr),
                    Code::kFailedPrecondition);
      }
    }
  }
};

TEST_F(CompressTest, KeptRowsReadTheSameAndOthersAreRefused) {
  for (const bool reclustered : {false, true}) {
    const auto base = Iota(40, reclustered * 10'000), tokens = Join(base, Iota(200, 50'000));
    Stored(base);
    const SegmentId id = Stored(tokens);
    if (reclustered) {
      ASSERT_OK(store_->Recluster(id, Reversed(model_.geometry.row(0).bytes())));
    }
    const uint64_t before = store_->GetPrefix(id)->file_bytes;
    const auto sizes = store_->SizesOf(id, kKept);
    ASSERT_OK(sizes);
    ASSERT_OK(store_->Compress(id, Options({40, 240})));
    const auto info = store_->GetPrefix(id);
    EXPECT_EQ(info->kept_rows, kKept);
    EXPECT_EQ(info->file_bytes, sizes->compressed);
    EXPECT_LT(info->file_bytes, before);
    EXPECT_GE(info->full_bytes, info->file_bytes);
    EXPECT_FALSE(info->reclustered);
    for (const bool reopened : {false, true}) {
      if (reopened) Open();
      EXPECT_EQ(store_->GetPrefix(id)->kept_rows, kKept);
      EXPECT_EQ(store_->GetPrefix(id)->full_bytes, info->full_bytes);
      ExpectKept(id, tokens, {40, 240});
      ExpectSound();
      ExpectPrefix(id, base);  // what it continues is there
      EXPECT_CODE(store_->OpenPrefix(id, 239), Code::kFailedPrecondition);
    }
    EXPECT_CODE(store_->Compress(id, Options({40, 240})), Code::kFailedPrecondition);
    EXPECT_CODE(store_->Recluster(id, Reversed(model_.geometry.row(0).bytes())),
                Code::kFailedPrecondition);
    EXPECT_CODE(store_->Compact(id, 1000), Code::kFailedPrecondition);
    MemoryRemoteTier remote;
    EXPECT_CODE(store_->Push(id, remote, nullptr), Code::kFailedPrecondition);
  }
}

TEST_F(CompressTest, MatchesPreferWhatIsWhole) {
  const auto base = Iota(64), tokens = Join(base, Iota(200, 5000));
  Stored(base);
  const SegmentId id = Stored(tokens);
  ASSERT_OK(store_->Compress(id, Options({64, 264})));
  EXPECT_EQ(store_->LongestMatch("m", "t", tokens)->n_tokens, 64u);
  const auto match = store_->LongestMatch("m", "t", Join(tokens, Iota(9, 7000)), kAny);
  EXPECT_EQ(match->n_tokens, 264u);
  EXPECT_TRUE(match->compressed);
  // A part of it would end among rows that are gone.
  EXPECT_EQ(store_->LongestMatch("m", "t", std::span(tokens).first(200), kAny)->n_tokens, 64u);
  // A put of the same tokens stores them anew, and serves from then on; so does a longer one.
  const SegmentId whole = Stored(tokens);
  EXPECT_NE(whole, id);
  ExpectWhole(whole, tokens);
  for (const Acceptance& accept : {Acceptance{}, kAny}) {
    EXPECT_EQ(store_->LongestMatch("m", "t", tokens, accept)->id, whole);
  }
  const auto longer = Join(tokens, Iota(30, 9000));
  ExpectWhole(Stored(longer), longer);
  ASSERT_OK(store_->Remove(id));
  ExpectSound();
}

TEST_F(CompressTest, WhatOthersNeedIsLeftAlone) {
  const auto base = Iota(200), longer = Join(base, Iota(50, 5000));
  const SegmentId a = Stored(base), b = Stored(longer);
  EXPECT_CODE(store_->Compress(a, Options({0, 200})), Code::kFailedPrecondition);  // continued
  EXPECT_CODE(store_->CheckCompressible(a), Code::kFailedPrecondition);
  ASSERT_OK(store_->Compact(b, 1000));
  EXPECT_CODE(store_->Compress(b, Options({0, 250})), Code::kFailedPrecondition);  // `a` ends in it
  ASSERT_OK(store_->Remove(a));
  {
    const auto open = store_->OpenPrefix(b, 0);
    ASSERT_OK(open);
    EXPECT_CODE(store_->Compress(b, Options({0, 250})), Code::kFailedPrecondition);
    EXPECT_EQ(*Compare(**open, longer), "");
  }
  CompressOptions wrong = Options({0, 250});
  wrong.kept = [](uint32_t, uint32_t) -> Result<std::vector<uint32_t>> {
    return std::vector<uint32_t>(kKept, 3);
  };
  EXPECT_CODE(store_->Compress(b, wrong), Code::kInvalidArgument);
  wrong = Options({0, 250});
  wrong.progress = [](uint64_t done, uint64_t total, std::string_view) { return done < total / 2; };
  EXPECT_CODE(store_->Compress(b, wrong), Code::kCancelled);
  wrong.kept_rows = 250;
  EXPECT_CODE(store_->Compress(b, wrong), Code::kInvalidArgument);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 1u);
  ExpectWhole(b, longer);
  // A put that began meanwhile and continues it comes first.
  wrong = Options({0, 250});
  wrong.progress = [&](uint64_t done, uint64_t total, std::string_view) {
    if (done == total) Stored(Join(longer, Iota(20, 8000)));
    return true;
  };
  EXPECT_CODE(store_->Compress(b, wrong), Code::kFailedPrecondition);
  ExpectWhole(b, longer);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 2u);
}

TEST_F(CompressTest, ACrashLeavesOneOfTheTwoWhole) {
  const auto tokens = Iota(200);
  const SegmentId id = Stored(tokens);
  const std::pair<const char*, bool> cases[] = {{"compress.sealed", true},
                                                {"compress.committed", true},
                                                {"compress.sealed", false},
                                                {"compress.before_commit", false},
                                                {"compress.committed", false}};
  for (const auto& [point, made_anew] : cases) {
    store_.reset();
    const pid_t child = fork();
    if (child == 0) {
      crash_at = point;
      crash_point_hook = DieThere;
      auto store = PrefixStore::Open(options_);
      if (store.ok()) (void)(*store)->Compress(id, Options({0, 200}));
      _exit(1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_EQ(WEXITSTATUS(status), 42) << point;
    if (made_anew) {  // with the catalog lost as well, and so what was committed and not answered
      std::filesystem::remove_all(options_.dir / "catalog");
      ASSERT_OK(RecoverCatalog(
          {.dir = options_.dir, .encryption_key_file = options_.encryption_key_file}, nullptr));
    }
    Open();
    EXPECT_EQ(FilesIn(options_.dir / "segments"), 1u) << point;
    ExpectSound();
    if (std::string_view(point) == "compress.committed" && !made_anew) {
      ExpectKept(id, tokens, {0, 200});
    } else {
      ExpectWhole(id, tokens);
    }
  }
}

TEST_F(CompressTest, DamageIsNeverServed) {
  const auto tokens = Iota(200);
  std::mt19937_64 rng(Seed("CompressTest.DamageIsNeverServed"));
  const SegmentId id = Stored(tokens);
  ASSERT_OK(store_->Compress(id, Options({0, 200})));
  const auto file = SegmentPath(options_.dir, store_->GetPrefix(id)->file);
  const uint64_t bytes = std::filesystem::file_size(file);
  for (int round = 0; round < 20; ++round) {
    // Behind its entries no checksum covers the table.
    const uint64_t at = rng() % (bytes - 2 * kPageBytes);
    FlipByte(file, at);
    Open();
    const auto report = store_->Verify(&id, nullptr);
    ASSERT_OK(report);
    EXPECT_FALSE(report->damaged.empty()) << at;
    FlipByte(file, at);
    Open();
    ASSERT_OK(store_->Verify(&id, nullptr));
    ExpectKept(id, tokens, {0, 200});
  }
}

}  // namespace
}  // namespace prefixd::storage
