#include "storage/segment/row_encoding.h"

#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>

#include "attention/rows/rows.h"
#include "prefixd/stored_part.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

// Coded holds one key or value of `x` after a round trip; its scale comes first in the stored
// bytes.
struct Coded {
  float scale = 0;
  std::vector<int> steps;
  std::vector<float> given, back;
  EncodingError error;
};

Coded ThereAndBack(DType dtype, const std::vector<float>& x) {
  const auto dim = static_cast<uint32_t>(x.size());
  const RowShape row{dim, 1, dtype};
  std::vector<std::byte> bytes(row.bytes());
  FromFloat(dtype, x, bytes.data());
  const float one = 1;
  FromFloat(dtype, {&one, 1}, bytes.data() + row.key_bytes());
  Coded out;
  out.given.resize(dim);
  ToFloat(dtype, bytes.data(), out.given);
  RowEncoder encoder;
  const auto encoded = encoder.Encode(row, bytes);
  EXPECT_FALSE(encoded.not_finite.has_value());
  EXPECT_EQ(encoded.rows.size(), 4 + dim + 5u);
  std::memcpy(&out.scale, encoded.rows.data(), 4);
  for (uint32_t i = 0; i < dim; ++i) {
    out.steps.push_back(static_cast<int8_t>(encoded.rows[4 + i]));
  }
  std::vector<std::byte> decoded(row.key_bytes());
  DecodeInt8(dtype, encoded.rows.first(4 + dim), decoded.data());
  out.back.resize(dim);
  ToFloat(dtype, decoded.data(), out.back);
  out.error = encoder.error();
  return out;
}

// Returns the rounding of the given dtype itself, for a value of magnitude `x`.
double Ulp(DType dtype, double x) {
  const double relative = dtype == DType::kF32 ? 0x1p-24 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
  return std::max(x * relative, dtype == DType::kF16 ? 0x1p-25 : 0x1p-134);
}

void ExpectClose(DType dtype, const Coded& c) {
  double largest = 0, difference = 0, norm = 0;
  for (const float x : c.given) largest = std::max(largest, std::abs(double{x}));
  for (size_t i = 0; i < c.given.size(); ++i) {
    const double d = double{c.back[i]} - double{c.given[i]};
    ASSERT_LE(std::abs(d),
              double{c.scale} * (0.5 + 1e-4) + Ulp(dtype, std::abs(double{c.given[i]}) * 1.01))
        << "element " << i << " of " << c.given.size() << " with scale " << c.scale;
    ASSERT_LE(std::abs(c.steps[i]), 127);
    difference += d * d / (largest * largest);
    norm += double{c.given[i]} / largest * (double{c.given[i]} / largest);
  }
  if (largest == 0) return;
  // The reported error must be the error made.
  EXPECT_NEAR(double{c.error.key_max}, std::sqrt(difference / norm),
              1e-4 * std::sqrt(difference / norm) + 1e-6);
  EXPECT_FLOAT_EQ(c.error.key_max, c.error.key_rms);
}

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBf16};

TEST(RowEncoding, RandomRowsComeBackWithinHalfAStep) {
  std::mt19937_64 rng(Seed("RowEncoding.RandomRowsComeBackWithinHalfAStep"));
  std::normal_distribution<float> normal;
  for (int round = 0; round < 300; ++round) {
    const DType dtype = kDTypes[round % 3];
    const uint32_t dims[] = {1, 7, 20, 64, 80, 96, 128, 256, 1000};
    std::vector<float> x(dims[rng() % std::size(dims)]);
    const float size = std::exp2(float(rng() % 20) - 14);  // finite as f16, the outlier too
    for (float& v : x) v = normal(rng) * size;
    if (round % 4 == 0) x[rng() % x.size()] *= 30;  // a channel that stands out
    ExpectClose(dtype, ThereAndBack(dtype, x));
  }
}

TEST(RowEncoding, HardRows) {
  const float kTiny = std::numeric_limits<float>::denorm_min();
  for (const DType dtype : kDTypes) {
    const Coded zero = ThereAndBack(dtype, std::vector<float>(64));
    EXPECT_EQ(zero.scale, 0.0f);
    EXPECT_EQ(zero.back, std::vector<float>(64));
    EXPECT_EQ(zero.error, EncodingError{});  // for a value of 1, which is exact too
    const float largest = dtype == DType::kF32   ? FLT_MAX
                          : dtype == DType::kF16 ? 65504.0f
                                                 : std::bit_cast<float>(0x7f7f0000u);
    for (const std::vector<float>& x :
         {std::vector<float>{largest, -largest, largest / 2, 0},
          std::vector<float>{-largest, 1, 1e-3f, 0},
          std::vector<float>{FLT_MIN, -FLT_MIN / 2, FLT_MIN / 3, 0},
          std::vector<float>{kTiny * 180, -kTiny * 127, kTiny * 63, kTiny, 0},
          std::vector<float>{kTiny, -kTiny, 0, 0}, std::vector<float>{-0.0f, 0.0f, -0.0f},
          std::vector<float>{0x1p-14f, 0x1p-24f, -0x1p-20f}}) {
      const Coded c = ThereAndBack(dtype, x);
      ExpectClose(dtype, c);
      for (const float v : c.back) EXPECT_TRUE(std::isfinite(v));
    }
  }
}

