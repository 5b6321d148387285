// Tests encrypted stores: every reader gets what was put, nothing of it lies in clear, what was
// changed on the disk is an error and never bytes, and keys that are missing are refused.
#include <xxhash.h>

#include "storage/catalog/catalog.h"
#include "storage/catalog/segment_inspect.h"
#include "storage/catalog/store_keys.h"
#include "storage/read/page_reader.h"
#include "tests/storage/crypt/encrypted_store.h"
#include "tests/storage/prompts.h"

namespace prefixd::storage {
namespace {

namespace fs = std::filesystem;
using testing::ReadFile;
using testing::WriteFile;

constexpr std::string_view kPayload = "what was derived of the prompt";

class EncryptionTest : public EncryptedStore<::testing::TestWithParam<CipherKind>> {
 protected:
  void SetUp() override {
    if (!CipherAvailable(GetParam())) GTEST_SKIP() << "this CPU lacks it";
    options_.cipher = GetParam();
    Open();
  }

  Status PutBlob(const SegmentId& id, std::string_view name = "note") {
    return store_->PutBlob(id, name, "maker/1", std::as_bytes(std::span(kPayload)));
  }
  std::string GetBlob(const SegmentId& id, std::string_view name = "note") {
    const auto blob = store_->GetBlob(id, name, "maker/1");
    if (!blob.ok()) return blob.error().ToString();
    return {reinterpret_cast<const char*>(blob->data()), blob->size()};
  }
  Status PutWith(const Tokens& tokens, std::string_view label, const PutOptions& how,
                 const RowFn& rows) {
    PREFIXD_ASSIGN(auto writer, store_->BeginPut(model_.name, "t", tokens, label, how));
    PREFIXD_TRY(WriteAll(*writer, model_.geometry, rows, 37, false));
    const auto id = writer->Commit();
    return id.ok() ? Status() : Status(id.error());
  }
  fs::path BlobFile(const SegmentId& id) const { return BlobPath(options_.dir, id, "note"); }

  // Reads every page of a segment's file as recovery and scrub do.
  Status ReadWholeFile(const fs::path& path) {
    const auto engine = NewThreadEngine({});
    const auto keys = Keys();
    PREFIXD_ASSIGN(const auto segment, InspectSegment(*engine, path, false, keys.get()));
    std::atomic<uint64_t> bytes{0}, failures{0};
    ReadServices services;
    services.engine = engine.get();
    services.bytes_read = &bytes;
    services.checksum_failures = &failures;
    services.on_corrupt = [](const SegmentId&, const std::string&) {};
    return VerifyAllPages(services, *segment.file, [](uint64_t) { return true; });
  }

