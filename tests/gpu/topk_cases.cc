#include "tests/gpu/topk_cases.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "attention/step.h"
#include "gpu/step_gpu.h"
#include "tests/gpu/aligned_rows.h"
#include "tests/support/test.h"

namespace prefixd::gpu::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Components along the axes, one to four digits each, as many as there is room for.
CodeBook RandomBook(Random& random, uint32_t key_dim) {
  CodeBook book;
  book.key_dim = key_dim;
  book.centre = random.Normals(key_dim, 0.3f);
  uint32_t room = CodeFields(key_dim);
  for (uint32_t i = 0; i < key_dim && room > 0; ++i) {
    const uint32_t digits = random.Int(1, std::min(room, kMaxCodeDigits));
    book.digits.push_back(static_cast<uint8_t>(digits));
    room -= digits;
    const std::vector<float> direction =
        random.Normals(key_dim, 1.0f / static_cast<float>(1u << 2 * digits));
    for (const float x : direction) book.directions.push_back(FloatToBf16(x));
  }
  return book;
}

void AddCodes(Random& random, uint32_t key_dim, TopKCase::Group& group) {
  group.book = RandomBook(random, key_dim);
  group.codes.assign(CodeBlocks(group.rows.count()) * CodeBlockBytes(key_dim), std::byte{0});
  for (size_t i = 0; i < group.rows.count(); ++i) {
    std::vector<uint8_t> coordinates;
    for (const uint8_t digits : group.book->digits) {
      coordinates.push_back(static_cast<uint8_t>(random.Int(0, (1u << 2 * digits) - 1)));
    }
    PackCode(*group.book, coordinates, i, group.codes);
  }
}

// What the CPU says of the scores of one group, [G][n]: by rows, or by codes as they are scored.
std::vector<float> ScoresOf(const TopKCase& c, size_t index) {
  const TopKCase::Group& group = c.groups[index];
  const uint32_t G = c.shape.group, dim = c.shape.key_dim;
  const size_t n = group.rows.count();
  const std::span<const float> queries =
      std::span(c.queries).subspan(index * G * dim, size_t{G} * dim);
  std::vector<float> scores(G * n);
  if (!group.book) {
    Scores(queries, G, c.shape.layer, group.rows.view(), scores);
    return scores;
  }
  const CodeQueries prepared = PrepareCodeQueries(*group.book, queries, G, c.shape.layer.scale);
  for (uint32_t g = 0; g < G; ++g) {
    for (size_t i = 0; i < n; ++i) {
      int v = prepared.bias[g];
      for (uint32_t f = 0; f < prepared.fields; ++f) {
        const CodePlace place = PlaceOfCode(dim, i, f);
        const int digit = std::to_integer<int>(group.codes[place.byte]) >> place.shift & 3;
        v += prepared.weights[g * prepared.fields + f] * digit;
      }
      scores[g * n + i] = std::fma(prepared.mul[g], static_cast<float>(v), prepared.add[g]);
    }
  }
  return scores;
}

// Ranks of the CPU's scores: what a selection must be the largest of, but for rounding.
std::vector<double> RanksOf(const std::vector<float>& scores, uint32_t group, size_t n) {
  std::vector<double> rank(n, -kInf);
  for (uint32_t g = 0; g < group; ++g) {
    const float* row = scores.data() + g * n;
    const double max = n > 0 ? *std::max_element(row, row + n) : 0;
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += std::exp(row[i] - max);
    for (size_t i = 0; i < n; ++i) rank[i] = std::max(rank[i], row[i] - max - std::log(sum));
  }
  return rank;
}

