// Tests compressed prefixes through the whole runtime: steps equal the float64 truth, in which only
// tokens with rows are retrieved and all others are in the remainder.
#include <cmath>
#include <cstring>
#include <map>
#include <string>

#include "attention/step/step.h"
#include "index/ranking/group_ranking.h"
#include "prefixd/compress.h"
#include "runtime/retention/redundancy.h"
#include "runtime/retention/scores.h"
#include "tensors/feature_map_file.h"
#include "tests/runtime/retention/scorers_file.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class CompressTest : public RuntimeTest {
 protected:
  static constexpr uint32_t kTokens = 700;

  CompressReport Compressed(const std::string& id, const CompressSpec& spec = {}) {
    auto report = store_->Compress(id, spec, nullptr);
    EXPECT_TRUE(report.ok()) << report.error().ToString();
    return report.ok() ? *report : CompressReport{};
  }

  std::shared_ptr<Session> AttachTo(const std::string& id, const StepPolicy& policy) {
    AttachSpec spec;
    spec.prefix = id;
    spec.policy = policy;
    auto session = store_->Attach(spec);
    EXPECT_TRUE(session.ok()) << session.error().ToString();
    return session.ok() ? std::move(session).value() : nullptr;
  }

  // Returns the mid tokens whose rows a head has.
  std::vector<uint32_t> Kept(Session& session, uint32_t layer, uint32_t head) const {
    const Partition part = Partition::Of(session.info().n_tokens, options_.anchors);
    std::vector<uint32_t> kept;
    std::vector<std::byte> row(spec_.geometry.row(layer).bytes());
    for (uint32_t t = part.mid.begin; t < part.mid.end; ++t) {
      const Status read = session.ReadRows(layer, head, {&t, 1}, row);
      if (read.ok()) kept.push_back(t);
      if (!read.ok()) {
        EXPECT_EQ(read.error().code, Code::kFailedPrecondition);
      }
    }
    return kept;
  }

  // Compares a step of each head with float64.
  void ExpectSteps(Session& session, const SyntheticPrompt& prompt, EstimatorKind estimator,
                   uint32_t k, const FeatureMapSet* maps) {
    const KvGeometry& g = spec_.geometry;
    const RowShape row = g.row(0);
    const uint32_t group = g.group_size(0), n = prompt.n_tokens;
    const Partition part = Partition::Of(n, options_.anchors);
    for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
      const auto q = prompt.Q(layer, n - 1 - k % 7, 1);
      const Output out = Step(session, layer, q);
      for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
        const auto kept = Kept(session, layer, h);
        const auto own = q.subspan(size_t{h} * group * g.key_dim, group * g.key_dim);
        const auto bytes = prompt.Rows(layer, h);
        const RowsView rows{bytes.data(), n, row.bytes(), row};
        std::vector<RowRef> refs;
        for (const uint32_t t : kept) refs.push_back({rows.key(t), rows.key(t) + row.key_bytes()});
        std::vector<float> scores(size_t{group} * kept.size());
        Scores(own, group, g.layers[layer], ScatteredRows(refs, row), scores);
        Selection best = SelectByGroupMax(scores, group, static_cast<uint32_t>(kept.size()), k, 0,
                                          /*scores_complete=*/false);
        if (best.ids.size() == kept.size()) best.cuts.assign(group, Cut{});
        if (k == 0) best.cuts.clear();  // a step does not search then
        std::vector<RowRef> retrieved;
        for (uint32_t& i : best.ids) {
          retrieved.push_back(refs[i]);
          i = kept[i];
        }
        if (k > 0) {
          const auto selected = session.Select(layer, h, own, k);
          ASSERT_OK(selected);
          EXPECT_EQ(selected->ids, best.ids);
          for (const Cut& cut : selected->cuts) EXPECT_NE(cut.kind, CutKind::kExact);
        }

        const RowsView mid = rows.Sub(part.mid.begin, part.mid.size());
        MomentSummary moment(row.key_dim, row.value_dim, false);
        moment.Add(mid);
        GroupStepInput in;
        in.queries = own;
        in.group = group;
        in.layer = g.layers[layer];
        in.sinks = rows.Sub(0, part.sink.size());
        in.tail = rows.Sub(part.tail.begin, part.tail.size());
        in.retrieved = ScatteredRows(retrieved, row);
        in.cuts = best.cuts;
        in.mid_count = part.mid.size();
        in.estimator = estimator;
        if (estimator == EstimatorKind::kMoment) in.moment = &moment;
        PhiCache phi(maps ? maps->d_phi : 1, row.value_dim);
        if (estimator == EstimatorKind::kPhi) {
          in.phi_k = &maps->phi_k[layer * g.n_kv_heads + h];
          phi.Add(mid, *in.phi_k);
          in.phi = &phi;
          in.phi_q = std::span(maps->phi_q).subspan(layer * g.n_q_heads + h * group, group);
        }
        const auto want = reference::GroupStep(in, row.value_dim);
        for (uint32_t head = 0; head < group; ++head) {
          const size_t at = size_t{h} * group + head;
          EXPECT_NEAR(out.lse[at], want.lse[head], 2e-4) << EstimatorName(estimator) << " " << k;
          for (uint32_t i = 0; i < g.value_dim; ++i) {
            const size_t e = size_t{head} * g.value_dim + i;
            EXPECT_NEAR(out.y[at * g.value_dim + i], want.y[e], 1e-3 * want.abs_y[e] + 1e-6)
                << EstimatorName(estimator) << " K = " << k;
          }
        }
      }
    }
  }
};

