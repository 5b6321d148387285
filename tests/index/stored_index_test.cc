#include "index/search/envelope.h"

#include <xxhash.h>

#include <cstring>

#include "index/load_index.h"
#include "tests/index/index_test_support.h"
#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

class StoredIndexTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kDim = 6, kFirst = 20, kTokens = 300;

  StoredIndexTest()
      : random_(prefixd::testing::Seed("StoredIndexTest")),
        data_(random_, kTokens, kDim),
        rows_(data_.keys, kDim, DType::kBf16) {
    IvfOptions options;
    options.probe_fraction = 0.25f;
    auto index = BuildIvfIndex(rows_.view(), {kFirst, kFirst + kTokens}, options);
    EXPECT_TRUE(index.ok());
    if (!index.ok()) return;
    index_ = std::move(index).value();
    auto bytes = index_->Serialize();
    EXPECT_TRUE(bytes.ok());
    if (bytes.ok()) bytes_ = std::move(bytes).value();
  }
  void ExpectCorrupt(std::span<const std::byte> bytes, const std::string& what) {
    const auto index = LoadIndex(bytes);
    ASSERT_FALSE(index.ok()) << what;
    EXPECT_EQ(index.error().code, Code::kCorrupt) << what << ": " << index.error().ToString();
  }

  Random random_;
  AttentionLike data_;
  TestRows rows_;
  std::unique_ptr<KeyIndex> index_;
  std::vector<std::byte> bytes_;
};

TEST_F(StoredIndexTest, ARoundTripSelectsTheSame) {
  const auto loaded = LoadIndex(bytes_);
  ASSERT_TRUE(loaded.ok()) << loaded.error().ToString();
  EXPECT_EQ((*loaded)->kind(), IndexKind::kIvf);
  EXPECT_EQ((*loaded)->covered(), index_->covered());
  for (int round = 0; round < 50; ++round) {
    SearchRequest request;
    request.group = Uniform(random_, 1, 4);
    const std::vector<float> queries = data_.Queries(random_, request.group);
    request.queries = queries;
    request.layer = Layer(kDim);
    request.candidates = {kFirst + Uniform(random_, 0, 50), kFirst + kTokens};
    request.k = Uniform(random_, 0, 60);
    request.keys = rows_.view();
    request.first_token = kFirst;
    const auto before = index_->Search(request), after = (*loaded)->Search(request);
    ASSERT_TRUE(before.ok() && after.ok());
    EXPECT_EQ(before->ids, after->ids);
    for (uint32_t g = 0; g < request.group; ++g) {
      EXPECT_EQ(before->cuts[g].score, after->cuts[g].score);
      EXPECT_EQ(before->cuts[g].kind, after->cuts[g].kind);
    }
    EXPECT_EQ(before->keys_scanned, after->keys_scanned);
    EXPECT_EQ(before->bytes_scanned, after->bytes_scanned);
  }
  const auto again = (*loaded)->Serialize();
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(*again == bytes_);
}

TEST_F(StoredIndexTest, EveryTruncationIsCorrupt) {
  for (size_t size = 0; size < bytes_.size(); ++size) {
    ExpectCorrupt(std::span(bytes_).first(size), "first " + std::to_string(size) + " bytes");
  }
  bytes_.push_back(std::byte{0});
  ExpectCorrupt(bytes_, "a byte too many");
}

TEST_F(StoredIndexTest, EveryFlippedByteIsCorrupt) {
  for (size_t at = 0; at < bytes_.size(); ++at) {
    const std::byte flip{static_cast<uint8_t>(Uniform(random_, 1, 255))};
    bytes_[at] ^= flip;
    ExpectCorrupt(bytes_, "byte " + std::to_string(at));
    bytes_[at] ^= flip;
  }
  EXPECT_TRUE(LoadIndex(bytes_).ok());
}

TEST_F(StoredIndexTest, OtherVersionsSayWhichTheyAre) {
  for (const uint8_t version : {0, 2, 9}) {
    bytes_[8] = std::byte{version};
    const auto index = LoadIndex(bytes_);
    ASSERT_FALSE(index.ok());
    EXPECT_EQ(index.error().code, Code::kCorrupt);
    EXPECT_NE(index.error().message.find("version " + std::to_string(version)), std::string::npos);
  }
}

