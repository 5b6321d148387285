// Tests how heads are numbered where layers differ, and what a range of a model's heads is in a
// layer.
#include "prefixd/head_index.h"

#include <random>

#include "base/session_arguments.h"
#include "tests/support/expect_ok.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(HeadIndex, NumbersEachHeadOnceInOrder) {
  std::mt19937_64 rng(testing::Seed("HeadIndex.NumbersEachHeadOnceInOrder"));
  for (int round = 0; round < 300; ++round) {
    std::vector<uint32_t> heads(1 + rng() % 40);
    const bool alike = round % 3 == 0;
    const auto n = static_cast<uint32_t>(1 + rng() % 9);
    for (uint32_t& h : heads) h = alike ? n : static_cast<uint32_t>(rng() % 9);
    const HeadIndex differing(heads), same(static_cast<uint32_t>(heads.size()), n);
    for (const HeadIndex* index : {&differing, &same}) {
      if (index == &same && !alike) continue;
      ASSERT_EQ(index->layers(), heads.size());
      size_t next = 0;
      for (uint32_t layer = 0; layer < heads.size(); ++layer) {
        ASSERT_EQ(index->heads_in(layer), heads[layer]);
        ASSERT_EQ(index->of(layer, 0), next);
        for (uint32_t head = 0; head < heads[layer]; ++head, ++next) {
          ASSERT_EQ(index->of(layer, head), next);
          ASSERT_EQ(index->layer_of(next), layer);
          ASSERT_EQ(index->head_of(next), head);
        }
      }
      ASSERT_EQ(index->count(), next);
    }
  }
  EXPECT_EQ(HeadIndex().count(), 0u);
}

// 8 heads of the model; layers with 8, 4, 16, none and 3 of their own.
KvGeometry Geometry() {
  KvGeometry g{5, 16, 8, 64, 64, DType::kBf16, std::vector<LayerGeometry>(5, {0.125f, 0, 0})};
  g.layers[1].n_kv_heads = 4;
  g.layers[2].n_kv_heads = 16;
  g.layers[2].n_q_heads = 48;
  g.layers[3].stored = false;
  g.layers[4].n_kv_heads = 3;
  g.layers[4].n_q_heads = 3;
  return g;
}

TEST(PutHeads, AreTheSameShareOfEachLayer) {
  KvGeometry g = Geometry();
  ASSERT_OK(g.Validate());
  ASSERT_OK(ResolvePutHeads(g, {}));
  EXPECT_EQ(*ResolvePutHeads(g, {}), (HeadRange{0, 8}));
  const auto third = ResolvePutHeads(g, {2, 2});
  EXPECT_CODE(third, Code::kInvalidArgument);
  EXPECT_EQ(third.error().message, "KV heads 2..4 of 8 are no whole heads of the 3 of layer 4");
  g.layers[4].n_kv_heads = g.layers[4].n_q_heads = 0;
  const auto part = ResolvePutHeads(g, {2, 2});
  ASSERT_OK(part);
  EXPECT_EQ(HeadsIn(g, 0, *part), (HeadRange{2, 2}));
  EXPECT_EQ(HeadsIn(g, 1, *part), (HeadRange{1, 1}));
  EXPECT_EQ(HeadsIn(g, 2, *part), (HeadRange{4, 4}));
  EXPECT_EQ(HeadsIn(g, 3, *part), (HeadRange{0, 0}));
  EXPECT_CODE(ResolvePutHeads(g, {1, 2}), Code::kInvalidArgument);  // half a head of layer 1
  EXPECT_CODE(ResolvePutHeads(g, {8, 0}), Code::kInvalidArgument);
  EXPECT_CODE(ResolvePutHeads(g, {2, 7}), Code::kInvalidArgument);
  const KvGeometry own = GeometryOf(g, *part);
  ASSERT_OK(own.Validate());
  EXPECT_EQ(own.layer(0), (LayerShape{4, 2, 64, 64, DType::kBf16}));
  EXPECT_EQ(own.layer(1), (LayerShape{4, 1, 64, 64, DType::kBf16}));
  EXPECT_EQ(own.layer(2), (LayerShape{12, 4, 64, 64, DType::kBf16}));
  EXPECT_EQ(own.layer(3), (LayerShape{0, 0, 0, 0, DType::kBf16}));
}

TEST(StepHeads, AreThoseOfTheLayer) {
  const KvGeometry g = Geometry();
  EXPECT_EQ(*ResolveHeads(g, 2, {9, 0}), (HeadRange{9, 7}));
  EXPECT_CODE(ResolveHeads(g, 1, {4, 0}), Code::kInvalidArgument);
  EXPECT_CODE(CheckHead(g, 1, 4), Code::kInvalidArgument);
  EXPECT_OK(CheckHead(g, 2, 15));
  const Status unstored = CheckHead(g, 3, 0);
  EXPECT_CODE(unstored, Code::kInvalidArgument);
  EXPECT_EQ(unstored.error().message, "layer 3 has no rows: the model was registered without them");
  std::vector<float> q(3 * 48 * 64), y(q), lse(3 * 48);
  EXPECT_OK(CheckQueries(g, 2, {}, 3, q, y, lse));
  EXPECT_CODE(CheckQueries(g, 0, {}, 3, q, y, lse), Code::kInvalidArgument);
  EXPECT_CODE(CheckQueries(g, 3, {}, 0, {}, {}, {}), Code::kInvalidArgument);
  EXPECT_CODE(CheckPutRun(g, 10, 3, 0, 10), Code::kInvalidArgument);
  EXPECT_OK(CheckPutRun(g, 10, 4, 0, 10));
}

}  // namespace
}  // namespace prefixd
