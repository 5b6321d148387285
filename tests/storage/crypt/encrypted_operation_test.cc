// Tests what operators do with an encrypted store: recovering it, backing it up, moving segments to
// a remote tier; and what a crash leaves of one.
#include "storage/backup/backup.h"
#include "storage/catalog/catalog.h"
#include "storage/recover/recover.h"
#include "storage/remote/remote_memory.h"
#include "storage/store/remote_segment.h"
#include "tests/storage/crypt/encrypted_store.h"
#include "tests/storage/prompts.h"

namespace prefixd::storage {
namespace {

namespace fs = std::filesystem;
using testing::ReadFile;

class EncryptedOperationTest : public EncryptedStore<::testing::Test> {
 protected:
  void SetUp() override {
    Open();
    id_ = Stored(tokens_);
    child_ = Stored(longer_);
    ASSERT_OK(store_->PutBlob(child_, "note", "maker/1", std::as_bytes(std::span(tokens_))));
  }
  RecoverOptions Recover(const fs::path& key_file) {
    RecoverOptions recover;
    recover.dir = options_.dir;
    recover.encryption_key_file = key_file;
    recover.verify_data = true;
    return recover;
  }
  void ExpectServed() {
    Open();
    ExpectWhole(child_, longer_);
    EXPECT_EQ(store_->LongestMatch(model_.name, "t", longer_)->n_tokens, longer_.size());
    const auto blob = store_->GetBlob(child_, "note", "maker/1");
    ASSERT_OK(blob);
    EXPECT_EQ(blob->size(), tokens_.size() * sizeof(uint32_t));
    ExpectSound();
  }