TEST_F(CompressTest, StepsEqualTheReferenceOverWhatIsLeft) {
  const uint64_t seed = Seed("StepsEqualTheReferenceOverWhatIsLeft");
  AddMaps(4096, seed);
  options_.compact_max_tokens = 0;  // the conversation's turns stay apart
  Open();
  auto loaded = LoadFeatureMaps(spec_.feature_maps[0]);
  ASSERT_OK(loaded);
  const auto prompt = MakePrompt(spec_.geometry, kTokens, seed);
  PutReady(MakePrompt(spec_.geometry, 200, seed));  // its rows all stay
  const std::string id = PutReady(prompt);
  CompressSpec spec;
  spec.policy = "snapkv";
  const CompressReport report = Compressed(id, spec);
  EXPECT_TRUE(report.compressed);
  EXPECT_EQ(report.own_tokens, 500u);
  EXPECT_EQ(report.kept_tokens, 16u + 121u);  // a quarter of 484, and the tail
  EXPECT_LT(report.bytes_after, report.bytes_before);
  for (const bool reopened : {false, true}) {
    if (reopened) Open();
    for (const EstimatorKind estimator :
         {EstimatorKind::kNone, EstimatorKind::kMoment, EstimatorKind::kPhi}) {
      for (const uint32_t k : {0u, 9u, 60u, 400u}) {
        StepPolicy policy;
        policy.estimator = estimator;
        policy.k = k;
        const auto session = AttachTo(id, policy);
        ASSERT_TRUE(session);
        ExpectSteps(*session, prompt, estimator, k, &*loaded);
      }
    }
  }
}

TEST_F(CompressTest, StepsThatShareSetsReadOnlyWhatIsLeft) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, kTokens, 3);
  const std::string id = PutReady(prompt);
  Compressed(id);
  StepPolicy policy;
  policy.k = 30;
  policy.sharing.block = 4;
  policy.sharing.dilation = 2;
  policy.sharing.similarity = -1;
  policy.prefetch.forward = 4;
  const auto session = AttachTo(id, policy);
  ASSERT_TRUE(session);
  for (int i = 0; i < 8; ++i) {
    const Output out = Step(*session, 0, prompt.Q(0, kTokens - 1 - i, 1));
    for (const float y : out.y) EXPECT_TRUE(std::isfinite(y));
  }
}