void ExpectSelection(const TopKCase& c, size_t index, const Selection& got) {
  SCOPED_TRACE("group " + std::to_string(index) + ", k " + std::to_string(c.groups[index].k) +
               " of " + std::to_string(c.groups[index].rows.count()) + ", G " +
               std::to_string(c.shape.group) + ", dim " + std::to_string(c.shape.key_dim) +
               (c.shape.codes ? ", codes" : ", keys"));
  const TopKCase::Group& group = c.groups[index];
  const size_t n = group.rows.count();
  const uint32_t k = static_cast<uint32_t>(std::min<size_t>(group.k, n)), G = c.shape.group;
  ASSERT_EQ(got.ids.size(), k);
  const std::vector<float> scores = ScoresOf(c, index);
  const std::vector<double> rank = RanksOf(scores, G, n);
  std::vector<bool> taken(n, false);
  for (size_t i = 0; i < k; ++i) {
    ASSERT_GE(got.ids[i], group.first_id);
    ASSERT_LT(got.ids[i], group.first_id + n);
    if (i > 0) {
      ASSERT_GT(got.ids[i], got.ids[i - 1]);
    }
    taken[got.ids[i] - group.first_id] = true;
  }
  const Selection want =
      SelectByGroupMax(scores, G, static_cast<uint32_t>(n), k, group.first_id, !c.shape.codes);
  // Ranks that differ by rounding alone may change places; by codes also a weight that the device
  // rounded to its other neighbour.
  const double tolerance = c.shape.codes ? 5e-3 : 2e-5;
  double worst_in = kInf, best_out = -kInf;
  for (size_t i = 0; i < n; ++i) {
    if (taken[i]) worst_in = std::min(worst_in, rank[i]);
    if (!taken[i]) best_out = std::max(best_out, rank[i]);
  }
  if (k > 0 && k < n) {
    EXPECT_GE(worst_in, best_out - tolerance * (1 + std::fabs(best_out)));
  }
  for (uint32_t g = 0; g < G; ++g) {
    const Cut& cut = got.cuts[g];
    if (k == n) {
      EXPECT_EQ(cut.score, -kInf);
      EXPECT_EQ(cut.kind, CutKind::kExact);
      continue;
    }
    EXPECT_EQ(cut.kind, c.shape.codes ? CutKind::kApproximate : CutKind::kExact);
    EXPECT_NEAR(cut.score, want.cuts[g].score, 2 * tolerance * (1 + std::fabs(want.cuts[g].score)));
    for (size_t i = 0; i < n && !c.shape.codes; ++i) {
      if (taken[i]) continue;
      ASSERT_LE(scores[g * n + i], cut.score) << "head " << g << ", key " << i;
    }
  }
}

void ExpectSelections(const TopKRunner& run, const TopKCase& c) {
  const Result<TopKResult> got = run(c);
  ASSERT_TRUE(got.ok()) << got.error().ToString();
  for (size_t i = 0; i < c.groups.size(); ++i) {
    ASSERT_EQ(got->errors[i], kGroupOk) << GroupError(got->errors[i], 0).error().message;
    ExpectSelection(c, i, got->groups[i]);
  }
}

TopKCase MakeCase(Random& random, uint32_t group, uint32_t key_dim, bool codes,
                  const std::vector<std::pair<uint32_t, uint32_t>>& counts_and_ks) {
  TopKCase c;
  c.shape.n_groups = static_cast<uint32_t>(counts_and_ks.size());
  c.shape.group = group;
  c.shape.key_dim = key_dim;
  c.shape.dtype = random.AnyDType();
  c.shape.layer = {1 / std::sqrt(static_cast<float>(key_dim)), 0, 0};
  c.shape.codes = codes;
  c.shape.max_keys = 1;
  for (const auto& [count, k] : counts_and_ks) {
    TopKCase::Group of;
    of.rows = AlignedRows(random, {key_dim, random.Int(1, 5), c.shape.dtype}, count);
    of.k = k;
    of.first_id = random.Int(0, 100);
    if (codes) AddCodes(random, key_dim, of);
    c.shape.max_keys = std::max(c.shape.max_keys, count);
    c.shape.max_k = std::max(c.shape.max_k, std::min(k, count));
    c.groups.push_back(std::move(of));
  }
  c.queries = random.Normals(size_t{c.shape.n_groups} * group * key_dim);
  return c;
}

}  // namespace

