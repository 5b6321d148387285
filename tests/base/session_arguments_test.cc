// Tests what refusals of layers and heads say.
#include "base/session_arguments.h"

#include "tests/support/expect_ok.h"

namespace prefixd {
namespace {

// Two layers of 4 KV heads, of which the second has 2 of its own.
KvGeometry TwoKinds() {
  KvGeometry g{2, 8, 4, 16, 16, DType::kBf16, {{0.25f, 0, 0}, {0.25f, 0, 0}}};
  g.layers[1].n_q_heads = 4;
  g.layers[1].n_kv_heads = 2;
  return g;
}

TEST(SessionArguments, RefusalsNameTheHeadsOfTheLayer) {
  const KvGeometry g = TwoKinds();
  EXPECT_OK(CheckHead(g, 0, 3));
  EXPECT_EQ(CheckHead(g, 1, 3).error().message, "KV head 3 is not one of the 2 of layer 1");
  EXPECT_EQ(CheckHead(g, 2, 0).error().message, "layer 2 is not one of the model's 2");
  EXPECT_OK(ResolveHeads(g, 0, {1, 3}));
  EXPECT_EQ(ResolveHeads(g, 1, {1, 3}).error().message,
            "KV heads 1..4 are not all among the 2 of layer 1");
  EXPECT_EQ(ResolvePutHeads(g, {3, 2}).error().message,
            "KV heads 3..5 are not all among the 4 of the model");
}

}  // namespace
}  // namespace prefixd