TEST_F(CompressTest, WhatNeedsAllRowsIsRefused) {
  options_.estimators = *ParseVariants("none, moment, centroid, scan");
  options_.build_codes = true;
  options_.codes_min_tokens = 100;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 1500, 5);
  const std::string id = PutReady(prompt);
  const auto has_index = [&] {
    const auto blobs = store_->Prefix(id)->blobs;
    return std::ranges::any_of(blobs, [](const auto& b) { return b.starts_with("codes."); });
  };
  EXPECT_TRUE(has_index());
  Compressed(id);
  EXPECT_FALSE(has_index());
  for (const bool reopened : {false, true}) {
    if (reopened) Open();
    ASSERT_OK(store_->WaitReady(id, nullptr));
    ASSERT_OK(store_->WaitRewritten(nullptr));
    const auto detail = store_->Prefix(id);
    EXPECT_GT(detail->summary.kept_tokens, 0u);
    EXPECT_GT(detail->summary.saved_bytes, 0u);
    EXPECT_EQ(detail->summary.ingest, IngestState::kReady);
    AttachSpec spec;
    spec.prefix = id;
    spec.policy.mode = StepMode::kFull;
    EXPECT_CODE(store_->Attach(spec), Code::kFailedPrecondition);
    spec.policy = StepPolicy();
    spec.n_tokens = 1000;
    EXPECT_CODE(store_->Attach(spec), Code::kFailedPrecondition);
    spec.n_tokens = 0;
    spec.own_memory_tokens = 1024;
    EXPECT_CODE(store_->Attach(spec), Code::kFailedPrecondition);
    spec.own_memory_tokens = 0;
    spec.policy.selector = "codes";
    EXPECT_CODE(store_->Attach(spec), Code::kFailedPrecondition);
    spec.policy.selector = "auto";
    for (const EstimatorKind kind : {EstimatorKind::kCentroid, EstimatorKind::kScan}) {
      spec.policy.estimator = kind;
      EXPECT_CODE(store_->Attach(spec), Code::kFailedPrecondition);
    }
    spec.policy = StepPolicy();
    spec.policy.budget = 0.1;
    const auto session = store_->Attach(spec);
    ASSERT_OK(session);
    const KvGeometry& g = spec_.geometry;
    std::vector<float> y(g.n_q_heads * g.value_dim), lse(g.n_q_heads);
    EXPECT_CODE((*session)->AttendExact(0, 1, prompt.Q(0, 1499, 1), y, lse),
                Code::kFailedPrecondition);
    std::vector<std::byte> rows(1500 * g.row(0).bytes());
    EXPECT_CODE((*session)->ReadRange(0, 0, {0, 1500}, rows), Code::kFailedPrecondition);
    const size_t layer = 1500 * g.n_kv_heads * g.row(0).key_bytes();
    std::vector<std::byte> k(layer), v(layer);
    EXPECT_CODE((*session)->ReadLayer({0, {0, 1500}}, k, v), Code::kFailedPrecondition);
    const std::vector<std::byte> one_k(g.n_kv_heads * g.row(0).key_bytes());
    for (uint32_t l = 0; l < g.n_layers; ++l) {
      ASSERT_OK((*session)->Append(l, 1, one_k, one_k));
      ASSERT_OK((*session)->Step(l, prompt.Q(l, 1499, 1), y, lse, nullptr));
    }
    const uint32_t token = 7;
    EXPECT_CODE((*session)->Persist({&token, 1}, {}), Code::kFailedPrecondition);
    EXPECT_CODE(store_->Compress(id, {}, nullptr), Code::kFailedPrecondition);
    const auto reclustered = store_->Rewrite(id, RewriteKind::kRecluster, nullptr);
    ASSERT_OK(reclustered);
    EXPECT_EQ(reclustered->left.size(), 1u);
  }
  // An engine that looks for rows finds none; one that can do with what is left says so.
  MatchSpec match{spec_.name, "", prompt.tokens};
  EXPECT_EQ(store_->Match(match)->n_tokens, 0u);
  const auto why = store_->Explain({.match = match});
  ASSERT_OK(why);
  ASSERT_FALSE(why->misses.empty());
  EXPECT_EQ(why->misses[0].reason, MissReason::kCompressed);
  EXPECT_EQ(why->misses[0].n_tokens, 1500u);
  match.accept_compressed = true;
  EXPECT_TRUE(store_->Explain({.match = match})->misses.empty());
  EXPECT_TRUE(store_->Explain({.match = match})->match.compressed);
  EXPECT_EQ(store_->Match(match)->n_tokens, 1500u);
  EXPECT_TRUE(store_->Match(match)->compressed);
  EXPECT_EQ(store_->Match(match)->estimate.disk_bytes, 0u);
  const std::string whole = PutReady(prompt);
  EXPECT_NE(whole, id);
  EXPECT_EQ(store_->Match(match)->prefix, whole);
  EXPECT_FALSE(store_->Match(match)->compressed);
}

