#include <bit>
#include <cmath>
#include <limits>

#include "attention/rows/rows.h"
#include "tests/support/infinity.h"
#include "tests/support/random_kv.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::kInf;

KvGeometry Tiny() { return {2, 4, 2, 64, 32, DType::kBf16, {{0.125f, 0, 0}, {0.125f, 30, 0}}}; }

TEST(DTypes, NamesRoundTrip) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    const Result<DType> parsed = DTypeFromName(DTypeName(dtype));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(*parsed, dtype);
  }
  EXPECT_FALSE(DTypeFromName("fp8").ok());
}

TEST(DTypes, KnownValues) {
  EXPECT_EQ(F16ToFloat(0x3c00), 1.0f);
  EXPECT_EQ(F16ToFloat(0x0001), 0x1p-24f);
  EXPECT_EQ(F16ToFloat(0x7bff), 65504.0f);
  EXPECT_EQ(F16ToFloat(0xfc00), -kInf);
  EXPECT_EQ(FloatToF16(65519.0f), 0x7bff);
  EXPECT_EQ(FloatToF16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToF16(0x1p-25f), 0x0000);      // tie, to even
  EXPECT_EQ(FloatToF16(0x1.8p-24f), 0x0002);    // tie, to even
  EXPECT_EQ(FloatToBf16(1.00390625f), 0x3f80);  // tie, to even
  EXPECT_EQ(FloatToBf16(1.01171875f), 0x3f82);  // tie, to even
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(F16ToFloat(FloatToF16(std::nanf("")))));
}

TEST(DTypes, EveryPatternSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto pattern = static_cast<uint16_t>(bits);
    if (!std::isnan(F16ToFloat(pattern))) {
      ASSERT_EQ(FloatToF16(F16ToFloat(pattern)), pattern);
    }
    if (!std::isnan(Bf16ToFloat(pattern))) {
      ASSERT_EQ(FloatToBf16(Bf16ToFloat(pattern)), pattern);
    }
  }
}

TEST(DTypes, RoundingPicksTheNearestNeighbour) {
  testing::Random random(testing::Seed("DTypes.Rounding"));
  for (int i = 0; i < 20000; ++i) {
    const float x = random.Normal() * static_cast<float>(std::exp2(random.Uniform(-20, 14)));
    const uint16_t half = FloatToF16(x);
    const double error = std::abs(double{F16ToFloat(half)} - x);
    // From 65520 on, halfway to the next power of two, float16 overflows to infinity.
    ASSERT_EQ(std::isinf(F16ToFloat(half)), std::abs(x) >= 65520.0f) << x;
    for (uint16_t other : {static_cast<uint16_t>(half + 1), static_cast<uint16_t>(half - 1)}) {
      if (std::isinf(F16ToFloat(half)) || std::isnan(F16ToFloat(other))) continue;
      ASSERT_LE(error, std::abs(double{F16ToFloat(other)} - x)) << x;
    }
    ASSERT_LE(std::abs(Bf16ToFloat(FloatToBf16(x)) - x), std::abs(x) * 0x1p-8) << x;
  }
}

TEST(DTypes, UnalignedBuffersRoundTrip) {
  testing::Random random(testing::Seed("DTypes.Unaligned"));
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    for (size_t n : {0, 1, 7, 16, 33, 100}) {
      std::vector<std::byte> bytes(n * DTypeBytes(dtype) + 1);
      const std::vector<float> x = random.Normals(n);
      FromFloat(dtype, x, bytes.data() + 1);
      std::vector<float> back(n);
      ToFloat(dtype, bytes.data() + 1, back);
      // Half of the distance of float16's subnormal numbers is the absolute part.
      for (size_t i = 0; i < n; ++i) EXPECT_NEAR(back[i], x[i], std::abs(x[i]) * 0x1p-8 + 0x1p-25);
    }
  }
}

TEST(RowsView, KeyThenValueAtAnyStride) {
  const RowShape shape{3, 2, DType::kF32};
  testing::OwnedRows rows(shape, 2, 5);
  rows.Set(1, std::vector<float>{1, 2, 3}, std::vector<float>{4, 5});
  EXPECT_EQ(shape.bytes(), 20u);
  EXPECT_EQ(rows.view().value(1) - rows.view().key(1), 12);
  EXPECT_EQ(rows.view().Sub(1, 1).key(0) - rows.view().data, 25);
  EXPECT_EQ(rows.Value(1)[1], 5.0f);
}

TEST(KvGeometry, DerivedSizes) {
  const KvGeometry geometry = Tiny();
  EXPECT_TRUE(geometry.Validate().ok());
  EXPECT_EQ(geometry.group_size(0), 2u);
  EXPECT_EQ(geometry.row(0).bytes(), 192u);
  EXPECT_EQ(geometry.token_bytes(), 768u);
}

