// Tests keys, key files and ciphers without a store.
#include "storage/crypt/cipher.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "storage/crypt/key_ring.h"
#include "storage/segment/blob_format.h"
#include "storage/segment/page_seal.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

namespace fs = std::filesystem;
using testing::ReadFile;
using testing::WriteFile;

std::vector<CipherKind> Ciphers() {
  std::vector<CipherKind> ciphers = {CipherKind::kXChaCha20Poly1305};
  if (CipherAvailable(CipherKind::kAes256Gcm)) ciphers.push_back(CipherKind::kAes256Gcm);
  return ciphers;
}

MasterKey Key(char digit) { return *MasterKey::FromHex(std::string(64, digit)); }
Uuid File(uint8_t first) { return {first}; }

TEST(Ciphers, PagesComeBackAndNothingElseDoes) {
  const MasterKey key = Key('1'), other_key = Key('2');
  for (const CipherKind kind : Ciphers()) {
    const auto cipher = FileCipher::Of(key, kind, FileKind::kSegment, File(1));
    ASSERT_OK(cipher);
    std::vector<std::byte> plain(kPageBytes), sealed(kPageBytes), tag(kTagBytes);
    for (size_t i = 0; i < plain.size(); ++i) plain[i] = static_cast<std::byte>(i * 7);
    (*cipher)->Seal(5, plain, sealed.data(), tag.data());
    EXPECT_NE(sealed, plain);
    const auto opens = [&](const FileCipher& with, uint64_t page, std::vector<std::byte> bytes,
                           const std::vector<std::byte>& its_tag) {
      return with.Open(page, bytes, its_tag.data()) && bytes == plain;
    };
    EXPECT_TRUE(opens(**cipher, 5, sealed, tag));
    EXPECT_FALSE(opens(**cipher, 6, sealed, tag));
    for (const auto& other : {FileCipher::Of(key, kind, FileKind::kSegment, File(2)),
                              FileCipher::Of(key, kind, FileKind::kBlob, File(1)),
                              FileCipher::Of(other_key, kind, FileKind::kSegment, File(1))}) {
      ASSERT_OK(other);
      EXPECT_FALSE(opens(**other, 5, sealed, tag));
    }
    for (size_t bit = 0; bit < kPageBytes * 8; bit += 37) {
      auto flipped = sealed;
      flipped[bit / 8] ^= std::byte{1} << (bit % 8);
      ASSERT_FALSE(opens(**cipher, 5, flipped, tag)) << bit;
    }
    for (size_t bit = 0; bit < kTagBytes * 8; ++bit) {
      auto flipped = tag;
      flipped[bit / 8] ^= std::byte{1} << (bit % 8);
      ASSERT_FALSE(opens(**cipher, 5, sealed, flipped)) << bit;
    }
    // In place, as pages that are filled up in the writer's buffer.
    auto in_place = plain;
    std::vector<std::byte> same_tag(kTagBytes);
    (*cipher)->Seal(5, in_place, in_place.data(), same_tag.data());
    EXPECT_EQ(in_place, sealed);
    EXPECT_EQ(same_tag, tag);
  }
}

TEST(Ciphers, WhatLiesBesideIsAuthenticated) {
  for (const CipherKind kind : Ciphers()) {
    const auto cipher = FileCipher::Of(Key('1'), kind, FileKind::kBlob, File(1));
    ASSERT_OK(cipher);
    std::vector<std::byte> bytes(100), tag(kTagBytes), beside(10, std::byte{3});
    (*cipher)->Seal(0, bytes, bytes.data(), tag.data(), beside);
    auto copy = bytes;
    EXPECT_TRUE((*cipher)->Open(0, copy, tag.data(), beside));
    beside[9] = std::byte{4};
    EXPECT_FALSE((*cipher)->Open(0, bytes, tag.data(), beside));
  }
}

TEST(Ciphers, MacsTellPlacesAndLengths) {
  const auto cipher = FileCipher::Of(Key('1'), FastestCipher(), FileKind::kSegment, File(1));
  ASSERT_OK(cipher);
  const std::vector<std::byte> bytes(64);
  const auto mac = (*cipher)->MacOf(0, bytes);
  EXPECT_TRUE((*cipher)->IsMac(0, bytes, mac));
  EXPECT_FALSE((*cipher)->IsMac(1, bytes, mac));
  EXPECT_FALSE((*cipher)->IsMac(0, std::span(bytes).first(63), mac));
}

