// Tests RocksDB's MANIFEST, torn at its end or damaged inside.
#include "storage/catalog/manifest_tail.h"

#include "tests/storage/recover/recover_fixture.h"

namespace prefixd::storage {
namespace {

using prefixd::testing::ReadFile;
using prefixd::testing::WriteFile;

// Returns the file that RocksDB's CURRENT names.
fs::path ManifestOf(const fs::path& dir) {
  std::string name;
  std::ifstream(dir / "catalog" / "CURRENT") >> name;
  return dir / "catalog" / name;
}

// A power cut leaves parts of a record that was being appended, sector by sector.
TEST_F(RecoverTest, ATornEndOfTheManifestIsCutOff) {
  const SegmentId kept = Stored(Iota(100));
  store_.reset();
  const fs::path path = ManifestOf(options_.dir);
  const std::string sound = ReadFile(path);
  ASSERT_GT(sound.size(), 40u);
  std::string torn("\x12\x34\x56\x78\x40\x00\x01", 7);  // 64 bytes announced, none verify
  for (const size_t there : {8, 40, 71, 700}) {
    std::string tail = torn;
    tail.resize(there, '\x5a');
    WriteFile(path, sound + tail);
    const std::string bytes = sound + tail;
    EXPECT_EQ(TornManifestTail(std::as_bytes(std::span(bytes))), sound.size());
    auto store = PrefixStore::Open(options_);
    ASSERT_OK(store);
    EXPECT_TRUE((*store)->GetPrefix(kept).ok());
    EXPECT_TRUE((*store)->Verify(nullptr, nullptr)->damaged.empty());
    (*store).reset();
    ASSERT_EQ(ManifestOf(options_.dir) == path, false);  // opening begins a new one
    WriteFile(options_.dir / "catalog" / "CURRENT", path.filename().string() + "\n");
    WriteFile(path, sound);
  }
}

TEST_F(RecoverTest, DamageInsideTheManifestIsNotCutOff) {
  Stored(Iota(100));
  store_.reset();
  const fs::path path = ManifestOf(options_.dir);
  std::string bytes = ReadFile(path);
  EXPECT_EQ(TornManifestTail(std::as_bytes(std::span(bytes))), std::nullopt);
  bytes[9] = static_cast<char>(bytes[9] ^ 1);  // in the first record; others follow
  WriteFile(path, bytes);
  EXPECT_EQ(TornManifestTail(std::as_bytes(std::span(bytes))), std::nullopt);
  auto store = PrefixStore::Open(options_);
  EXPECT_CODE(store, Code::kCorrupt);
  EXPECT_EQ(ReadFile(path), bytes);  // unchanged
}

}  // namespace
}  // namespace prefixd::storage
