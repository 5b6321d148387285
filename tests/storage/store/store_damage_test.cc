// Tests a store on a damaged, foreign or half-written directory, on every I/O backend.
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "storage/core/store_core.h"
#include "storage/segment/segment_format.h"
#include "storage/store/open_store.h"
#include "tests/storage/store_backends.h"

namespace prefixd::storage {
namespace {

class StoreDamageTest : public StoreTest {};

TEST_P(StoreDamageTest, DataPageFlipsGiveCorruptNeverWrongBytes) {
  std::mt19937_64 rng(Seed("StoreTest.DataPageFlips"));
  options_.host_tier_bytes = 0;
  Open();
  const auto tokens = Iota(300);
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  const auto path = FileOf(*id);
  const SegmentLayout layout =
      *SegmentLayout::Of({2, 2, static_cast<uint32_t>(model_.geometry.row(0).key_bytes()),
                          static_cast<uint32_t>(model_.geometry.row(0).value_bytes()), 300, 0, 0});
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
    // A quarantined segment is a miss for matching, an error for opening, also after a restart.
    EXPECT_EQ(store_->LongestMatch("m", "t", tokens)->n_tokens, 0u);
    EXPECT_CODE(store_->OpenPrefix(*id, 0), Code::kCorrupt);
    EXPECT_TRUE(store_->GetPrefix(*id)->quarantined);
    if (i == 0) {
      Open();
      EXPECT_CODE(store_->OpenPrefix(*id, 0), Code::kCorrupt);
    }
    const auto report = store_->Verify(&*id, nullptr);
    ASSERT_OK(report);
    EXPECT_EQ(report->damaged.size(), 1u);
    // Restored bytes verify again, and verification reports that.
    std::vector<std::byte> back;
    {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      char c = 0;
      file.seekg(static_cast<std::streamoff>(offset));
      file.get(c);
      const uint64_t in_page = offset % kPageBytes;
      const uint32_t row = static_cast<uint32_t>(model_.geometry.row(0).bytes());
      const uint64_t run = (page - 1) / layout.of(0).pages_per_run;
      const uint64_t token =
          (page - 1) % layout.of(0).pages_per_run * layout.of(0).row.per_page + in_page / row;
      std::vector<std::byte> expected(row);
      char right = 0;  // padding is zero
      if (in_page / row < layout.of(0).row.per_page && token < 300) {
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

TEST_P(StoreDamageTest, EveryHeaderAndFooterByteFlipIsFoundAtOpen) {
  const auto tokens = Iota(40);
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  const auto path = FileOf(*id);
  const uint64_t bytes = std::filesystem::file_size(path);
  const SegmentRecord record = [&] {
    auto core = OpenStoreCore(options_);
    EXPECT_FALSE(core.ok());  // locked by store_
    store_.reset();
    core = OpenStoreCore(options_);
    return (*core)->tree.Records().at(0);
  }();
  auto engine = NewThreadEngine({});
  ASSERT_TRUE(SegmentFile::Open(*engine, path, record, false).ok());
  // The flips cover header, token ids, manifest, table and footer: all that Open reads, and what
  // Verify adds. segment_format_test flips every bit of both ends; here it is every third byte,
  // through a real file.
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

TEST_P(StoreDamageTest, SwappedZeroedAndStalePagesAreCaught) {
  options_.host_tier_bytes = 0;
  Open();
  const auto tokens = Iota(300);
  const auto id = Put(*store_, model_, tokens), other = Put(*store_, model_, Iota(300, 7000));
  ASSERT_OK(id);
  ASSERT_OK(other);
  const auto copy_page = [&](const std::filesystem::path& from, uint64_t a, uint64_t b) {
    std::vector<char> page(kPageBytes);
    std::ifstream in(from, std::ios::binary);
    in.seekg(static_cast<std::streamoff>(a * kPageBytes));
    in.read(page.data(), kPageBytes);
    std::fstream out(FileOf(*id), std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(static_cast<std::streamoff>(b * kPageBytes));
    out.write(page.data(), kPageBytes);
  };
  const auto keep = dir_.path() / "keep";
  std::filesystem::copy_file(FileOf(*id), keep);
  const auto zeros = dir_.path() / "zeros";
  std::ofstream(zeros) << std::string(2 * kPageBytes, '\0');
  struct Case {
    std::filesystem::path from;
    uint64_t a, b;
  };
  for (const Case& c : {Case{keep, 2, 3}, Case{zeros, 0, 2}, Case{FileOf(*other), 2, 2}}) {
    const auto prefix = store_->OpenPrefix(*id, 0);
    ASSERT_OK(prefix);
    copy_page(c.from, c.a, c.b);
    EXPECT_CODE(Compare(**prefix, tokens), Code::kCorrupt);
    copy_page(keep, c.b, c.b);
    EXPECT_TRUE(store_->Verify(nullptr, nullptr)->damaged.empty());
  }
}

TEST_P(StoreDamageTest, ADamagedSegmentCostsItsDescendantsAndNobodyElse) {
  const auto base = Iota(64), longer = Join(base, Iota(64, 500)), apart = Iota(64, 4000);
  const auto root = Put(*store_, model_, base), leaf = Put(*store_, model_, longer),
             sound = Put(*store_, model_, apart);
  ASSERT_OK(leaf);
  store_.reset();
  std::filesystem::remove(FileOf(*root));
  Open();
  EXPECT_CODE(store_->OpenPrefix(*root, 0), Code::kCorrupt);
  EXPECT_CODE(store_->OpenPrefix(*leaf, 0), Code::kCorrupt);
  EXPECT_EQ(store_->LongestMatch("m", "t", longer)->n_tokens, 0u);
  ExpectPrefix(*sound, apart);
  // The prompt can be stored anew beside the damaged segment, which can be removed.
  const auto anew = Put(*store_, model_, longer);
  ASSERT_OK(anew);
  ExpectPrefix(*anew, longer);
  ASSERT_OK(store_->Remove(*leaf));
  ASSERT_OK(store_->Remove(*root));
  ExpectPrefix(*anew, longer);
  Open();
  ExpectPrefix(*anew, longer);
}

// Opening a store looks for its files and reads none of them. What it leaves unread is found by
// whoever uses the segment, or by CheckEnds.
TEST_P(StoreDamageTest, AnOpenedStoreChecksTheEndsOfItsFilesLater) {
  const std::vector<uint32_t> prompts[] = {Iota(400), Iota(400, 3000), Iota(400, 6000),
                                           Iota(400, 9000)};
  std::vector<SegmentId> ids;
  for (const auto& tokens : prompts) ids.push_back(*Put(*store_, model_, tokens));
  store_.reset();
  std::filesystem::remove(FileOf(ids[0]));
  for (const size_t i : {1, 2}) {
    FlipByte(FileOf(ids[i]), i == 1 ? 100 : std::filesystem::file_size(FileOf(ids[i])) - 4000);
  }
  Open();
  EXPECT_NE(store_->GetPrefix(ids[0])->quarantine.find("the file is missing"), std::string::npos);
  for (const size_t i : {1, 2, 3}) EXPECT_FALSE(store_->GetPrefix(ids[i])->quarantined) << i;
  EXPECT_EQ(store_->LongestMatch("m", "t", prompts[1])->n_tokens, 0u);
  EXPECT_TRUE(store_->GetPrefix(ids[1])->quarantined);

  EXPECT_EQ(store_->stats().unchecked_segments, 4u);
  int asked = 0;
  EXPECT_CODE(store_->CheckEnds([&] { return ++asked < 2; }), Code::kCancelled);
  EXPECT_EQ(asked, 2);
  ASSERT_OK(store_->CheckEnds([] { return true; }));
  EXPECT_EQ(store_->stats().unchecked_segments, 0u);
  EXPECT_TRUE(store_->GetPrefix(ids[2])->quarantined);
  EXPECT_EQ(store_->LongestMatch("m", "t", prompts[2])->n_tokens, 0u);
  EXPECT_FALSE(store_->GetPrefix(ids[3])->quarantined);
  ExpectPrefix(ids[3], prompts[3]);
}

TEST_P(StoreDamageTest, RecoveryFreesWhatNobodyKnows) {
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
  Open();
  EXPECT_EQ(store_->stats().recovered_orphans, 3u);
  EXPECT_EQ(FilesIn(segments), 3u);
  ExpectPrefix(*id, Iota(64));
  EXPECT_EQ(store_->GetBlob(*id, "b", "p")->size(), 10u);
}

TEST_P(StoreDamageTest, ALostCatalogIsNotTakenForAnEmptyStore) {
  const auto id = Put(*store_, model_, Iota(64));
  ASSERT_OK(id);
  store_.reset();
  std::filesystem::rename(options_.dir / "catalog", options_.dir / "elsewhere");
  EXPECT_CODE(PrefixStore::Open(options_), Code::kCorrupt);
  std::filesystem::remove_all(options_.dir / "catalog");
  std::filesystem::rename(options_.dir / "elsewhere", options_.dir / "catalog");
  Open();
  ExpectPrefix(*id, Iota(64));
}

// The record at the end of the log is torn, or any byte of it rots: the segments bring back the
// commits that RocksDB drops.
TEST_P(StoreDamageTest, ADamagedCommitLogLosesNothing) {
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
    Open();
    ExpectPrefix(*id, Iota(64));
    ExpectPrefix(*longer, Iota(130));
    ExpectPrefix(*other, Iota(40, 5000));
    EXPECT_EQ(store_->LongestMatch("m", "t", Iota(130))->n_tokens, 130u);
    EXPECT_EQ(store_->LongestMatch("m", "other tenant", Iota(40, 5000))->n_tokens, 40u);
    EXPECT_EQ(store_->LongestMatch("m", "t", Iota(50, 9000))->n_tokens, 0u);
    ASSERT_OK(Put(*store_, model_, Iota(77, 20'000)));
    Open();
    EXPECT_EQ(store_->stats().recovered_orphans, 0u);
    ExpectPrefix(*longer, Iota(130));
    store_.reset();
  }
}

TEST_P(StoreDamageTest, ASecondOpenerIsToldTheOwnersPid) {
  const auto second = PrefixStore::Open(options_);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code, Code::kFailedPrecondition);
  EXPECT_NE(second.error().message.find(std::to_string(::getpid())), std::string::npos)
      << second.error().message;
}

TEST_P(StoreDamageTest, ANewerStoreIsRefusedUnchanged) {
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
  Open();
  EXPECT_EQ(store_->ListPrefixes().size(), 1u);
}

TEST_P(StoreDamageTest, ABlobWhoseSizeCannotBeReadCountsNothing) {
  const auto id = Put(*store_, model_, Iota(64));
  ASSERT_OK(id);
  const uint64_t rows = store_->stats().bytes_on_disk;
  const std::vector<std::byte> bytes(100);
  ASSERT_OK(store_->PutBlob(*id, "note", "maker", bytes));
  const uint64_t both = store_->stats().bytes_on_disk;
  const auto lose = [&] {
    store_.reset();
    const auto path = BlobPath(options_.dir, *id, "note");
    std::filesystem::remove(path);
    std::filesystem::create_symlink("nowhere", path);
    Open();
    EXPECT_EQ(store_->stats().bytes_on_disk, rows);
  };
  lose();
  ASSERT_OK(store_->PutBlob(*id, "note", "maker", bytes));  // replaces it
  EXPECT_TRUE(store_->GetBlob(*id, "note", "maker").ok());
  EXPECT_EQ(store_->stats().bytes_on_disk, both);
  lose();
  ASSERT_OK(store_->Remove(*id));
  EXPECT_EQ(store_->stats().bytes_on_disk, 0u);
  EXPECT_TRUE(std::filesystem::is_empty(options_.dir / "segments"));
}

TEST_P(StoreDamageTest, VerifyCountsAndCanBeStopped) {
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
  EXPECT_EQ(report->covered.size(), 2u);
  EXPECT_EQ(last, total);
  EXPECT_EQ(report->bytes, store_->stats().bytes_on_disk);
  EXPECT_CODE(store_->Verify(nullptr, [](uint64_t, uint64_t, std::string_view) { return false; }),
              Code::kCancelled);
  const SegmentId unknown{};
  EXPECT_CODE(store_->Verify(&unknown, nullptr), Code::kNotFound);
}

INSTANTIATE_TEST_SUITE_P(Backends, StoreDamageTest,
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads), BackendName);

}  // namespace
}  // namespace prefixd::storage
