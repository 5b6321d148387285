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

// The values are BLAKE2b over the bytes that docs/format.md describes, computed by another program.
TEST(Identity, FingerprintsStayWhatTheyAre) {
  const Fields fields{{"weights", "abc"}};
  KvGeometry g = TestGeometry();
  const std::string alike = "fc399c1bf0d07b3f7489ad0a7ca18a330701500d7197c54a50bd374798efb99f";
  EXPECT_EQ(ModelFingerprint(g, fields).ToString(), alike);
  // A layer that names the model's own numbers is no other layer.
  g.layers[1].n_kv_heads = 2, g.layers[1].key_dim = 20;
  EXPECT_EQ(ModelFingerprint(g, fields).ToString(), alike);
  g.layers[1].n_kv_heads = 4, g.layers[1].value_dim = 24;
  EXPECT_EQ(ModelFingerprint(g, fields).ToString(),
            "87303c455f3c6d9e7d4b692293b38c1308bc65274b374625a1c099e1860c0ffa");
}

TEST(Identity, EveryDifferenceOfALayerIsAnotherModel) {
  const KvGeometry g = TestGeometry(3);
  std::set<std::string> seen = {ModelFingerprint(g, Fields{}).ToString()};
  size_t n = 1;
  for (uint32_t layer = 0; layer < 3; ++layer) {
    for (uint32_t LayerGeometry::*member : {&LayerGeometry::n_q_heads, &LayerGeometry::n_kv_heads,
                                            &LayerGeometry::key_dim, &LayerGeometry::value_dim}) {
      KvGeometry other = g;
      other.layers[layer].*member = 1;
      seen.insert(ModelFingerprint(other, Fields{}).ToString());
      ++n;
    }
    KvGeometry other = g;
    other.layers[layer].stored = false;
    seen.insert(ModelFingerprint(other, Fields{}).ToString());
    ++n;
  }
  EXPECT_EQ(seen.size(), n);
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
