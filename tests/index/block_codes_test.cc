// Tests codes in blocks: the whole number of a key is its score, within the stated bound.
#include "index/codes/block_codes.h"

#include <cmath>
#include <limits>
#include <vector>

#include "index/codes/block_queries.h"
#include "index/codes/code_scan.h"
#include "tests/support/random_block_codes.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::Random;
using testing::RandomBlockCodes;

TEST(BlockCodes, WholeNumbersAreScoresWithinTheBound) {
  Random random(testing::Seed("WholeNumbersAreScoresWithinTheBound"));
  for (int round = 0; round < 40; ++round) {
    const uint32_t dim = random.Int(1, 150), heads = random.Int(1, 5);
    const RandomBlockCodes codes(random, dim, random.Int(1, round % 8 == 0 ? 2300 : 200));
    ASSERT_TRUE(codes.book.Validate().ok());
    const BlockCodes view = codes.view();
    ASSERT_TRUE(view.Validate().ok());
    const float scale = round % 5 == 0 ? -0.2f : 0.1f;
    const std::vector<float> q = random.Normals(size_t{heads} * dim);
    const auto queries = PrepareBlockQueries(codes.book, q, heads, scale);
    ASSERT_TRUE(queries.ok());
    const size_t windows = view.layout.n_windows, blocks = view.layout.n_blocks;
    std::vector<int16_t> means(heads * windows * kCodeBlockKeys), keys(heads * blocks * 32);
    const CodeQueries &m = queries->means, &k = queries->keys;
    CodeScan().scan(view.means, nullptr, windows,
                    {m.weights.data(), m.bias.data(), heads, m.fields}, means.data(),
                    windows * kCodeBlockKeys);
    const size_t ld = windows * kCodeBlockKeys;
    std::vector<int16_t> bias(means.size());
    for (uint32_t g = 0; g < heads; ++g) {
      CodeScan().scaled(means.data() + g * ld, ld, queries->units_of_mean[g], bias.data() + g * ld);
      for (size_t b = 0; b < blocks; ++b) {
        ASSERT_EQ(int32_t{bias[g * ld + b]}, queries->BlockBias(g, means[g * ld + b]));
      }
    }
    CodeScan().scan(view.codes, nullptr, blocks,
                    {k.weights.data(), k.bias.data(), heads, k.fields, bias.data(), ld},
                    keys.data(), blocks * kCodeBlockKeys);
    for (size_t place = 0; place < blocks * kCodeBlockKeys; ++place) {
      if (view.tokens[place] == kNoKey) continue;
      const std::vector<double> key = codes.Key(place);
      for (uint32_t g = 0; g < heads; ++g) {
        double score = 0, size = 0;
        for (uint32_t d = 0; d < dim; ++d) {
          score += double{scale} * q[g * dim + d] * key[d];
          size += std::fabs(double{scale} * q[g * dim + d] * key[d]);
        }
        const double said = double{k.mul[g]} * keys[g * blocks * kCodeBlockKeys + place] + k.add[g];
        const double bound = k.mul[g] * (1.5 * k.fields + 0.5) + 1.5 * k.fields * m.mul[g];
        ASSERT_NEAR(said, score, bound + 1e-5 * (size + std::fabs(k.add[g]) + 32767 * k.mul[g]))
            << "place " << place << ", head " << g << ", dim " << dim;
      }
    }
  }
}

TEST(BlockCodes, ScoresThatOverflowAreRefused) {
  Random random(testing::Seed("ScoresThatOverflowAreRefused"));
  RandomBlockCodes codes(random, 8, 40);
  codes.book.keys.centre.assign(8, 1e30f);
  const std::vector<float> q(8, 1e30f);
  EXPECT_FALSE(PrepareBlockQueries(codes.book, q, 1, 1).ok());
}

}  // namespace
}  // namespace prefixd