// What is stored depends on these derivations: they never change.
TEST(Ciphers, StoredNumbersStay) {
  const MasterKey key =
      *MasterKey::FromHex("000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f");
  const auto cipher =
      FileCipher::Of(key, CipherKind::kXChaCha20Poly1305, FileKind::kSegment, File(9));
  ASSERT_OK(cipher);
  std::vector<std::byte> page(kPageBytes), tag(kTagBytes);
  (*cipher)->Seal(3, page, page.data(), tag.data());
  const auto hex = [](std::span<const std::byte> bytes) {
    KeyId id;
    std::memcpy(id.bytes.data(), bytes.data(), id.bytes.size());
    return id.ToString();
  };
  EXPECT_EQ(key.id().ToString(), "e5191b1407058dadbcfa189900bf9b35");
  EXPECT_EQ(hex(page), "b71f161fadb2adae85a49b4021a8911c");
  EXPECT_EQ(hex(tag), "597a858c33daa785d946a114d3ee10d0");
  EXPECT_EQ(hex((*cipher)->MacOf(0, page)), "d30be3d70ed0dd086992a78c68104c40");
}

TEST(Ciphers, APageIsNeverSealedTwice) {
  const auto cipher = FileCipher::Of(Key('1'), FastestCipher(), FileKind::kSegment, File(1));
  ASSERT_OK(cipher);
  const PageSeal seal(File(1), *cipher);
  std::array<std::byte, kPageBytes> page{};
  std::array<uint64_t, 2> entry{};
  seal.Seal(1, page, page, entry.data());
  EXPECT_DEATH(seal.Seal(1, page, page, entry.data()), "broken invariant");
}

TEST(Secrets, AreWrappedForOneStoreAndKey) {
  const auto secret = StoreSecret::Make();
  ASSERT_OK(secret);
  const MasterKey key = Key('1');
  const auto wrapped = secret->Wrap(key, File(1));
  ASSERT_OK(wrapped);
  const auto back = StoreSecret::Unwrap(key, File(1), *wrapped);
  ASSERT_OK(back);
  EXPECT_TRUE(std::ranges::equal(back->hash_key(), secret->hash_key()));
  EXPECT_CODE(StoreSecret::Unwrap(key, File(2), *wrapped), Code::kCorrupt);
  EXPECT_CODE(StoreSecret::Unwrap(Key('2'), File(1), *wrapped), Code::kCorrupt);
  EXPECT_CODE(StoreSecret::Unwrap(key, File(1), wrapped->substr(1)), Code::kCorrupt);

  const std::string sealed = secret->Seal("key", "value");
  EXPECT_EQ(*back->Open("key", sealed), "value");
  EXPECT_NE(secret->Seal("key", "value"), sealed);
  EXPECT_CODE(back->Open("another", sealed), Code::kCorrupt);
  EXPECT_CODE(back->Open("key", sealed.substr(0, 20)), Code::kCorrupt);
}

TEST(Secrets, BlockHashesDependOnThem) {
  const auto tokens = Iota(64);
  const std::vector<uint8_t> a(32, 1), b(32, 2);
  const auto plain = BlockHashes({}, "t", tokens, 16);
  EXPECT_NE(BlockHashes({}, "t", tokens, 16, a), plain);
  EXPECT_NE(BlockHashes({}, "t", tokens, 16, a), BlockHashes({}, "t", tokens, 16, b));
}