void TopKRandomBatches(const TopKRunner& run, uint64_t seed, int batches, uint32_t max_dim,
                       uint32_t max_keys) {
  Random random(seed);
  for (int i = 0; i < batches; ++i) {
    SCOPED_TRACE("batch " + std::to_string(i));
    std::vector<std::pair<uint32_t, uint32_t>> sizes;
    for (uint32_t n = random.Int(1, 3); n > 0; --n) {
      const uint32_t count = random.Int(0, max_keys);
      sizes.emplace_back(count,
                         random.Chance(0.2) ? count + random.Int(0, 3) : random.Int(0, count));
    }
    TopKCase c =
        MakeCase(random, random.Int(1, 9), random.Int(1, max_dim), random.Chance(0.5), sizes);
    if (!c.shape.codes && random.Chance(0.2)) c.shape.layer.softcap = 5;
    ExpectSelections(run, c);
  }
}

void TopKHardCases(const TopKRunner& run, uint64_t seed) {
  Random random(seed);
  for (const bool codes : {false, true}) {
    SCOPED_TRACE(codes ? "by codes" : "by keys");
    ExpectSelections(run, MakeCase(random, 4, 16, codes, {{0, 0}, {0, 5}, {1, 1}, {1, 0}}));
    ExpectSelections(run, MakeCase(random, 16, 24, codes, {{2048, 1}, {2049, 2048}, {2047, 100}}));
    ExpectSelections(run, MakeCase(random, 1, 256, codes, {{300, 17}}));
  }
  // All keys alike: the lowest ids are taken, and the cut is the common score.
  TopKCase same = MakeCase(random, 3, 12, false, {{2600, 37}});
  const std::vector<float> key = same.groups[0].rows.Key(0);
  for (size_t i = 0; i < 2600; ++i) same.groups[0].rows.Set(i, key, same.groups[0].rows.Value(i));
  ExpectSelections(run, same);
  const Result<TopKResult> lowest = run(same);
  ASSERT_TRUE(lowest.ok());
  EXPECT_EQ(lowest->groups[0].ids.back(), same.groups[0].first_id + 36);
  // A key that is no number ranks first, so that the step reads and refuses it.
  TopKCase poisoned = MakeCase(random, 2, 8, false, {{500, 3}});
  std::vector<float> bad = poisoned.groups[0].rows.Key(444);
  bad[5] = std::numeric_limits<float>::quiet_NaN();
  poisoned.groups[0].rows.Set(444, bad, poisoned.groups[0].rows.Value(444));
  const Result<TopKResult> found = run(poisoned);
  ASSERT_TRUE(found.ok());
  EXPECT_TRUE(std::ranges::count(found->groups[0].ids, 444 + poisoned.groups[0].first_id) == 1);
  // A query that is no number, and more keys than the shape has room for, are errors of a group.
  TopKCase wrong = MakeCase(random, 2, 8, false, {{50, 3}, {60, 2}, {61, 2}});
  wrong.queries[2 * 2 * 8 + 3] = kInf;
  wrong.shape.max_keys = 60;
  wrong.groups[0].k = 2;
  const Result<TopKResult> refused = run(wrong);
  ASSERT_TRUE(refused.ok());
  EXPECT_EQ(refused->errors[0], kGroupOk);
  EXPECT_EQ(refused->errors[1], kGroupOk);
  const Status why = GroupError(refused->errors[2], 0);
  ASSERT_FALSE(why.ok());
  EXPECT_NE(why.error().message.find("counts do not fit"), std::string::npos)
      << why.error().message;
  ExpectSelection(wrong, 0, refused->groups[0]);
  TopKCase odd = MakeCase(random, 2, 9, false, {{50, 3}});
  odd.groups[0].rows = OwnedRows(odd.groups[0].rows.view().shape, 50, 1);
  const Result<TopKResult> misaligned = run(odd);
  ASSERT_TRUE(misaligned.ok());
  EXPECT_NE(GroupError(misaligned->errors[0], 0).error().message.find("aligned"),
            std::string::npos);
}

}  // namespace prefixd::gpu::testing