TEST_F(StoredIndexTest, AReservedFieldThatIsSetIsCorrupt) {
  constexpr size_t kChecksumAt = 16, kCoveredFrom = 24, kReservedAt = 52;
  bytes_[kReservedAt] = std::byte{1};
  const uint64_t sum = XXH3_64bits(bytes_.data() + kCoveredFrom, bytes_.size() - kCoveredFrom);
  std::memcpy(bytes_.data() + kChecksumAt, &sum, sizeof(sum));
  ExpectCorrupt(bytes_, "reserved field");
}

TEST_F(StoredIndexTest, ForeignBytesAreCorrupt) {
  std::vector<std::byte> noise(4096);
  for (std::byte& byte : noise) byte = std::byte{static_cast<uint8_t>(Uniform(random_, 0, 255))};
  ExpectCorrupt(noise, "noise");
  ExpectCorrupt(std::vector<std::byte>(bytes_.size()), "zeros");
}

// The bytes have a right checksum, but no builder wrote them.
TEST_F(StoredIndexTest, SealedNonsenseIsCorrupt) {
  const auto opened = Open(bytes_);
  ASSERT_TRUE(opened.ok());
  const std::span<const std::byte> payload = opened->payload;
  const Envelope fields = opened->fields;
  EXPECT_EQ(fields.covered, (TokenRange{kFirst, kFirst + kTokens}));
  ASSERT_TRUE(LoadIndex(Seal(fields, payload)).ok());
  const auto with = [&](auto change) {
    Envelope changed = fields;
    change(changed);
    return Seal(changed, payload);
  };
  ExpectCorrupt(with([](Envelope& e) { e.kind = 0; }), "exact, which stores nothing");
  ExpectCorrupt(with([](Envelope& e) { e.kind = 3; }), "a kind that older builds wrote");
  ExpectCorrupt(with([](Envelope& e) { e.kind = 4; }), "another that they wrote");
  ExpectCorrupt(with([](Envelope& e) { e.kind = 77; }), "unknown kind");
  ExpectCorrupt(with([](Envelope& e) { ++e.covered.end; }), "a token more");
  ExpectCorrupt(with([](Envelope& e) { e.covered = {9, 3}; }), "a negative range");
  ExpectCorrupt(with([](Envelope& e) { e.covered = {0, 0xffffffff}; }), "a huge range");
  ExpectCorrupt(with([](Envelope& e) { ++e.n_lists; }), "a list more");
  ExpectCorrupt(with([](Envelope& e) { e.n_lists = 0; }), "no lists");
  ExpectCorrupt(with([](Envelope& e) { --e.key_dim; }), "a dimension less");
  ExpectCorrupt(with([](Envelope& e) { e.key_dim = 0; }), "no dimensions");
  ExpectCorrupt(with([](Envelope& e) { e.key_dim = 0xffffffff; }), "many dimensions");
  ExpectCorrupt(with([](Envelope& e) { e.probe_fraction = NAN; }), "NaN of the lists");
  ExpectCorrupt(Seal(fields, {}), "no payload");

  std::vector<std::byte> longer(payload.begin(), payload.end());
  longer.push_back(std::byte{1});
  ExpectCorrupt(Seal(fields, longer), "bytes left over");
  std::vector<std::byte> noise(payload.begin(), payload.end());
  for (size_t i = 2 * kDim * sizeof(float); i < noise.size(); ++i) noise[i] = std::byte{0x5a};
  ExpectCorrupt(Seal(fields, noise), "not an index of FAISS");
  // FAISS ids lie behind each list's codes; the last eight bytes are one of them.
  std::vector<std::byte> twice(payload.begin(), payload.end());
  for (size_t i = twice.size() - 8; i < twice.size(); ++i) twice[i] = std::byte{0xff};
  ExpectCorrupt(Seal(fields, twice), "an id of -1");
}

TEST(StoredExactIndex, NeedsNoBytesAndNoneIsNoIndex) {
  const auto bytes = MakeExactIndex({0, 10})->Serialize();
  ASSERT_TRUE(bytes.ok());
  EXPECT_TRUE(bytes->empty());
  const auto index = LoadIndex(*bytes);
  ASSERT_FALSE(index.ok());
  EXPECT_EQ(index.error().code, Code::kCorrupt);
}

}  // namespace
}  // namespace prefixd::index