TEST(KeyFiles, AreMadeForTheOwnerAloneAndNeverOverwritten) {
  const TempDir dir;
  const fs::path file = dir / "key";
  const auto made = MakeKeyFile(file);
  ASSERT_OK(made);
  struct stat st {};
  ASSERT_EQ(::stat(file.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 07777, 0600u);
  const std::string before = ReadFile(file);
  EXPECT_EQ(before.size(), 65u);
  EXPECT_CODE(MakeKeyFile(file), Code::kAlreadyExists);
  EXPECT_EQ(ReadFile(file), before);
  EXPECT_EQ((*KeyRing::Read(file))->newest().id(), *made);

  const auto added = AddKeyToFile(file);
  ASSERT_OK(added);
  const auto ring = KeyRing::Read(file);
  ASSERT_OK(ring);
  ASSERT_EQ((*ring)->keys().size(), 2u);
  EXPECT_EQ((*ring)->newest().id(), *added);
  EXPECT_NE((*ring)->Find(*made), nullptr);
  EXPECT_EQ((*ring)->Find(KeyId{}), nullptr);
  ASSERT_EQ(::stat(file.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 07777, 0600u);
}

TEST(KeyFiles, WhatCannotBeUsedIsRefused) {
  const TempDir dir;
  const fs::path file = dir / "key";
  const std::string a(64, 'a'), b(64, 'b');
  EXPECT_CODE(KeyRing::Read(file), Code::kNotFound);
  WriteFile(file, a + "\n");
  for (const int mode : {0644, 0640, 0620, 0604}) {
    ::chmod(file.c_str(), static_cast<mode_t>(mode));
    const auto refused = KeyRing::Read(file);
    EXPECT_CODE(refused, Code::kFailedPrecondition);
    EXPECT_NE(refused.error().message.find("chmod 600"), std::string::npos);
  }
  ::chmod(file.c_str(), 0600);
  ASSERT_OK(KeyRing::Read(file));
  EXPECT_CODE(KeyRing::Read(dir.path()), Code::kFailedPrecondition);

  WriteFile(file, "# the new one\n" + a + "  # since May\n\n\t" + b + "\r\n");
  EXPECT_EQ((*KeyRing::Read(file))->keys().size(), 2u);
  for (const std::string& text :
       {std::string(), std::string("# none\n"), a + "0\n", a.substr(1), a + "\n" + a + "\n",
        b + "\n" + std::string(64, 'x'), std::string(20000, ' ')}) {
    WriteFile(file, text);
    const auto refused = KeyRing::Read(file);
    EXPECT_CODE(refused, Code::kInvalidArgument);
    EXPECT_EQ(refused.error().message.find(a), std::string::npos) << "a key is in the message";
  }
  WriteFile(file, b + "\n" + std::string(64, 'x'));
  EXPECT_NE(KeyRing::Read(file).error().message.find("key:2: "), std::string::npos);
}

// systemd hands a credential over by an access list, whose mask stands where the group's bits do.
TEST(KeyFiles, MayBeCredentialsOfTheService) {
  if (::geteuid() != 0) GTEST_SKIP() << "they are root's";
  const TempDir dir;
  const fs::path file = dir / "key";
  ASSERT_OK(MakeKeyFile(file));
  ::chmod(file.c_str(), 0440);
  EXPECT_CODE(KeyRing::Read(file), Code::kFailedPrecondition);
  ::setenv("CREDENTIALS_DIRECTORY", dir.path().c_str(), 1);
  EXPECT_OK(KeyRing::Read(file));
  ::chmod(file.c_str(), 0444);
  EXPECT_CODE(KeyRing::Read(file), Code::kFailedPrecondition);
  ::chmod(file.c_str(), 0460);
  EXPECT_CODE(KeyRing::Read(file), Code::kFailedPrecondition);
  ::chmod(file.c_str(), 0440);
  ::setenv("CREDENTIALS_DIRECTORY", (dir / "other").c_str(), 1);
  EXPECT_CODE(KeyRing::Read(file), Code::kFailedPrecondition);
  ::unsetenv("CREDENTIALS_DIRECTORY");
}

TEST(SealedBlobs, EveryByteCounts) {
  const TempDir dir;
  ASSERT_OK(MakeKeyFile(dir / "key"));
  const auto keys = *KeyRing::Read(dir / "key");
  for (const CipherKind kind : Ciphers()) {
    keys->set_cipher(kind);
    const std::vector<std::byte> payload(300, std::byte{0x41});
    const BlobContents contents{SegmentId{{7}}, "name", "producer", payload};
    const auto file = SealBlob(contents, *keys);
    ASSERT_OK(file);
    EXPECT_EQ(file->size(), kSealedBlobHeaderBytes + 12 + payload.size());
    EXPECT_EQ(*KeyOfBlob(*file), keys->newest().id());
    auto copy = *file;
    const auto opened = OpenBlob(copy, keys.get());
    ASSERT_OK(opened);
    EXPECT_EQ(opened->segment, contents.segment);
    EXPECT_EQ(opened->name, "name");
    EXPECT_EQ(opened->producer, "producer");
    EXPECT_TRUE(std::ranges::equal(opened->payload, payload));
    EXPECT_NE(*SealBlob(contents, *keys), *file);  // a key of its own each time
    for (size_t i = 0; i < file->size(); ++i) {
      auto changed = *file;
      changed[i] ^= std::byte{1};
      EXPECT_CODE(OpenBlob(changed, keys.get()), Code::kCorrupt);
    }
    for (size_t n = 0; n < file->size(); ++n) {
      auto cut = *file;
      cut.resize(n);
      EXPECT_CODE(OpenBlob(cut, keys.get()), Code::kCorrupt);
    }
    copy = *file;
    EXPECT_CODE(OpenBlob(copy, nullptr), Code::kFailedPrecondition);
    EXPECT_CODE(DecodeBlob(*file), Code::kFailedPrecondition);  // as a prefixd of before
    // What is in clear is still read with keys.
    auto clear = EncodeBlob(contents);
    EXPECT_OK(OpenBlob(clear, keys.get()));
    EXPECT_FALSE(KeyOfBlob(clear).has_value());
  }
}

}  // namespace
}  // namespace prefixd::storage