void ExpectRefused(const KvGeometry& geometry, const std::string& field) {
  const Status status = geometry.Validate();
  ASSERT_FALSE(status.ok()) << field;
  EXPECT_EQ(status.error().code, Code::kInvalidArgument);
  EXPECT_NE(status.error().message.find(field), std::string::npos) << status.error().message;
}

TEST(KvGeometry, RefusalsNameTheField) {
  KvGeometry g = Tiny();
  g.n_layers = 0;
  ExpectRefused(g, "n_layers");
  g = Tiny();
  g.n_q_heads = 5;
  ExpectRefused(g, "divide");
  g = Tiny();
  g.n_kv_heads = 0;
  ExpectRefused(g, "n_kv_heads");
  g = Tiny();
  g.key_dim = 1025;
  ExpectRefused(g, "key_dim");
  g = Tiny();
  g.value_dim = 0;
  ExpectRefused(g, "value_dim");
  g = Tiny();
  g.n_q_heads = 130, g.n_kv_heads = 2;
  ExpectRefused(g, "group size");
  g = Tiny();
  g.layers.pop_back();
  ExpectRefused(g, "layers");
  g = Tiny();
  g.layers[1].scale = 0;
  ExpectRefused(g, "layer 1: scale");
  g = Tiny();
  g.layers[0].softcap = -1;
  ExpectRefused(g, "layer 0: softcap");
  g = Tiny();
  g.layers[0].scale = std::nanf("");
  ExpectRefused(g, "layer 0: scale");
  g = Tiny();
  g.dtype = static_cast<DType>(9);
  ExpectRefused(g, "dtype");
}

TEST(KvGeometry, LayersMayDiffer) {
  KvGeometry g = Tiny();
  EXPECT_TRUE(g.alike());
  EXPECT_EQ(g.heads().count(), 4u);
  g.layers[1].n_q_heads = 9, g.layers[1].n_kv_heads = 3, g.layers[1].value_dim = 48;
  ASSERT_TRUE(g.Validate().ok());
  EXPECT_FALSE(g.alike());
  EXPECT_EQ(g.layer(0), (LayerShape{4, 2, 64, 32, DType::kBf16}));
  EXPECT_EQ(g.layer(1), (LayerShape{9, 3, 64, 48, DType::kBf16}));
  EXPECT_EQ(g.row(1).bytes(), 224u);
  EXPECT_EQ(g.group_size(1), 3u);
  EXPECT_EQ(g.heads().count(), 5u);
  EXPECT_EQ(g.token_bytes(), 2 * 192u + 3 * 224u);
  g.layers[0].stored = false;
  ASSERT_TRUE(g.Validate().ok());
  EXPECT_EQ(g.heads().count(), 3u);
  EXPECT_EQ(g.token_bytes(), 3 * 224u);
}

TEST(KvGeometry, NamingTheModelsNumbersIsNoDifference) {
  const KvGeometry g = Tiny();
  KvGeometry same = g, other = g;
  same.layers[1].n_kv_heads = 2, same.layers[1].key_dim = 64;
  EXPECT_TRUE(same.alike());
  EXPECT_TRUE(same == g);
  other.layers[1].n_kv_heads = 1;
  EXPECT_FALSE(other == g);
  other = g;
  other.layers[0].stored = false;
  EXPECT_FALSE(other == g);
  other = g;
  other.layers[0].softcap = 1;
  EXPECT_FALSE(other == g);
}

TEST(KvGeometry, RefusalsNameTheLayer) {
  KvGeometry g = Tiny();
  g.layers[1].n_kv_heads = 1025;
  ExpectRefused(g, "layer 1: n_kv_heads is 1025; must be 1..1024");
  g = Tiny();
  g.layers[1].n_kv_heads = 3;
  ExpectRefused(g, "layer 1: n_kv_heads (3) must divide n_q_heads (4)");
  g = Tiny();
  g.layers[0].n_q_heads = 2 * 65;
  ExpectRefused(g, "layer 0: group size");
  g = Tiny();
  g.layers[0].key_dim = 1025;
  ExpectRefused(g, "layer 0: key_dim");
  g = Tiny();
  for (LayerGeometry& layer : g.layers) layer.stored = false;
  ExpectRefused(g, "no layer is stored");
  g = Tiny();
  g.n_layers = kMaxLayerKinds + 2;
  g.layers.assign(g.n_layers, {0.125f, 0, 0});
  for (uint32_t l = 1; l < g.n_layers; ++l) g.layers[l].key_dim = 100 + l;
  ExpectRefused(g, "65 kinds");
  g.layers.back().key_dim = 101;
  EXPECT_TRUE(g.Validate().ok());
}

}  // namespace
}  // namespace prefixd