TEST_F(CompressTest, ErrorsAreMeasuredBeforeAnythingGoes) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, kTokens, 7);
  const std::string id = PutReady(prompt);
  CompressSpec spec;
  spec.dry_run = true;
  const uint64_t before = store_->Stats()->bytes_on_disk;
  double last = 0;
  for (const double keep : {0.9, 0.5, 0.05}) {
    spec.keep = keep;
    const CompressReport report = Compressed(id, spec);
    EXPECT_FALSE(report.compressed);
    EXPECT_GT(report.queries_scored, 0u);
    EXPECT_GT(report.queries_measured, 0u);
    EXPECT_EQ(report.measured_tokens, 525u);
    ASSERT_EQ(report.layers.size(), 2u);
    EXPECT_NEAR(report.error_after,
                (report.layers[0].error_after + report.layers[1].error_after) / 2, 1e-9);
    EXPECT_GT(report.error_before, 0);
    EXPECT_GE(report.error_after, last);  // fewer rows err more here
    last = report.error_after;
  }
  spec.dry_run = false;
  spec.max_error = last / 2;
  const CompressReport refused = Compressed(id, spec);
  EXPECT_FALSE(refused.compressed);
  EXPECT_NE(refused.refused.find("would err"), std::string::npos) << refused.refused;
  EXPECT_EQ(store_->Stats()->bytes_on_disk, before);
  EXPECT_EQ(store_->Prefix(id)->summary.kept_tokens, 0u);
  spec.max_error = last * 2;
  EXPECT_TRUE(Compressed(id, spec).compressed);
  EXPECT_LT(store_->Stats()->bytes_on_disk, before);
}

TEST_F(CompressTest, PoliciesThatNeedQueriesAreRefusedWithoutThem) {
  Open();
  const std::string id = PutReady(MakePrompt(spec_.geometry, kTokens, 9), /*queries=*/false);
  CompressSpec spec;
  for (const char* policy : {"gkv", "global", "snapkv", "local"}) {
    spec.policy = policy;
    EXPECT_CODE(store_->Compress(id, spec, nullptr), Code::kFailedPrecondition);
  }
  spec.policy = "lru";
  EXPECT_CODE(store_->Compress(id, spec, nullptr), Code::kInvalidArgument);
  spec.policy = "window";
  spec.max_error = 0.1;
  EXPECT_CODE(store_->Compress(id, spec, nullptr), Code::kFailedPrecondition);
  spec.max_error = 0;
  spec.keep = 1;
  EXPECT_CODE(store_->Compress(id, spec, nullptr), Code::kInvalidArgument);
  spec.keep = 0.25;
  const CompressReport report = Compressed(id, spec);
  EXPECT_TRUE(report.compressed);
  EXPECT_EQ(report.queries_measured, 0u);
  const auto session = AttachTo(id, StepPolicy{.k = 10});
  ASSERT_TRUE(session);
  const auto kept = Kept(*session, 1, 0);
  ASSERT_FALSE(kept.empty());
  EXPECT_EQ(kept.back() - kept.front() + 1, kept.size());  // the newest
  EXPECT_EQ(kept.back(), kTokens - 17);
}

TEST_F(CompressTest, ScorersRankTokensWithoutQueries) {
  const uint64_t seed = Seed("ScorersRankTokensWithoutQueries");
  Open();
  const auto prompt = MakePrompt(spec_.geometry, kTokens, seed);
  for (const char* scorer : {"kvpop-mlp", "kvpop-mlstm"}) {
    const std::string id = PutReady(prompt, /*queries=*/false);
    const ScorersFile file(spec_.geometry, scorer, seed);
    CompressSpec spec;
    spec.policy = "kvpop";
    EXPECT_CODE(store_->Compress(id, spec, nullptr), Code::kInvalidArgument);
    spec.scorers = dir_.path() / "none";
    EXPECT_CODE(store_->Compress(id, spec, nullptr), Code::kNotFound);
    spec.scorers = dir_.path() / "scorers.safetensors";
    file.Write(spec.scorers);
    spec.policy = "window";
    EXPECT_CODE(store_->Compress(id, spec, nullptr), Code::kInvalidArgument);
    spec.policy = "kvpop";
    spec.keep = 0.01;  // less than the newest tokens, which scorers do not rank
    EXPECT_CODE(store_->Compress(id, spec, nullptr), Code::kFailedPrecondition);
    spec.keep = 0.25;
    EXPECT_TRUE(Compressed(id, spec).compressed);
    const auto session = AttachTo(id, StepPolicy{.k = 10});
    ASSERT_TRUE(session);
    const TokenRange mid = Partition::Of(kTokens, options_.anchors).mid;
    for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
      for (uint32_t h = 0; h < spec_.geometry.n_kv_heads; ++h) {
        const RowShape row = spec_.geometry.row(layer);
        const auto bytes = prompt.Rows(layer, h);
        const auto all = file.Priorities(layer, h, {bytes.data(), kTokens, row.bytes(), row});
        const std::span own = std::span(all).subspan(mid.begin, mid.size());
        EXPECT_EQ(Kept(*session, layer, h), HighestScored(own, mid, mid.size() / 4)) << seed;
      }
    }
    ASSERT_OK(session->Detach());
    ASSERT_OK(store_->Remove(id));
  }
}

