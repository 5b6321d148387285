// Tests a disk that others have filled: puts are refused, everything else goes on.
#include <sys/mount.h>

#include <fstream>

#include "storage/files/min_free.h"
#include "storage/io/file.h"
#include "storage/store/open_store.h"
#include "tests/storage/prompts.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

// Where nobody says how much of the disk stays free, its size does.
TEST(FreeSpace, FollowsFromTheDiskWhereNobodySays) {
  EXPECT_EQ(MinFreeOf(1ull << 30), 256ull << 20);
  EXPECT_EQ(MinFreeOf(100ull << 30), 5ull << 30);
  EXPECT_EQ(MinFreeOf(100ull << 40), 16ull << 30);
  TempDir dir;
  StoreOptions options = TestOptions(dir.path());
  const auto own = OpenStoreCore(options);
  ASSERT_OK(own);
  EXPECT_EQ((*own)->options.min_free_bytes, 0u);
  options.dir = dir.path() / "unsaid";
  options.min_free_bytes = StoreOptions().min_free_bytes;
  const auto core = OpenStoreCore(options);
  ASSERT_OK(core);
  EXPECT_EQ((*core)->options.min_free_bytes, MinFreeOf(*DiskBytes(dir.path())));
}

// The fixture has a small file system of its own, where root may mount one.
class FullDiskTest : public ::testing::Test {
 protected:
  void SetUp() override {
    mounted_ = ::mount("tmpfs", dir_.path().c_str(), "tmpfs", 0, "size=64m") == 0;
    if (!mounted_) GTEST_SKIP() << "a full disk needs a file system of its own: run as root";
    options_.min_free_bytes = 0;
    Open();
    ASSERT_OK(store_->PutModel(model_));
  }
  void TearDown() override {
    store_.reset();
    if (mounted_) {
      EXPECT_EQ(::umount(dir_.path().c_str()), 0);
    }
  }

  void Open() {
    store_.reset();
    auto opened = PrefixStore::Open(options_);
    ASSERT_OK(opened);
    store_ = std::move(*opened);
  }
  std::filesystem::path Filler() const { return dir_.path() / "filler"; }
  // Another program takes every free byte.
  void FillDisk() {
    std::ofstream out(Filler(), std::ios::app | std::ios::binary);
    const std::string block(4096, 'x');
    while (out.write(block.data(), 4096).flush()) continue;
    ASSERT_LT(FreeBytes(dir_.path()).value(), 4096u);
  }
  bool Ballast() const { return std::filesystem::exists(options_.dir / "ballast"); }
  void ExpectPrefix(const SegmentId& id, const Tokens& tokens) {
    const auto prefix = store_->OpenPrefix(id, 0);
    ASSERT_OK(prefix);
    const auto difference = Compare(**prefix, tokens);
    ASSERT_OK(difference);
    EXPECT_EQ(*difference, "");
  }

  TempDir dir_;
  bool mounted_ = false;
  StoreOptions options_ = TestOptions(dir_.path());
  ModelRecord model_ = TestModel();
  std::unique_ptr<PrefixStore> store_;
};

TEST_F(FullDiskTest, RefusesPutsServesAndCanBeMadeSmaller) {
  ASSERT_TRUE(Ballast());
  options_.eviction = Eviction::kNever;
  Open();
  std::vector<SegmentId> ids;
  for (uint32_t i = 0; i < 4; ++i) {
    const auto id = Put(*store_, model_, Prompt(i, 2000));
    ASSERT_OK(id);
    ids.push_back(*id);
  }
  FillDisk();
  EXPECT_CODE(Put(*store_, model_, Prompt(9, 2000)), Code::kResourceExhausted);
  for (uint32_t i = 0; i < 4; ++i) ExpectPrefix(ids[i], Prompt(i, 2000));
  ASSERT_OK(store_->Remove(ids[0]));  // committed in the space of the ballast
  EXPECT_FALSE(Ballast());
  FillDisk();  // now no ballast is left to release
  EXPECT_CODE(store_->Remove(ids[1]), Code::kResourceExhausted);
  EXPECT_CODE(Put(*store_, model_, Prompt(9, 2000)), Code::kResourceExhausted);
  ExpectPrefix(ids[1], Prompt(1, 2000));
  std::filesystem::remove(Filler());
  ASSERT_OK(store_->Remove(ids[1]));
  ASSERT_OK(store_->Maintain());
  EXPECT_TRUE(Ballast());
  ASSERT_OK(Put(*store_, model_, Prompt(9, 2000)));
}

