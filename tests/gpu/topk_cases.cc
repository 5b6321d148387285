#include "tests/gpu/topk_cases.h"
#include "index/ranking/group_ranking.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "attention/step/step.h"
#include "index/codes/block_queries.h"
#include "index/codes/code_scan.h"
#include "prefixd/gpu/step.h"
#include "tests/gpu/aligned_rows.h"
#include "tests/support/infinity.h"
#include "tests/support/test.h"

namespace prefixd::gpu::testing {
namespace {

using prefixd::testing::kInf;

std::span<const float> QueriesOf(const TopKCase& c, size_t index) {
  const size_t n = size_t{c.shape.group} * c.shape.key_dim;
  return std::span(c.queries).subspan(index * n, n);
}

// What the CPU says of the candidates of one group by their codes: whole numbers [G][candidates].
struct CpuCodes {
  BlockQueries queries;
  std::vector<int16_t> values;
};
CpuCodes CodesOf(const TopKCase& c, size_t index) {
  const TopKCase::Group& group = c.groups[index];
  const uint32_t G = c.shape.group, n = group.candidates();
  const BlockCodes codes = group.codes->view();
  CpuCodes out;
  out.queries =
      *PrepareBlockQueries(group.codes->book, QueriesOf(c, index), G, c.shape.layer.scale);
  out.values.resize(size_t{G} * n);
  const CodeQueries &means = out.queries.means, &keys = out.queries.keys;
  const size_t ld = codes.layout.n_windows * kCodeBlockKeys;
  const size_t n_places = codes.layout.n_blocks * kCodeBlockKeys;
  std::vector<int16_t> of_mean(G * ld), bias(G * ld), of_key(G * n_places);
  CodeScan().scan(codes.means, nullptr, codes.layout.n_windows,
                  {means.weights.data(), means.bias.data(), G, means.fields}, of_mean.data(), ld);
  for (uint32_t g = 0; g < G; ++g) {
    CodeScan().scaled(of_mean.data() + g * ld, ld, out.queries.units_of_mean[g],
                      bias.data() + g * ld);
  }
  CodeScan().scan(codes.codes, nullptr, codes.layout.n_blocks,
                  {keys.weights.data(), keys.bias.data(), G, keys.fields, bias.data(), ld},
                  of_key.data(), n_places);
  for (size_t place = 0; place < n_places; ++place) {
    if (codes.tokens[place] == kNoKey) continue;
    const uint32_t key = codes.key(place);
    if (key < group.skip || key >= group.count()) continue;
    for (uint32_t g = 0; g < G; ++g) {
      out.values[size_t{g} * n + key - group.skip] = of_key[g * n_places + place];
    }
  }
  return out;
}

// What the CPU says of the candidates of one group, [G][candidates]: by rows, or by codes.
std::vector<float> ScoresOf(const TopKCase& c, size_t index) {
  const TopKCase::Group& group = c.groups[index];
  const uint32_t G = c.shape.group, n = group.candidates();
  std::vector<float> scores(size_t{G} * n);
  if (!c.shape.codes) {
    RowsView rows = group.rows.view();
    rows.data += group.skip * rows.stride;
    rows.count = n;
    Scores(QueriesOf(c, index), G, c.shape.layer, rows, scores);
    return scores;
  }
  const CpuCodes codes = CodesOf(c, index);
  const CodeQueries& keys = codes.queries.keys;
  const float cap = c.shape.layer.softcap;
  for (uint32_t g = 0; g < G; ++g) {
    for (uint32_t i = 0; i < n; ++i) {
      float& score = scores[size_t{g} * n + i];
      score = std::fma(keys.mul[g], float(codes.values[size_t{g} * n + i]), keys.add[g]);
      if (cap > 0) score = cap * std::tanh(score / cap);
    }
  }
  return scores;
}

// What a runner saw of codes: the CPU's whole numbers to the bit, which are scores of the keys that
// the codes stand for within the bound of index/codes/block_queries.h.
void ExpectCodes(const TopKCase& c, size_t index, std::span<const CodesSeen> seen) {
  const TopKCase::Group& group = c.groups[index];
  const uint32_t G = c.shape.group, dim = c.shape.key_dim, n = group.candidates();
  if (n == 0) return;
  const CpuCodes want = CodesOf(c, index);
  const std::span<const float> q = QueriesOf(c, index);
  const BlockCodes codes = group.codes->view();
  const uint32_t fields = CodeFields(dim);
  for (uint32_t g = 0; g < G; ++g) {
    const CodesSeen& got = seen[g];
    EXPECT_NEAR(got.mul, want.queries.keys.mul[g], 1e-6 * got.mul);
    ASSERT_EQ(got.values.size(), n);
    for (uint32_t i = 0; i < n; ++i) {
      ASSERT_EQ(got.values[i], want.values[size_t{g} * n + i]) << "head " << g << ", key " << i;
    }
  }
  for (size_t place = 0; place < codes.layout.n_blocks * kCodeBlockKeys; place += 7) {
    if (codes.tokens[place] == kNoKey) continue;
    const uint32_t i = codes.key(place);
    if (i < group.skip || i >= group.count()) continue;
    const std::vector<double> key = group.codes->Key(place);
    for (uint32_t g = 0; g < G; ++g) {
      double score = 0, size = 0;
      for (uint32_t d = 0; d < dim; ++d) {
        score += double{c.shape.layer.scale} * q[g * dim + d] * key[d];
        size += std::fabs(double{c.shape.layer.scale} * q[g * dim + d] * key[d]);
      }
      const CodesSeen& got = seen[g];
      const double bound = got.mul * (1.5 * fields + 0.5) + 1.5 * fields * got.mean_mul;
      const double said = double{got.mul} * got.values[i - group.skip] + got.add;
      ASSERT_NEAR(said, score, bound + 1e-5 * (size + std::fabs(got.add) + 32767 * got.mul))
          << "head " << g << ", key " << i;
    }
  }
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
               " of " + std::to_string(c.groups[index].candidates()) + ", G " +
               std::to_string(c.shape.group) + ", dim " + std::to_string(c.shape.key_dim) +
               (c.shape.codes ? ", codes" : ", keys"));
  const TopKCase::Group& group = c.groups[index];
  const size_t n = group.candidates();
  const uint32_t first = group.first_id + group.skip;
  const uint32_t k = static_cast<uint32_t>(std::min<size_t>(group.k, n)), G = c.shape.group;
  ASSERT_EQ(got.ids.size(), k);
  const std::vector<float> scores = ScoresOf(c, index);
  const std::vector<double> rank = RanksOf(scores, G, n);
  std::vector<bool> taken(n, false);
  for (size_t i = 0; i < k; ++i) {
    ASSERT_GE(got.ids[i], first);
    ASSERT_LT(got.ids[i], first + n);
    if (i > 0) {
      ASSERT_GT(got.ids[i], got.ids[i - 1]);
    }
    taken[got.ids[i] - first] = true;
  }
  const Selection want =
      SelectByGroupMax(scores, G, static_cast<uint32_t>(n), k, first, !c.shape.codes);
  // Ranks that differ by rounding alone, of the scores and of their log-sum-exp, may change places.
  double largest = 0;
  for (const float score : scores) largest = std::max(largest, std::fabs(double{score}));
  const double tolerance = 2e-5 * (1 + largest);
  double worst_in = kInf, best_out = -kInf;
  for (size_t i = 0; i < n; ++i) {
    if (taken[i]) worst_in = std::min(worst_in, rank[i]);
    if (!taken[i]) best_out = std::max(best_out, rank[i]);
  }
  if (k > 0 && k < n) {
    EXPECT_GE(worst_in, best_out - tolerance);
  }
  for (uint32_t g = 0; g < G; ++g) {
    const Cut& cut = got.cuts[g];
    if (k == n) {
      EXPECT_EQ(cut.score, -kInf);
      EXPECT_EQ(cut.kind, CutKind::kExact);
      continue;
    }
    EXPECT_EQ(cut.kind, c.shape.codes ? CutKind::kApproximate : CutKind::kExact);
    EXPECT_NEAR(cut.score, want.cuts[g].score, 2 * tolerance);
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
    if (!c.shape.codes) continue;
    ExpectCodes(c, i, std::span(got->seen).subspan(i * c.shape.group, c.shape.group));
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
    of.k = std::min(k, kMaxTopK);
    of.first_id = random.Int(0, 100);
    if (random.Chance(0.4)) of.skip = random.Int(0, count);
    if (codes) {
      of.codes.emplace(random, key_dim, count + (random.Chance(0.4) ? random.Int(0, 2000) : 0));
    }
    c.shape.max_keys = std::max(c.shape.max_keys, count);
    c.shape.max_k = std::max(c.shape.max_k, std::min(of.k, count));
    c.groups.push_back(std::move(of));
  }
  c.queries = random.Normals(size_t{c.shape.n_groups} * group * key_dim);
  return c;
}

}  // namespace