  const Tokens tokens_ = Prompt(7, 500);
};

TEST_P(EncryptionTest, EveryReaderGetsWhatWasPut) {
  const SegmentId id = Stored(tokens_);
  const Tokens longer = Join(tokens_, Iota(90, 900000));
  const SegmentId child = Stored(longer);
  ASSERT_OK(PutBlob(child));
  PutOptions int8;
  int8.encoding = RowEncoding::kInt8;
  const Tokens encoded = Prompt(9, 100);
  const RowFn finite = [](uint32_t, uint32_t, uint32_t, std::span<std::byte> row) {
    std::memset(row.data(), 0x3c, row.size());
  };
  ASSERT_OK(PutWith(encoded, "label", int8, finite));
  for (const uint64_t tier : {uint64_t{0}, uint64_t{1} << 20}) {
    options_.host_tier_bytes = tier;
    Open();
    for (int again = 0; again < 2; ++again) {
      ExpectWhole(id, tokens_);
      ExpectWhole(child, longer);
      EXPECT_EQ(GetBlob(child), kPayload);
    }
    const auto match = store_->LongestMatch(model_.name, "t", longer);
    ASSERT_OK(match);
    EXPECT_EQ(match->n_tokens, longer.size());
    const auto halfway = store_->LongestMatch(model_.name, "t", Join(Iota(1, 70000), encoded));
    ASSERT_OK(halfway);
    EXPECT_EQ(halfway->n_tokens, 1u);  // token by token, of an id that lies sealed
    EXPECT_EQ(store_->LongestMatch(model_.name, "t", encoded)->n_tokens, encoded.size());
    ExpectSound();
  }
  EXPECT_EQ((*store_->GetPrefix(id)).label, "label");
}

TEST_P(EncryptionTest, RewritingKeepsEverything) {
  const SegmentId id = Stored(tokens_);
  const Tokens longer = Join(tokens_, Iota(300, 900000));
  const SegmentId child = Stored(longer);
  ASSERT_OK(store_->Recluster(id, Reversed(model_.geometry.row(0).bytes())));
  ExpectWhole(child, longer);
  const auto compacted = store_->Compact(child, 4096);
  ASSERT_OK(compacted);
  ASSERT_OK(store_->Recluster(*compacted, Reversed(model_.geometry.row(0).bytes())));
  ExpectWhole(child, longer);
  Open();
  ExpectWhole(child, longer);
  ExpectPrefix(id, tokens_);
  ExpectSound();
  EXPECT_OK(store_->Remove(child));
}

TEST_P(EncryptionTest, NothingOfAPromptLiesInClear) {
  const auto fill = [&](StoreOptions options) {
    options_ = options;
    Open();
    const auto tenant = Put(*store_, model_, tokens_, "tenant-of-this-test");
    ASSERT_OK(tenant);
    ASSERT_OK(PutWith(Prompt(8), "label-of-this-test", {}, RowsFrom(States(Prompt(8)))));
    ASSERT_OK(PutBlob(*tenant));
    ASSERT_OK(store_->Recluster(*tenant, Reversed(model_.geometry.row(0).bytes())));
    ASSERT_OK(PutBlob(Stored(Prompt(3)), "other"));
    Open();  // RocksDB writes its log into a table
    store_.reset();
  };
  const std::string lead = InRecords(std::span(tokens_).first(4));
  std::vector<std::byte> row(model_.geometry.row(0).bytes());
  FillRow(States(tokens_)[77], 0, 0, row);
  const std::vector<std::pair<const char*, std::string_view>> known = {
      {"token ids", Raw(tokens_).substr(400, 16)},
      {"first token ids", Raw(tokens_).substr(0, 16)},
      {"first token ids in the catalog", lead},
      {"a key", Raw(row).substr(0, model_.geometry.row(0).key_bytes())},
      {"a part of a value", Raw(row).substr(model_.geometry.row(0).key_bytes() + 8, 16)},
      {"a label", "label-of-this-test"},
      {"a tenant", "tenant-of-this-test"},
      {"a blob", kPayload},
      {"the model's description", "\"weights\":\"m\""}};
  const auto hashes =
      BlockHashes(model_.fingerprint, "tenant-of-this-test", tokens_, options_.block_tokens);

  StoreOptions clear = options_;
  clear.encryption_key_file.clear();
  clear.cipher = CipherKind::kNone;
  clear.dir = dir_ / "clear";
  const StoreOptions encrypted = options_;
  fill(clear);
  for (const auto& [what, bytes] : known) EXPECT_FALSE(FilesWith(clear.dir, bytes).empty()) << what;
  EXPECT_FALSE(FilesWith(clear.dir, Raw(hashes[3])).empty());
  fill(encrypted);
  for (const auto& [what, bytes] : known) {
    for (const std::string& file : FilesWith(encrypted.dir, bytes)) ADD_FAILURE() << what << file;
  }
  EXPECT_TRUE(FilesWith(encrypted.dir, Raw(hashes[3])).empty()) << "a guess can be tested";
  // The key lies nowhere in the store.
  const std::string key = ReadFile(key_file_);
  EXPECT_TRUE(FilesWith(encrypted.dir, key.substr(0, 16)).empty());
}

TEST_P(EncryptionTest, AFlippedBitIsAnErrorInEveryPage) {
  const SegmentId id = Stored(tokens_);
  store_.reset();
  const fs::path file = FileOf(id);
  const std::string sound = ReadFile(file);
  ASSERT_OK(ReadWholeFile(file));
  const size_t pages = sound.size() / kPageBytes;
  for (size_t page = 0; page < pages; ++page) {
    for (size_t at : {size_t{0}, size_t{9}, size_t{1111}, size_t{4060}, kPageBytes - 1}) {
      // Behind the last tag the table's page is empty, and nobody reads it.
      if (page == pages - 2 && at >= page * kTagBytes) continue;
      std::string changed = sound;
      changed[page * kPageBytes + at] ^= 8;
      WriteFile(file, changed);
      EXPECT_CODE(ReadWholeFile(file), Code::kCorrupt);
    }
  }
  // A page of rows that fails is never served, and its segment goes as one in clear does.
  std::string changed = sound;
  changed[2 * kPageBytes + 100] ^= 1;
  WriteFile(file, changed);
  Open();
  {
    const auto prefix = store_->OpenPrefix(id, 0);
    ASSERT_OK(prefix);
    EXPECT_CODE(Compare(**prefix, tokens_), Code::kCorrupt);
  }
  EXPECT_TRUE(store_->GetPrefix(id)->quarantined);
  WriteFile(file, sound);
  ExpectSound();
  EXPECT_FALSE(store_->GetPrefix(id)->quarantined);
  ExpectWhole(id, tokens_);
}

// Who can write to the disk makes checksums right, but not MACs.
TEST_P(EncryptionTest, ForgedHeadersAndFootersAreRefused) {
  const SegmentId id = Stored(tokens_);
  store_.reset();
  const std::string sound = ReadFile(FileOf(id));
  const auto forge = [&](size_t page, size_t at) {
    std::string changed = sound;
    char* bytes = changed.data() + page * kPageBytes;
    bytes[at] ^= 1;
    const uint64_t sum = XXH3_64bits(bytes, kPageBytes - 8);
    std::memcpy(bytes + kPageBytes - 8, &sum, sizeof(sum));
    WriteFile(FileOf(id), changed);
    return ReadWholeFile(FileOf(id));
  };
  const size_t footer = sound.size() / kPageBytes - 1;
  EXPECT_CODE(forge(0, 216), Code::kCorrupt);              // created
  EXPECT_CODE(forge(0, 3000), Code::kCorrupt);             // unused
  EXPECT_CODE(forge(footer, 64), Code::kCorrupt);          // sealed
  EXPECT_CODE(forge(footer, 3000), Code::kCorrupt);        // unused
  EXPECT_CODE(forge(0, 2096), Code::kFailedPrecondition);  // another key, which nobody has
}

TEST_P(EncryptionTest, PagesAndBlobsOfOtherPlacesAreRefused) {
  const SegmentId a = Stored(tokens_), b = Stored(Prompt(8, 500));
  ASSERT_OK(PutBlob(a));
  ASSERT_OK(PutBlob(b));
  store_.reset();
  const std::string of_a = ReadFile(FileOf(a)), of_b = ReadFile(FileOf(b));
  ASSERT_EQ(of_a.size(), of_b.size());
  const auto engine = NewThreadEngine({});
  const auto table = (*InspectSegment(*engine, FileOf(a), false, Keys().get())).file->layout();
  // With its tag, so that the table's checksum has to be made right, too: it is not, and without it
  // the page is refused all the same.
  std::string mixed = of_a;
  mixed.replace(3 * kPageBytes, kPageBytes, of_b, 3 * kPageBytes, kPageBytes);
  WriteFile(FileOf(a), mixed);
  EXPECT_CODE(ReadWholeFile(FileOf(a)), Code::kCorrupt);
  std::string swapped = of_a;
  swapped.replace(3 * kPageBytes, kPageBytes, of_a, 4 * kPageBytes, kPageBytes);
  swapped.replace(4 * kPageBytes, kPageBytes, of_a, 3 * kPageBytes, kPageBytes);
  const size_t tags = table.table_page * kPageBytes;
  swapped.replace(tags + 3 * kTagBytes, kTagBytes, of_a, tags + 4 * kTagBytes, kTagBytes);
  swapped.replace(tags + 4 * kTagBytes, kTagBytes, of_a, tags + 3 * kTagBytes, kTagBytes);
  WriteFile(FileOf(a), swapped);
  EXPECT_CODE(ReadWholeFile(FileOf(a)), Code::kCorrupt);
  WriteFile(FileOf(a), of_a);

  const std::string blob = ReadFile(BlobFile(a));
  WriteFile(BlobFile(a), ReadFile(BlobFile(b)));
  Open();
  EXPECT_CODE(store_->GetBlob(a, "note", "maker/1"), Code::kCorrupt);
  EXPECT_FALSE(fs::exists(BlobFile(a)));  // it is made again
  EXPECT_EQ(GetBlob(b), kPayload);
  ExpectSound();
}

TEST_P(EncryptionTest, WithoutItsKeyAStoreIsRefusedAndLeftUnchanged) {
  const SegmentId id = Stored(tokens_);
  ASSERT_OK(PutBlob(id));
  store_.reset();
  const auto before = ContentsOf(options_.dir);
  for (const fs::path& file : {fs::path(), OtherKeyFile()}) {
    const Error refusal = Refusal(file);
    EXPECT_EQ(refusal.code, Code::kFailedPrecondition);
    EXPECT_NE(refusal.message.find("its catalog and 2 files of it are encrypted under key " +
                                   key_.ToString()),
              std::string::npos)
        << refusal.message;
  }
  EXPECT_EQ(Refusal(dir_ / "missing.key").code, Code::kNotFound);
  EXPECT_EQ(ContentsOf(options_.dir), before);
  EXPECT_NE(before.at("STORE").find("format 3"), std::string::npos);  // older ones refuse it
  Open();
  ExpectWhole(id, tokens_);
  EXPECT_EQ(GetBlob(id), kPayload);
}

// Bytes of STORE that flip lead to a refusal, or are mended: never to a store in clear, whose STORE
// would be written without the secret.
TEST_P(EncryptionTest, DamageToTheIdentityLosesNoSecret) {
  const SegmentId id = Stored(tokens_);
  store_.reset();
  const fs::path file = options_.dir / "STORE";
  const std::string sound = ReadFile(file);
  const auto before = ReadIdentityFile(options_.dir);
  ASSERT_OK(before);
  for (size_t at = 0; at < sound.size(); ++at) {
    for (const char mask : {1, 2}) {
      std::string changed = sound;
      changed[at] ^= mask;
      WriteFile(file, changed);
      if (auto store = PrefixStore::Open(options_); store.ok()) {
        EXPECT_TRUE((*store)->GetPrefix(id).ok()) << "byte " << at;
        store->reset();
        const auto identity = ReadIdentityFile(options_.dir);
        ASSERT_OK(identity);
        EXPECT_EQ(identity->secret, before->secret) << "byte " << at;
      } else {
        EXPECT_EQ(ReadFile(file), changed) << "byte " << at;
      }
    }
  }
  WriteFile(file, sound);
  Open();
  ExpectWhole(id, tokens_);
}

TEST_P(EncryptionTest, AStoreThatWasInClearIsEncryptedBitByBit) {
  const StoreOptions encrypted = options_;
  store_.reset();
  fs::remove_all(options_.dir);
  options_.encryption_key_file.clear();
  options_.cipher = CipherKind::kNone;
  Open();
  const SegmentId old = Stored(tokens_);
  ASSERT_OK(PutBlob(old));
  EXPECT_CODE(store_->Reencrypt(old, nullptr), Code::kFailedPrecondition);
  const std::string in_clear = ReadFile(FileOf(old));

  options_ = encrypted;
  ::testing::internal::CaptureStderr();
  Open();
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("lies in clear"), std::string::npos);
  const Tokens longer = Join(tokens_, Iota(90, 900000));
  const SegmentId fresh = Stored(longer);
  ExpectWhole(fresh, longer);
  EXPECT_EQ(ReadFile(FileOf(old)), in_clear);
  EXPECT_TRUE(FilesWith(options_.dir / "segments", Raw(longer).substr(2200, 16)).empty());
  EXPECT_NE(Refusal({}).message.find("1 file of it is encrypted"), std::string::npos);
  Open();
  uint64_t pages = 0;
  const Progress progress = [&](uint64_t done, uint64_t total, std::string_view) {
    pages = done;
    return done <= total;
  };
  EXPECT_TRUE(*store_->Reencrypt(old, progress));
  EXPECT_GT(pages, 0u);
  EXPECT_FALSE(*store_->Reencrypt(old, progress));
  EXPECT_FALSE(*store_->Reencrypt(fresh, progress));
  EXPECT_TRUE(FilesWith(options_.dir / "segments", Raw(tokens_).substr(400, 16)).empty());
  EXPECT_TRUE(FilesWith(options_.dir / "segments", kPayload).empty());
  for (int again = 0; again < 2; ++again) {
    ExpectWhole(old, tokens_);
    ExpectWhole(fresh, longer);
    EXPECT_EQ(GetBlob(old), kPayload);
    ExpectSound();
    Open();
  }
}

TEST_P(EncryptionTest, KeysAreChangedByRewriting) {
  const SegmentId first = Stored(tokens_);
  ASSERT_OK(PutBlob(first));
  ASSERT_OK(store_->Recluster(first, Reversed(model_.geometry.row(0).bytes())));
  store_.reset();
  const auto added = AddKeyToFile(key_file_);
  ASSERT_OK(added);
  Open();
  const SegmentId second = Stored(Prompt(8));
  ASSERT_OK(PutBlob(second));
  store_.reset();
  const auto uses = *KeysInUse(options_.dir);
  EXPECT_EQ(uses, (std::map<KeyId, uint64_t>{{key_, 2}, {*added, 2}}));

  const std::string both = ReadFile(key_file_);
  DropOldKeys();
  const Error refusal = Refusal(key_file_);
  EXPECT_EQ(refusal.code, Code::kFailedPrecondition);
  EXPECT_NE(refusal.message.find("2 files of it are encrypted under key " + key_.ToString()),
            std::string::npos)
      << refusal.message;
  WriteFile(key_file_, both);
  Open();
  EXPECT_TRUE(*store_->Reencrypt(first, nullptr));
  EXPECT_FALSE(*store_->Reencrypt(second, nullptr));
  store_.reset();
  EXPECT_EQ(*KeysInUse(options_.dir), (std::map<KeyId, uint64_t>{{*added, 4}}));
  DropOldKeys();
  Open();
  ExpectWhole(first, tokens_);
  ExpectWhole(second, Prompt(8));
  EXPECT_EQ(GetBlob(first), kPayload);
  EXPECT_EQ(store_->LongestMatch(model_.name, "t", tokens_)->n_tokens, tokens_.size());
  ExpectSound();
  store_.reset();
  EXPECT_EQ(ReadFile(options_.dir / "STORE").find(key_.ToString()), std::string::npos);
}

TEST_P(EncryptionTest, StoppedRewritingChangesNothing) {
  const SegmentId id = Stored(tokens_);
  store_.reset();
  ASSERT_OK(AddKeyToFile(key_file_));
  Open();
  const auto before = ContentsOf(options_.dir / "segments");
  EXPECT_CODE(store_->Reencrypt(id, [](uint64_t, uint64_t, std::string_view) { return false; }),
              Code::kCancelled);
  EXPECT_EQ(ContentsOf(options_.dir / "segments"), before);
  ExpectWhole(id, tokens_);
}

// Both ciphers are read, whichever new files get.
TEST_P(EncryptionTest, FilesOfAnotherCipherAreRead) {
  const SegmentId id = Stored(tokens_);
  ASSERT_OK(PutBlob(id));
  for (const CipherKind other : {CipherKind::kXChaCha20Poly1305, CipherKind::kAes256Gcm}) {
    if (!CipherAvailable(other)) continue;
    options_.cipher = other;
    Open();
    ExpectWhole(id, tokens_);
    EXPECT_EQ(GetBlob(id), kPayload);
  }
}

TEST_P(EncryptionTest, OwnTokensOfASessionAreEncrypted) {
  PutOptions live;
  live.live = true;
  ASSERT_OK(PutWith(tokens_, "", live, RowsFrom(States(tokens_))));
  EXPECT_TRUE(FilesWith(options_.dir, Raw(tokens_).substr(400, 16)).empty());
}

std::string NameOf(const ::testing::TestParamInfo<CipherKind>& info) {
  return info.param == CipherKind::kAes256Gcm ? "aes" : "chacha";
}
INSTANTIATE_TEST_SUITE_P(Ciphers, EncryptionTest,
                         ::testing::Values(CipherKind::kAes256Gcm, CipherKind::kXChaCha20Poly1305),
                         NameOf);

}  // namespace
}  // namespace prefixd::storage