TEST_F(CompressTest, GkvLeavesOutDoublesThatTheGlobalScoreKeeps) {
  const uint64_t seed = Seed("GkvLeavesOutDoublesThatTheGlobalScoreKeeps");
  Open();
  const auto prompt = MakePrompt(spec_.geometry, kTokens, seed);
  const TokenRange mid = Partition::Of(kTokens, options_.anchors).mid;
  std::map<std::string, std::vector<std::vector<uint32_t>>> kept;
  for (const char* policy : {"global", "gkv"}) {
    const std::string id = PutReady(prompt);
    EXPECT_TRUE(Compressed(id, {.policy = policy}).compressed);
    const auto session = AttachTo(id, StepPolicy{.k = 10});
    ASSERT_TRUE(session);
    for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
      for (uint32_t h = 0; h < spec_.geometry.n_kv_heads; ++h) {
        kept[policy].push_back(Kept(*session, layer, h));
        EXPECT_EQ(kept[policy].back().size(), mid.size() / 4);
      }
    }
    ASSERT_OK(session->Detach());
    ASSERT_OK(store_->Remove(id));
  }
  // What one keeps and the other does not is less redundant under gkv, in every head where they
  // differ.
  size_t differ = 0, head = 0;
  for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
    const RowShape row = spec_.geometry.row(layer);
    for (uint32_t h = 0; h < spec_.geometry.n_kv_heads; ++h, ++head) {
      const auto bytes = prompt.Rows(layer, h);
      const auto r = Redundancy({bytes.data(), kTokens, row.bytes(), row}, mid);
      const auto &global = kept["global"][head], &gkv = kept["gkv"][head];
      double of_global = 0, of_gkv = 0;
      for (const uint32_t t : global) of_global += r[t - mid.begin];
      for (const uint32_t t : gkv) of_gkv += r[t - mid.begin];
      if (global == gkv) continue;
      ++differ;
      EXPECT_LT(of_gkv, of_global) << layer << " " << h << ", seed " << seed;
    }
  }
  EXPECT_GT(differ, 0u) << seed;
}

TEST_F(CompressTest, WhatCannotBeMeasuredIsNotCompressedUnderABound) {
  options_.query_samples = 1;  // the policy's, and none to measure with
  Open();
  const std::string id = PutReady(MakePrompt(spec_.geometry, kTokens, 10));
  CompressSpec spec;
  spec.max_error = 0.9;
  EXPECT_CODE(store_->Compress(id, spec, nullptr), Code::kFailedPrecondition);
  spec.max_error = 0;
  EXPECT_TRUE(Compressed(id, spec).compressed);
}

TEST_F(CompressTest, OtherAnchorsAreRefused) {
  const auto prompt = MakePrompt(spec_.geometry, kTokens, 12);
  Open();
  const std::string id = PutReady(prompt);
  Compressed(id);
  options_.anchors.n_tail = 64;
  Open();
  AttachSpec spec;
  spec.prefix = id;
  spec.policy = StepPolicy{.k = 10};
  spec.policy.estimator = EstimatorKind::kNone;
  const auto session = store_->Attach(spec);
  if (session.ok()) {
    const KvGeometry& g = spec_.geometry;
    std::vector<float> y(g.n_q_heads * g.value_dim), lse(g.n_q_heads);
    EXPECT_CODE((*session)->Step(0, prompt.Q(0, kTokens - 1, 1), y, lse, nullptr),
                Code::kFailedPrecondition);
  } else {
    EXPECT_EQ(session.error().code, Code::kFailedPrecondition) << session.error().ToString();
  }
}

TEST_F(CompressTest, LooksBehindAStartAreNotInItsWay) {
  Open();
  std::vector<std::string> ids;
  for (uint64_t seed = 20; seed < 32; ++seed) {
    ids.push_back(PutReady(MakePrompt(spec_.geometry, 200, seed)));
  }
  Open();
  for (const std::string& id : ids) {
    EXPECT_TRUE(Compressed(id, {.policy = "window"}).compressed);
    EXPECT_OK(store_->WaitReady(id, nullptr));
  }
}

TEST_F(CompressTest, ModelsWithoutSummariesAreRefused) {
  spec_.geometry.layers[1].sliding_window = 64;
  Open();
  const std::string id = PutReady(MakePrompt(spec_.geometry, 300, 11));
  EXPECT_CODE(store_->Compress(id, {.policy = "window"}, nullptr), Code::kFailedPrecondition);
}

}  // namespace
}  // namespace prefixd::testing
