// Tests KVpop's scorers against their formulas in float64, and what is refused as a file of them.
#include "runtime/retention/token_scorer.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "runtime/retention/scorer_file.h"
#include "tests/runtime/retention/scorers_file.h"
#include "tests/support/files.h"
#include "tests/support/layered_model.h"
#include "tests/support/seed.h"
#include "tests/support/synthetic_kv.h"

namespace prefixd::testing {
namespace {

class TokenScorerFixture : public ::testing::Test {
 protected:
  TokenScorerFixture() {
    spec_.name = "tiny";
    spec_.geometry = SmallGeometry(2, 4, 2, 16);
    spec_.identity = {{"weights", "blake2b:aa"}};
  }

  Result<std::vector<TokenScorer>> Load(const ScorersFile& file) {
    const auto path = dir_ / "scorers.safetensors";
    file.Write(path);
    PREFIXD_ASSIGN(const auto opened, SafetensorsFile::Open(path));
    return LoadScorers(opened, spec_);
  }

  TempDir dir_;
  ModelSpec spec_;
};

class TokenScorerTest : public TokenScorerFixture,
                        public ::testing::WithParamInterface<const char*> {};

TEST_P(TokenScorerTest, PrioritiesEqualTheFormulas) {
  const uint64_t seed = Seed("PrioritiesEqualTheFormulas");
  // Layers differ in heads and dimensions, and one has none.
  for (const KvGeometry& geometry : {spec_.geometry, LayeredGeometry()}) {
    spec_.geometry = geometry;
    const ScorersFile file(geometry, GetParam(), seed);
    const auto scorers = Load(file);
    ASSERT_OK(scorers);
    ASSERT_EQ(scorers->size(), geometry.heads().count());
    const uint32_t n = 90;
    const auto prompt = MakePrompt(geometry, n, seed);
    for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
      for (uint32_t head = 0; head < geometry.layer(layer).n_kv_heads; ++head) {
        const RowShape row = geometry.row(layer);
        const auto bytes = prompt.Rows(layer, head);
        const RowsView rows{bytes.data(), n, row.bytes(), row};
        const auto want = file.Priorities(layer, head, rows);
        const TokenScorer& scorer = (*scorers)[geometry.heads().of(layer, head)];
        for (const TokenRange region : {TokenRange{0, n}, TokenRange{4, 74}, TokenRange{20, 30},
                                        TokenRange{70, 88}, TokenRange{5, 5}}) {
          const auto got = TokenPriorities(scorer, rows, region);
          ASSERT_EQ(got.size(), region.size());
          for (uint32_t t = region.begin; t < region.end; ++t) {
            // Newest tokens have no score, and come first.
            EXPECT_EQ(std::isinf(got[t - region.begin]), t + 24 >= n) << t;
            if (t + 24 >= n) continue;
            EXPECT_NEAR(got[t - region.begin], want[t], 1e-9 * (1 + std::abs(want[t])))
                << t << " seed " << seed;
          }
        }
      }
    }
  }
}

using MemoryScorerTest = TokenScorerFixture;

TEST_F(MemoryScorerTest, GatesThatAreFarOpenOrShutDoNotOverflow) {
  ScorersFile file(spec_.geometry, "kvpop-mlstm", 3);
  for (const float gate : {800.0f, -800.0f}) {
    for (const char* name : {"bi", "bf"}) {
      for (float& b : file.tensors[ScorersFile::Name(0, name)].second) b = gate;
    }
    const auto scorers = Load(file);
    ASSERT_OK(scorers);
    const auto prompt = MakePrompt(spec_.geometry, 200, 5);
    const RowShape row = spec_.geometry.row(0);
    const auto bytes = prompt.Rows(0, 0);
    for (const double p :
         TokenPriorities((*scorers)[0], {bytes.data(), 200, row.bytes(), row}, {0, 176})) {
      EXPECT_TRUE(std::isfinite(p));
    }
  }
}

TEST_P(TokenScorerTest, OtherFilesAreRefused) {
  const ScorersFile good(spec_.geometry, GetParam(), 7);
  ASSERT_OK(Load(good));
  const auto refuse = [&](const std::string& why, const auto& damage) {
    ScorersFile bad = good;
    damage(bad);
    const auto loaded = Load(bad);
    EXPECT_CODE(loaded, Code::kInvalidArgument);
    if (loaded.ok()) return;
    EXPECT_NE(loaded.error().message.find(why), std::string::npos) << loaded.error().message;
  };
  refuse("not a file of scorers", [](ScorersFile& f) { f.metadata["format"] = "prefixd-phi-v1"; });
  refuse("no scorer that is known", [](ScorersFile& f) { f.metadata["scorer"] = "kvpop-lstm"; });
  refuse("window", [](ScorersFile& f) { f.metadata["window"] = "-1"; });
  refuse("window", [](ScorersFile& f) { f.metadata.erase("window"); });
  refuse("trained for weights blake2b:bb",
         [](ScorersFile& f) { f.metadata["weights"] = "blake2b:bb"; });
  refuse("for which weights", [](ScorersFile& f) { f.metadata.erase("weights"); });
  refuse("no scorer of layer 1", [](ScorersFile& f) { f.tensors.erase("layers.1.mean"); });
  for (const float decay : {NAN, INFINITY, -INFINITY}) {
    refuse("decay", [&](ScorersFile& f) { f.tensors["layers.0.decay"].second[1] = decay; });
  }
  refuse("NaN", [](ScorersFile& f) { f.tensors["layers.1.mean"].second[3] = NAN; });
  refuse("scale", [](ScorersFile& f) { f.tensors["layers.0.scale"].second[0] = 0; });
  const char* first = GetParam() == std::string("kvpop-mlp") ? "layers.0.w1" : "layers.0.wq";
  refuse(first, [&](ScorersFile& f) { f.tensors.erase(first); });
  refuse(first, [&](ScorersFile& f) {
    auto& [shape, values] = f.tensors[first];
    std::swap(shape[1], shape[2]);
  });
  refuse(first, [&](ScorersFile& f) {
    auto& [shape, values] = f.tensors[first];
    shape[2] = 0;
    values.clear();
  });
  // Names that users gave cannot be compared.
  spec_.identity = {{"weights", "mine"}};
  EXPECT_OK(Load(good));
}

INSTANTIATE_TEST_SUITE_P(, TokenScorerTest, ::testing::Values("kvpop-mlp", "kvpop-mlstm"),
                         [](const auto& of) { return std::string(of.param + 6); });

}  // namespace
}  // namespace prefixd::testing