TEST(RowEncoding, TiesGoToEven) {
  // With 127 as the largest magnitude, the scale is 1 and elements are steps.
  const Coded c = ThereAndBack(DType::kF32, {127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 3.4999f});
  EXPECT_EQ(c.scale, 1.0f);
  EXPECT_EQ(c.steps, (std::vector<int>{127, 0, 2, 2, 0, -2, -2, 3}));
}

// This is the example of docs/format.md.
TEST(RowEncoding, WorkedExample) {
  const Coded c = ThereAndBack(DType::kF32, {1.0f, -0.5f, 0.26f, 0});
  EXPECT_EQ(std::bit_cast<uint32_t>(c.scale), 0x3c010204u);
  EXPECT_EQ(c.steps, (std::vector<int>{0x7f, -64, 0x21, 0}));
  EXPECT_NEAR(c.back[1], -0.5039f, 5e-5f);
}

TEST(RowEncoding, WholeStepsAreExact) {
  std::mt19937_64 rng(Seed("RowEncoding.WholeStepsAreExact"));
  for (const DType dtype : kDTypes) {
    std::vector<float> x = {127};
    for (int i = 0; i < 99; ++i) x.push_back(float(int(rng() % 255) - 127));
    const Coded c = ThereAndBack(dtype, x);
    EXPECT_EQ(c.back, x);
    EXPECT_EQ(c.error.key_max, 0.0f);
  }
}

TEST(RowEncoding, NotFiniteRowsAreNamedAndNotCounted) {
  const RowShape row{8, 6, DType::kBf16};
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (const size_t at : {0u, 5u, 13u}) {  // key or value of row 2
      std::vector<float> x(5 * 14, 1.25f);
      std::vector<std::byte> bytes(x.size() * 2);
      RowEncoder encoder;
      FromFloat(row.dtype, x, bytes.data());
      ASSERT_FALSE(encoder.Encode(row, bytes).not_finite.has_value());
      const EncodingError before = encoder.error();
      x[2 * 14 + at] = bad;
      for (size_t i = 0; i < 14; ++i) x[i] = float(i) * 0.37f;  // an error of another size
      FromFloat(row.dtype, x, bytes.data());
      EXPECT_EQ(encoder.Encode(row, bytes).not_finite, std::optional<size_t>(2));
      EXPECT_EQ(encoder.error(), before);
    }
  }
}

TEST(RowEncoding, ErrorsOfTwoSegmentsCombineByTheirRows) {
  const EncodingError a{0.5f, 0.1f, 0.2f, 0.2f}, b{0.25f, 0.3f, 0.4f, 0.2f};
  const EncodingError both = Combine(a, 300, b, 100);
  EXPECT_FLOAT_EQ(both.key_max, 0.5f);
  EXPECT_FLOAT_EQ(both.value_max, 0.4f);
  EXPECT_FLOAT_EQ(both.key_rms, std::sqrt((0.01f * 3 + 0.09f) / 4));
  EXPECT_FLOAT_EQ(both.value_rms, 0.2f);
  EXPECT_EQ(Combine({}, 0, {}, 0), EncodingError{});
}

TEST(RowEncoding, NamesAndSizes) {
  for (const RowEncoding e : {RowEncoding::kAsGiven, RowEncoding::kInt8}) {
    EXPECT_EQ(*RowEncodingFromName(RowEncodingName(e)), e);
  }
  EXPECT_CODE(RowEncodingFromName("int4"), Code::kInvalidArgument);
  const RowShape row{128, 64, DType::kBf16};
  EXPECT_EQ(StoredRowBytes(row, RowEncoding::kAsGiven).key, 256u);
  EXPECT_EQ(StoredRowBytes(row, RowEncoding::kInt8).key, 132u);
  EXPECT_EQ(StoredRowBytes(row, RowEncoding::kInt8).value, 68u);
}

}  // namespace
}  // namespace prefixd::storage
