#include "storage/segment/identity.h"

#include <set>

#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

using Fields = std::vector<std::pair<std::string, std::string>>;

TEST(Identity, FieldOrderDoesNotMatterAndEveryFieldDoes) {
  const KvGeometry g = TestGeometry();
  const Fields fields{{"weights", "abc"}, {"rope", "10000"}, {"adapter", ""}};
  const Fields reversed(fields.rbegin(), fields.rend());
  const Fingerprint f = ModelFingerprint(g, fields);
  EXPECT_EQ(f, ModelFingerprint(g, reversed));
  for (size_t i = 0; i < fields.size(); ++i) {
    Fields changed = fields;
    changed[i].second += "x";
    EXPECT_NE(f, ModelFingerprint(g, changed));
    changed = fields;
    changed.erase(changed.begin() + static_cast<ptrdiff_t>(i));
    EXPECT_NE(f, ModelFingerprint(g, changed));
  }
  KvGeometry other = g;
  other.layers[1].softcap = 30;
  EXPECT_NE(f, ModelFingerprint(other, fields));
  other = g;
  other.dtype = DType::kF16;
  EXPECT_NE(f, ModelFingerprint(other, fields));
}

TEST(Identity, NoTwoFieldListsCollideByConcatenation) {
  const KvGeometry g = TestGeometry();
  const std::vector<Fields> lists{{{"a", "bc"}},
                                  {{"ab", "c"}},
                                  {{"a", "b"}, {"c", ""}},
                                  {{"a", ""}, {"b", "c"}},
                                  {{"", "abc"}},
                                  {{"abc", ""}},
                                  {{"a", "b"}},
                                  {}};
  std::set<std::string> seen;
  for (const Fields& fields : lists) seen.insert(ModelFingerprint(g, fields).ToString());
  EXPECT_EQ(seen.size(), lists.size());
}

TEST(Identity, HexRoundTrip) {
  const Fingerprint f = ModelFingerprint(TestGeometry(), Fields{});
  EXPECT_EQ(*Fingerprint::Parse(f.ToString()), f);
  EXPECT_CODE(Fingerprint::Parse("12"), Code::kInvalidArgument);
  EXPECT_CODE(Fingerprint::Parse(std::string(64, 'g')), Code::kInvalidArgument);
}

TEST(Identity, BlockHashesAreChainedAndSeparateTenantsAndModels) {
  std::mt19937_64 rng(Seed("Identity.BlockHashes"));
  const Fingerprint model = TestModel("a").fingerprint, other = TestModel("b").fingerprint;
  const auto tokens = RandomTokens(rng, 100, 1000);
  const auto hashes = BlockHashes(model, "t", tokens, 16);
  ASSERT_EQ(hashes.size(), 6u);
  // A longer prompt begins with the same hashes; a change is seen from its block onwards.
  EXPECT_EQ(BlockHashes(model, "t", std::span(tokens).first(95), 16).back(), hashes[4]);
  auto changed = tokens;
  changed[40] ^= 1;
  const auto after = BlockHashes(model, "t", changed, 16);
  for (size_t i = 0; i < hashes.size(); ++i) EXPECT_EQ(hashes[i] == after[i], i < 2) << i;
  EXPECT_NE(BlockHashes(model, "u", tokens, 16)[0], hashes[0]);
  EXPECT_NE(BlockHashes(other, "t", tokens, 16)[0], hashes[0]);
  EXPECT_NE(PrefixScope(model, "t"), PrefixScope(model, "u"));
  EXPECT_NE(PrefixScope(model, "t"), PrefixScope(other, "t"));
  // Equal blocks in different places hash differently.
  const std::vector<uint32_t> same(64, 7);
  const auto repeated = BlockHashes(model, "t", same, 16);
  EXPECT_EQ(std::set<BlockHash>(repeated.begin(), repeated.end()).size(), 4u);
}

}  // namespace
}  // namespace prefixd::storage