  const Tokens tokens_ = Prompt(7, 300), longer_ = Join(tokens_, Iota(100, 900000));
  SegmentId id_, child_;
};

TEST_F(EncryptedOperationTest, ACatalogIsMadeAnewWithTheKeyAlone) {
  for (const bool without_identity : {false, true}) {
    store_.reset();
    fs::remove_all(options_.dir / "catalog");
    if (without_identity) fs::remove(options_.dir / "STORE");
    const auto before = ContentsOf(options_.dir / "segments");
    for (const fs::path& file : {fs::path(), OtherKeyFile()}) {
      const auto refused = RecoverCatalog(Recover(file), nullptr);
      EXPECT_CODE(refused, Code::kFailedPrecondition);
      EXPECT_NE(
          refused.error().message.find("3 files of it are encrypted under key " + key_.ToString()),
          std::string::npos)
          << refused.error().message;
    }
    EXPECT_EQ(ContentsOf(options_.dir / "segments"), before);
    const auto report = RecoverCatalog(Recover(key_file_), nullptr);
    ASSERT_OK(report);
    EXPECT_EQ(report->segments, 2u);
    EXPECT_TRUE(report->quarantined.empty());
    EXPECT_TRUE(report->set_aside.empty());
    EXPECT_EQ(report->identity_rebuilt, without_identity);
    ExpectServed();
    EXPECT_TRUE(FilesWith(options_.dir, Raw(tokens_).substr(0, 16)).empty());
  }
}

// Recovery does not scan blobs; one under a key that is not given refuses it nevertheless.
TEST_F(EncryptedOperationTest, ABlobAloneIsEncrypted) {
  store_.reset();
  fs::remove_all(options_.dir);
  const fs::path keys = std::exchange(options_.encryption_key_file, {});
  Open();
  const SegmentId id = Stored(tokens_);
  options_.encryption_key_file = keys;
  Open();
  ASSERT_OK(store_->PutBlob(id, "note", "maker/1", std::as_bytes(std::span(tokens_))));
  store_.reset();
  fs::remove_all(options_.dir / "catalog");
  for (const bool without_identity : {false, true}) {
    if (without_identity) fs::remove(options_.dir / "STORE");
    const auto refused = RecoverCatalog(Recover({}), nullptr);
    EXPECT_CODE(refused, Code::kFailedPrecondition);
    EXPECT_NE(refused.error().message.find("1 file of it is encrypted under key"),
              std::string::npos)
        << refused.error().message;
    EXPECT_FALSE(fs::exists(options_.dir / "catalog.new"));
  }
  EXPECT_CODE(
      RecoverCatalog(Recover(key_file_),
                     [](uint64_t, uint64_t, std::string_view unit) { return unit != "files"; }),
      Code::kCancelled);
  EXPECT_FALSE(fs::exists(options_.dir / "catalog.new"));
  const auto report = RecoverCatalog(Recover(key_file_), nullptr);
  ASSERT_OK(report);
  EXPECT_EQ(report->segments, 1u);
  Open();
  EXPECT_TRUE(store_->GetBlob(id, "note", "maker/1").ok());
}

TEST_F(EncryptedOperationTest, RecoveringSealsTheCatalogOfAStoreThatWasInClear) {
  store_.reset();
  fs::remove_all(options_.dir);
  const fs::path keys = std::exchange(options_.encryption_key_file, {});
  Open();
  const SegmentId id = Stored(tokens_);
  options_.encryption_key_file = keys;
  Open();
  ASSERT_OK(store_->Reencrypt(id, nullptr));
  store_.reset();
  const std::string lead = InRecords(std::span(tokens_).first(4));
  EXPECT_FALSE(FilesWith(options_.dir / "catalog", lead).empty());
  const auto report = RecoverCatalog(Recover(key_file_), nullptr);
  ASSERT_OK(report);
  fs::remove_all(report->old_catalog);
  Open();
  ExpectWhole(id, tokens_);
  EXPECT_EQ(store_->LongestMatch(model_.name, "t", tokens_)->n_tokens, tokens_.size());
  EXPECT_TRUE(FilesWith(options_.dir, lead).empty());
  EXPECT_TRUE(FilesWith(options_.dir, Raw(tokens_).substr(0, 16)).empty());
}

TEST_F(EncryptedOperationTest, BackupsStayEncryptedAndAreRestored) {
  const fs::path backup = dir_ / "backup";
  for (const bool with_key : {false, true}) {
    const auto keys = Keys();
    const auto snapshot = store_->TakeSnapshot();
    ASSERT_OK(snapshot);
    const auto report =
        WriteBackup((*snapshot)->dir(), backup, nullptr, with_key ? keys.get() : nullptr);
    ASSERT_OK(report);
    EXPECT_TRUE(report->damaged.empty());
  }
  EXPECT_TRUE(FilesWith(backup, Raw(tokens_).substr(400, 16)).empty());
  EXPECT_TRUE(FilesWith(backup, Raw(tokens_).substr(0, 16)).empty());
  store_.reset();
  options_.dir = dir_ / "restored";
  ASSERT_OK(RestoreBackup(backup, options_.dir, nullptr));
  EXPECT_EQ(Refusal({}).code, Code::kFailedPrecondition);
  ExpectServed();
}

TEST_F(EncryptedOperationTest, ABackupWithTheKeyFindsDamage) {
  FlipByte(FileOf(id_), 2 * kPageBytes + 5);
  const auto keys = Keys();
  const auto snapshot = store_->TakeSnapshot();
  ASSERT_OK(snapshot);
  const auto report = WriteBackup((*snapshot)->dir(), dir_ / "backup", nullptr, keys.get());
  ASSERT_OK(report);
  EXPECT_EQ(report->damaged.size(), 1u);
}

TEST_F(EncryptedOperationTest, SegmentsTravelEncrypted) {
  class Tier final : public MemoryRemoteTier {
   public:
    bool Has(std::string_view bytes) const {
      return std::ranges::any_of(objects_, [&](const auto& object) {
        const std::string_view all(reinterpret_cast<const char*>(object.second.data()),
                                   object.second.size());
        return all.find(bytes) != all.npos;
      });
    }
  } tier;
  ASSERT_OK(store_->Push(child_, tier, nullptr));
  EXPECT_FALSE(tier.List().empty());
  EXPECT_FALSE(tier.Has(Raw(tokens_).substr(400, 16)));
  EXPECT_CODE(RemoteSegment::Open(tier, child_), Code::kFailedPrecondition);
  StoreOptions other = options_;
  other.dir = dir_ / "other";
  {
    other.encryption_key_file = OtherKeyFile();
    const auto store = PrefixStore::Open(other);
    ASSERT_OK(store);
    EXPECT_CODE((*store)->Pull(child_, tier, nullptr), Code::kFailedPrecondition);
    EXPECT_EQ((*store)->stats().segments, 0u);
  }
  options_.dir = dir_ / "same";
  Open();
  ASSERT_OK(store_->Pull(child_, tier, nullptr));
  ExpectWhole(child_, longer_);
  Open();
  ExpectWhole(child_, longer_);
  EXPECT_EQ(store_->LongestMatch(model_.name, "t", longer_)->n_tokens, longer_.size());
  ExpectSound();
}

// A commit that the catalog lost is adopted from the file alone.
TEST_F(EncryptedOperationTest, LostCommitsAreAdopted) {
  store_.reset();
  fs::copy(options_.dir / "catalog", dir_ / "before");
  Open();
  const SegmentId late = Stored(Prompt(9));
  store_.reset();
  fs::remove_all(options_.dir / "catalog");
  fs::copy(dir_ / "before", options_.dir / "catalog");
  Open();
  EXPECT_EQ(store_->stats().recovered_commits, 1u);
  ExpectWhole(late, Prompt(9));
  ExpectServed();
}

}  // namespace
}  // namespace prefixd::storage