TEST_F(FullDiskTest, OpensAndEvicts) {
  std::vector<SegmentId> ids;
  for (uint32_t i = 0; i < 4; ++i) {
    const auto id = Put(*store_, model_, Prompt(i, 2000));
    ASSERT_OK(id);
    ids.push_back(*id);
  }
  store_.reset();
  FillDisk();
  Open();  // in the space of the ballast
  EXPECT_FALSE(Ballast());
  for (uint32_t i = 0; i < 4; ++i) ExpectPrefix(ids[i], Prompt(i, 2000));
  std::filesystem::resize_file(Filler(), std::filesystem::file_size(Filler()) - (1 << 20));
  store_->NoteUse(ids[3]);
  // The ballast must fit again beside a put: that is more than everything there is to evict.
  EXPECT_CODE(Put(*store_, model_, Prompt(9, 20000)), Code::kResourceExhausted);
  EXPECT_EQ(store_->ListPrefixes().size(), 4u);
  std::filesystem::remove(Filler());
  ASSERT_OK(store_->Maintain());
  ASSERT_TRUE(Ballast());
  // Puts alone fill the disk: they evict one another and never meet a full disk.
  SegmentId last;
  for (uint32_t i = 10; i < 60; ++i) {
    const auto id = Put(*store_, model_, Prompt(i, 12000));
    ASSERT_OK(id);
    last = *id;
  }
  EXPECT_GT(store_->stats().evictions, 0u);
  ExpectPrefix(last, Prompt(59, 12000));
  Open();
  ExpectPrefix(last, Prompt(59, 12000));
}

// Puts fill the disk; while something keeps the space of evicted segments, evicting is no help.
class KeptSpaceTest : public FullDiskTest {
 protected:
  void SetUp() override {
    FullDiskTest::SetUp();
    for (uint32_t i = 0; !IsSkipped() && store_->stats().evictions == 0; ++i) {
      ASSERT_OK(Put(*store_, model_, Prompt(i, 12000)));
    }
    ASSERT_OK(store_->Maintain());
  }
  size_t Prefixes() const { return store_->ListPrefixes().size(); }
  void ExpectRefused(uint32_t prompt, const char* why) {
    const auto put = Put(*store_, model_, Prompt(prompt, 20000));
    ASSERT_FALSE(put.ok());
    EXPECT_EQ(put.error().code, Code::kResourceExhausted);
    EXPECT_NE(put.error().message.find(why), std::string::npos) << put.error().message;
    ASSERT_OK(store_->Maintain());
  }
};

TEST_F(KeptSpaceTest, NothingIsEvictedForTheDiskDuringABackup) {
  const size_t before = Prefixes();
  ASSERT_GT(before, 4u);
  auto snapshot = store_->TakeSnapshot();
  ASSERT_OK(snapshot);
  for (uint32_t i = 100; i < 110; ++i) ExpectRefused(i, "a backup under way");
  EXPECT_EQ(Prefixes(), before);
  snapshot->reset();
  EXPECT_OK(Put(*store_, model_, Prompt(120, 20000)));
}

TEST_F(KeptSpaceTest, ASnapshotOfTheFileSystemDoesNotEmptyTheStore) {
  const size_t before = Prefixes();
  ASSERT_GT(before, 8u);
  std::filesystem::create_directory(dir_.path() / "kept");
  for (const auto& file : std::filesystem::directory_iterator(options_.dir / "segments")) {
    std::filesystem::create_hard_link(file.path(), dir_.path() / "kept" / file.path().filename());
  }
  for (uint32_t i = 100; i < 110; ++i) ExpectRefused(i, i > 100 ? "something else keeps it" : "");
  const size_t after = Prefixes();
  EXPECT_GE(after + 6, before) << after;  // two rounds of evictions, each for one put
  for (uint32_t i = 110; i < 120; ++i) ExpectRefused(i, "something else keeps it");
  EXPECT_EQ(Prefixes(), after);
}

}  // namespace
}  // namespace prefixd::storage
