// Tests that stores which each version wrote (tests/data/store-v<version>) are read and written on,
// and that those of later versions are refused and left unchanged.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "storage/catalog/catalog.h"
#include "storage/catalog/store_dir.h"
#include "tests/storage/format_store.h"

namespace prefixd::storage {
namespace {

namespace fs = std::filesystem;

fs::path Committed(uint32_t version) {
  return fs::path(PREFIXD_SOURCE_DIR) / "tests/data" / ("store-v" + std::to_string(version));
}

class Formats : public ::testing::TestWithParam<uint32_t> {
 protected:
  Formats() {
    fs::copy(Committed(GetParam()), options_.dir, fs::copy_options::recursive);
    options_.encryption_key_file.clear();
    if (GetParam() < kEncryptedFormatVersion) return;
    options_.encryption_key_file = dir_ / "key";
    fs::copy(Committed(GetParam()).replace_extension("key"), options_.encryption_key_file);
    fs::permissions(options_.encryption_key_file, fs::perms::owner_read);
  }

  // Compares rows with the fill, or tokens alone where rows are encoded.
  void ExpectHolds(PrefixStore& store, const std::vector<uint32_t>& tokens, bool rows = true) {
    const auto match = store.LongestMatch("m", "tenant", tokens, {true, {}});
    ASSERT_OK(match);
    ASSERT_EQ(match->n_tokens, tokens.size());
    const auto prefix = store.OpenPrefix(match->id, match->n_tokens);
    ASSERT_OK(prefix);
    if (!rows) return;
    EXPECT_EQ(*Compare(**prefix, tokens), "");
  }

  const FormatStore expected_;
  TempDir dir_;
  StoreOptions options_ = TestOptions(dir_.path());
};

TEST_P(Formats, AreReadAndWrittenOn) {
  const auto model = TestModel();
  for (int round = 0; round < 2; ++round) {
    auto store = PrefixStore::Open(options_);
    ASSERT_OK(store);
    for (const auto& tokens : {expected_.a, expected_.b, expected_.c}) ExpectHolds(**store, tokens);
    const auto root = (*store)->LongestMatch("m", "tenant", expected_.a)->id;
    const auto blob = (*store)->GetBlob(root, "note", "maker/1");
    ASSERT_OK(blob);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(blob->data()), blob->size()),
              FormatStore::Blob(GetParam()));
    EXPECT_EQ((*store)->stats().recovered_orphans, 0u);
    ASSERT_OK(Put(**store, model, Join(expected_.b, Iota(20, 9000)), "tenant"));
    ReclusterOptions recluster;
    recluster.chunk_tokens = 16;
    recluster.order = [&](uint32_t, uint32_t, uint32_t,
                          std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
      std::vector<uint32_t> order(rows.size() / model.geometry.row(0).bytes());
      for (size_t i = 0; i < order.size(); ++i) order[i] = uint32_t(order.size() - 1 - i);
      return order;
    };
    ASSERT_OK((*store)->Recluster(root, recluster));
    EXPECT_TRUE((*store)->Verify(nullptr, nullptr)->damaged.empty());
  }
  const auto identity = ReadOrCreateIdentity(options_.dir);
  ASSERT_OK(identity);
  EXPECT_EQ(identity->format_version, std::max(GetParam(), kStoreFormatVersion));
}

TEST_P(Formats, KeepWhatEachPutSaid) {
  if (GetParam() < 2) GTEST_SKIP() << "version 1 has none of it";
  const auto store = PrefixStore::Open(options_);
  ASSERT_OK(store);
  ExpectHolds(**store, expected_.encoded, /*rows=*/false);
  for (const auto& tokens : {expected_.derived, expected_.shorter, expected_.compacted}) {
    ExpectHolds(**store, tokens);
  }
  const auto info = [&](const std::vector<uint32_t>& tokens) {
    return *(*store)->GetPrefix((*store)->LongestMatch("m", "tenant", tokens, {true, {}})->id);
  };
  EXPECT_TRUE(info(expected_.a).pinned);
  EXPECT_EQ(info(expected_.encoded).encoding, RowEncoding::kInt8);
  EXPECT_EQ(info(expected_.encoded).expires_unix_ms, FormatStore::kExpires);
  EXPECT_EQ(info(expected_.derived).exact_tokens, 0u);
  EXPECT_EQ(info(expected_.compacted).chain.size(), 1u);
  EXPECT_EQ((*store)->LongestMatch("m", "tenant", expected_.derived)->n_tokens, 0u);
  const auto why = (*store)->ExplainMatch("m", "tenant", expected_.removed);
  ASSERT_OK(why);
  ASSERT_TRUE(why->gone.has_value());
  EXPECT_EQ(why->gone->reason, GoneReason::kRemoved);
}

TEST_P(Formats, OfLaterVersionsAreRefusedAndLeftUnchanged) {
  std::stringstream before;
  before << std::ifstream(options_.dir / "STORE").rdbuf();
  std::string later = before.str();
  const std::string now = "format " + std::to_string(GetParam());
  later.replace(later.find(now), now.size(),
                "format " + std::to_string(kEncryptedFormatVersion + 1));
  std::ofstream(options_.dir / "STORE") << later;
  const auto refused = PrefixStore::Open(options_);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kFailedPrecondition);
  EXPECT_NE(refused.error().message.find("this prefixd knows up to " +
                                         std::to_string(kEncryptedFormatVersion)),
            std::string::npos)
      << refused.error().message;
  std::stringstream after;
  after << std::ifstream(options_.dir / "STORE").rdbuf();
  EXPECT_EQ(after.str(), later);
}

TEST(FormatStores, ThereIsOneOfThisVersion) {
  for (uint32_t version = 1; version <= kEncryptedFormatVersion; ++version) {
    EXPECT_TRUE(fs::exists(Committed(version) / "STORE"))
        << "run tests/storage/make_format_store and commit what it makes";
  }
}

std::string VersionName(const ::testing::TestParamInfo<uint32_t>& info) {
  return "v" + std::to_string(info.param);
}
INSTANTIATE_TEST_SUITE_P(All, Formats, ::testing::Range(1u, kEncryptedFormatVersion + 1),
                         VersionName);

}  // namespace
}  // namespace prefixd::storage