const TopKSource* PackTopK(const TopKCase& c, internal::HostImage& image) {
  std::vector<TopKSource> sources;
  for (const TopKCase::Group& group : c.groups) {
    TopKSource source;
    const RowsView rows = group.rows.view();
    source.count = group.count();
    source.skip = group.skip;
    source.key_stride = rows.stride;
    source.first_id = group.first_id;
    source.k = group.k;
    source.keys = image.Here();
    image.AddBytes(rows.data, rows.count * rows.stride);
    if (group.codes) {
      const BlockCodeBook& of = group.codes->book;
      const DeviceCodeBook book{static_cast<uint32_t>(of.keys.components()),
                                image.Add<float>(of.keys.centre),
                                image.Add<uint8_t>(of.keys.digits),
                                image.Add<uint8_t>(of.mean_digits),
                                image.Add<float>(of.mean_ratios),
                                image.Add<uint16_t>(of.keys.directions)};
      const BlockLayout layout = group.codes->view().layout;
      source.codes.book = image.Add(std::span(&book, 1));
      const auto* arrays = image.Add<std::byte>(group.codes->arrays);
      source.codes.blocks = arrays;
      source.codes.means = arrays + layout.means;
      source.codes.tokens = reinterpret_cast<const uint16_t*>(arrays + layout.tokens);
      source.codes.stored = static_cast<uint32_t>(layout.n_keys);
    }
    sources.push_back(source);
  }
  return image.Add<TopKSource>(sources);
}

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
    if (random.Chance(0.2)) c.shape.layer.softcap = 5;
    if (random.Chance(0.1)) c.shape.layer.scale = -c.shape.layer.scale;
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
  same.groups[0].skip = 17;
  const std::vector<float> key = same.groups[0].rows.Key(0);
  for (size_t i = 0; i < 2600; ++i) same.groups[0].rows.Set(i, key, same.groups[0].rows.Value(i));
  ExpectSelections(run, same);
  const Result<TopKResult> lowest = run(same);
  ASSERT_TRUE(lowest.ok());
  EXPECT_EQ(lowest->groups[0].ids.back(), same.groups[0].first_id + 17 + 36);
  // A key that is no number ranks first, so that the step reads and refuses it.
  TopKCase poisoned = MakeCase(random, 2, 8, false, {{500, 3}});
  poisoned.groups[0].skip = 0;
  std::vector<float> bad = poisoned.groups[0].rows.Key(444);
  bad[5] = std::numeric_limits<float>::quiet_NaN();
  poisoned.groups[0].rows.Set(444, bad, poisoned.groups[0].rows.Value(444));
  const Result<TopKResult> found = run(poisoned);
  ASSERT_TRUE(found.ok());
  EXPECT_TRUE(std::ranges::count(found->groups[0].ids, 444 + poisoned.groups[0].first_id) == 1);
  // Scores that overflow, codes that hold fewer keys than are asked for, and a book of more
  // components than a key has dimensions, are errors of a group.
  TopKCase broken = MakeCase(random, 2, 8, true, {{90, 3}, {90, 3}, {90, 3}});
  for (TopKCase::Group& group : broken.groups) group.skip = 0;
  broken.groups[0].codes.emplace(random, 8, 80);
  broken.groups[1].codes->book.keys.centre.assign(8, 3e38f);
  std::fill_n(broken.queries.begin() + 2 * 8, 2 * 8, 3e38f);
  broken.groups[2].codes.emplace(random, 9, 90);
  while (broken.groups[2].codes->book.keys.components() < 9) {
    broken.groups[2].codes.emplace(random, 9, 90);
  }
  const Result<TopKResult> faults = run(broken);
  ASSERT_TRUE(faults.ok());
  const char* const why_broken[] = {"counts do not fit", "is not finite", "dimensions"};
  for (size_t i = 0; i < 3; ++i) {
    const Status fault = GroupError(faults->errors[i], 0);
    ASSERT_FALSE(fault.ok()) << i;
    EXPECT_NE(fault.error().message.find(why_broken[i]), std::string::npos)
        << fault.error().message;
  }
  // A query that is no number, and more keys than the shape has room for, are errors of a group.
  TopKCase wrong = MakeCase(random, 2, 8, false, {{50, 3}, {60, 2}, {61, 2}});
  wrong.queries[2 * 2 * 8 + 3] = kInf;
  wrong.shape.max_keys = 60;
  wrong.groups[0].k = 2;
  for (TopKCase::Group& group : wrong.groups) group.skip = 0;
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
