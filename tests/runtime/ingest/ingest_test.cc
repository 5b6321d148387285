// Tests derived data: summaries of chains and branches, resumption, replacement.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "attention/estimators/moments.h"
#include "attention/estimators/phi_cache.h"
#include "attention/reference/reference.h"
#include "base/every_page.h"
#include "runtime/indexes/indexes.h"
#include "storage/store/prefix_store.h"
#include "tensors/feature_map_file.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class IngestTest : public RuntimeTest {
 protected:
  // Expects the summaries of a session's mid region to equal those of its rows, added in one go.
  void ExpectSummariesOf(const SyntheticPrompt& prompt, uint32_t n_tokens, Session& session,
                         const FeatureMapSet* maps) {
    const KvGeometry& g = prompt.geometry;
    const RowShape row = g.row(0);
    const TokenRange mid = Partition::Of(n_tokens, options_.anchors).mid;
    for (uint32_t l = 0; l < g.n_layers; ++l) {
      for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
        SCOPED_TRACE("n " + std::to_string(n_tokens) + " layer " + std::to_string(l) + " head " +
                     std::to_string(h));
        const auto bytes = prompt.Rows(l, h);
        const RowsView rows =
            RowsView{bytes.data(), prompt.n_tokens, row.bytes(), row}.Sub(mid.begin, mid.size());
        const auto whole = EstimatorVariant::Parse("moment/full");
        MomentSummary moment(row.key_dim, row.value_dim, true);
        moment.Add(rows);
        auto stored = session.SummaryBytes(l, h, *whole);
        ASSERT_OK(stored);
        auto got = MomentSummary::Deserialize(*stored);
        ASSERT_OK(got);
        ASSERT_EQ(got->count(), mid.size());
        for (uint32_t i = 0; i < row.key_dim; ++i) {
          EXPECT_NEAR(got->mean_key()[i], moment.mean_key()[i],
                      1e-6 * (1 + std::abs(moment.mean_key()[i])));
          EXPECT_NEAR(got->key_m2()[i], moment.key_m2()[i], 1e-6 * (1 + moment.key_m2()[i]));
        }
        for (uint32_t i = 0; i < row.value_dim; ++i) {
          EXPECT_NEAR(got->mean_value()[i], moment.mean_value()[i],
                      1e-6 * (1 + std::abs(moment.mean_value()[i])));
        }
        const double cross_scale = 1 + double(mid.size()) * 8;
        ASSERT_EQ(got->cross().size(), moment.cross().size());
        for (size_t i = 0; i < moment.cross().size(); ++i) {
          EXPECT_NEAR(got->cross()[i], moment.cross()[i], 1e-6 * cross_scale);
        }
        if (!maps) continue;
        PhiCache phi(maps->d_phi, row.value_dim);
        phi.Add(rows, maps->phi_k[l * g.n_kv_heads + h]);
        auto phi_stored = session.PhiCacheBytes(l, h);
        ASSERT_OK(phi_stored);
        auto phi_got = PhiCache::Deserialize(*phi_stored);
        ASSERT_OK(phi_got);
        ASSERT_EQ(phi_got->count(), mid.size());
        ASSERT_TRUE(std::ranges::equal(phi_got->apart(), phi.apart()));
        for (uint32_t f = 0; f < maps->d_phi && mid.size() > 0; ++f) {
          if (phi_got->m()[f] != phi.m()[f]) {  // both -inf: the difference is NaN
            EXPECT_NEAR(phi_got->m()[f], phi.m()[f], 1e-5);
          }
          EXPECT_NEAR(phi_got->u()[f], phi.u()[f], 1e-5 * phi.u()[f]);
          for (uint32_t i = 0; i < row.value_dim; ++i) {
            EXPECT_NEAR(phi_got->t()[f * row.value_dim + i], phi.t()[f * row.value_dim + i],
                        1e-5 * 8 * phi.u()[f]);
          }
        }
      }
    }
  }

  std::shared_ptr<Session> AttachCut(const SyntheticPrompt& prompt, uint32_t n) {
    StepPolicy policy;
    policy.mode = StepMode::kFull;
    auto session = store_->Attach({spec_.name, "", prompt.tokens, "", n, policy});
    EXPECT_TRUE(session.ok()) << session.error().ToString();
    return session.ok() ? *session : nullptr;
  }
};

TEST_F(IngestTest, ChainsAndBranchesEqualOneGo) {
  const uint64_t seed = Seed("ChainsAndBranchesEqualOneGo");
  AddMaps(4096, seed);
  Open();
  auto maps = LoadFeatureMaps(spec_.feature_maps[0]);
  ASSERT_OK(maps);
  // A chain of segments, short ones too: 300, 7, 1, 392, 12 tokens ...
  const uint32_t ends[] = {300, 307, 308, 700, 712};
  const auto whole = MakePrompt(spec_.geometry, 712, seed);
  for (uint32_t end : ends) {
    ASSERT_NE(PutReady(MakePrompt(spec_.geometry, end, seed)), "");
  }
  // ... and a branch that leaves it in the middle of the fourth segment.
  const auto branch = Branch(whole, 450, MakePrompt(spec_.geometry, 640, seed + 1));
  ASSERT_NE(PutReady(branch), "");
  ASSERT_EQ(EveryPrefix(*store_).value().size(), 6u);
  Random random(seed);
  std::vector<uint32_t> cuts(std::begin(ends), std::end(ends));
  for (int i = 0; i < 12; ++i) cuts.push_back(random.Int(1, 712));
  for (uint32_t n : {1u, 4u, 20u, 21u, 128u, 316u, 324u, 701u}) cuts.push_back(n);
  for (uint32_t n : cuts) {
    const auto session = AttachCut(whole, n);
    ASSERT_TRUE(session);
    ExpectSummariesOf(whole, n, *session, &*maps);
  }
  for (uint32_t n : {640u, 600u, 451u, 455u, 470u}) {
    const auto session = AttachCut(branch, n);
    ASSERT_TRUE(session);
    EXPECT_EQ(session->info().n_tokens, n);
    ExpectSummariesOf(branch, n, *session, &*maps);
  }
}

TEST_F(IngestTest, MomentsDoNotWaitForTheIngest) {
  const uint64_t seed = Seed("MomentsDoNotWaitForTheIngest");
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 900, seed);
  ASSERT_NE(Put(prompt), "");
  const auto session = AttachCut(prompt, 900);
  ASSERT_TRUE(session);
  ExpectSummariesOf(prompt, 900, *session, nullptr);
}

TEST_F(IngestTest, ResumesWhatARestartInterrupted) {
  const uint64_t seed = Seed("ResumesWhatARestartInterrupted");
  options_.checkpoint_tokens = 32;
  AddMaps(4096, seed);
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 1500, seed);
  const std::string id = Put(prompt);
  ASSERT_NE(id, "");
  for (int restart = 0; restart < 3; ++restart) Open();  // each stops the ingest where it is
  std::vector<std::pair<uint64_t, uint64_t>> seen;
  ASSERT_OK(store_->WaitReady(id, [&](uint64_t done, uint64_t total, std::string_view) {
    seen.emplace_back(done, total);
    return true;
  }));
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen.back().first, seen.back().second);
  const auto detail = store_->Prefix(id);
  ASSERT_OK(detail);
  EXPECT_EQ(detail->summary.ingest, IngestState::kReady);
  const auto has = [&](const char* name) {
    return std::count(detail->blobs.begin(), detail->blobs.end(), name) == 1;
  };
  EXPECT_TRUE(has("moments.32") && has("moments.1484") && has("moments.1500"));
  EXPECT_TRUE(has("phi.4096.32") && has("phi.4096.1484") && has("phi.4096.1500"));
  EXPECT_TRUE(has("queries") && has("choice"));
  EXPECT_FALSE(detail->choices.empty());
  auto maps = LoadFeatureMaps(spec_.feature_maps[0]);
  ASSERT_OK(maps);
  const auto session = AttachCut(prompt, 1500);
  ASSERT_TRUE(session);
  ExpectSummariesOf(prompt, 1500, *session, &*maps);
}

// What is looked at, or made anew, behind a start is open for a moment. That must not refuse its
// removal.
TEST_F(IngestTest, WhatIsLookedAtBehindAStartCanBeRemoved) {
  const uint64_t seed = Seed("WhatIsLookedAtBehindAStart");
  options_.scrub_bytes_per_second = 0;
  const auto all = options_.estimators;
  options_.estimators.resize(2);
  Open();
  std::vector<std::string> ids;
  for (int i = 0; i < 48; ++i) {
    ids.push_back(PutReady(MakePrompt(spec_.geometry, 200, seed + i)));
    ASSERT_NE(ids.back(), "");
  }
  for (int start = 0; start < 6; ++start) {
    if (start == 3) options_.estimators = all;  // all prefixes are incomplete from here on
    Open();
    for (int i = 0; i < 8; ++i) ASSERT_OK(store_->Remove(ids[8 * start + i]));
  }
  EXPECT_EQ(store_->Stats()->prefixes, 0u);
}

// The loss of the one blob that cannot be made again is reported.
TEST_F(IngestTest, ADamagedSampleOfQueriesIsReported) {
  Open();
  const std::string id = PutReady(MakePrompt(spec_.geometry, 1500, Seed("ADamagedSample")));
  const auto blobs = [&] { return store_->Prefix(id)->blobs; };
  const auto has = [&](const char* name) {
    const auto all = blobs();
    return std::count(all.begin(), all.end(), name) == 1;
  };
  ASSERT_TRUE(has("queries") && has("choice"));
  EXPECT_FALSE(has("queries.lost"));
  const size_t choices = store_->Prefix(id)->choices.size();
  ASSERT_GT(choices, 0u);
  const auto path = options_.dir / "segments" / (id + ".queries.blob");
  FlipByte(path, std::filesystem::file_size(path) - 1);
  const auto report = store_->Verify(id, nullptr);
  ASSERT_OK(report);
  ASSERT_EQ(report->damaged.size(), 1u);
  EXPECT_NE(report->damaged[0].find("queries"), std::string::npos) << report->damaged[0];
  ASSERT_OK(store_->WaitReady(id, nullptr));
  EXPECT_TRUE(!has("queries") && has("queries.lost") && has("choice"));
  EXPECT_EQ(store_->Prefix(id)->choices.size(), choices);
}

TEST_F(IngestTest, WaitingCanBeStopped) {
  Open();
  const std::string id = Put(MakePrompt(spec_.geometry, 3000, 1));
  const Status status =
      store_->WaitReady(id, [](uint64_t, uint64_t, std::string_view) { return false; });
  EXPECT_TRUE(status.ok() || status.error().code == Code::kCancelled);
  ASSERT_OK(store_->WaitReady(id, nullptr));
}

TEST_F(IngestTest, NewFeatureMapsReplaceTheOldCaches) {
  const uint64_t seed = Seed("NewFeatureMapsReplaceTheOldCaches");
  AddMaps(1024, seed);
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 400, seed);
  const std::string id = PutReady(prompt);
  const auto old_session = AttachCut(prompt, 400);
  ASSERT_TRUE(old_session);
  spec_.feature_maps.clear();
  AddMaps(1024, seed + 1, 12);  // the same file, other weights
  ASSERT_OK(store_->RegisterModel(spec_));
  ASSERT_OK(store_->WaitReady(id, nullptr));
  auto maps = LoadFeatureMaps(spec_.feature_maps[0]);
  ASSERT_OK(maps);
  const auto session = AttachCut(prompt, 400);
  ASSERT_TRUE(session);
  EXPECT_EQ(session->info().d_phi, 12u);
  ExpectSummariesOf(prompt, 400, *session, &*maps);
}

TEST_F(IngestTest, MapsOfTheNearestLengthAreUsed) {
  AddMaps(256, 1);
  AddMaps(1024, 2, 12);
  Open();
  const auto longer = MakePrompt(spec_.geometry, 2000, 3);
  ASSERT_NE(PutReady(longer), "");
  const std::pair<uint32_t, const char*> wanted[] = {{100, "phi (length 256)"},
                                                     {256, "phi (length 256)"},
                                                     {257, "phi (length 1024)"},
                                                     {2000, "phi (length 1024)"}};
  for (const auto& [n, estimator] : wanted) {
    StepPolicy policy;
    policy.estimator = EstimatorKind::kPhi;
    policy.k = 10;
    auto session = store_->Attach({"tiny", "", longer.tokens, "", n, policy});
    ASSERT_OK(session);
    EXPECT_EQ((*session)->info().estimator, estimator) << n;
  }
}

// Keys that do not fit into the memory for selection are read from the store, with the same result.
TEST_F(IngestTest, KeysAreHeldAsFarAsThereIsRoom) {
  const uint64_t seed = Seed("KeysAreHeldAsFarAsThereIsRoom");
  options_.build_codes = options_.build_ivf = true;
  options_.codes_min_tokens = options_.ivf_min_tokens = 1500;
  options_.recall_target = 0.5;
  options_.host_tier_bytes = 0;
  const auto prompt = MakePrompt(spec_.geometry, 2500, seed);
  const auto q = prompt.Q(1, 2499, 1);
  const uint64_t key_bytes = 4ull * 2480 * spec_.geometry.row(0).key_bytes();  // in all 4 heads
  std::map<std::pair<std::string, std::string>, Output> held;
  for (const uint64_t bytes : {uint64_t{64} << 20, uint64_t{0}}) {
    options_.selector_memory_bytes = bytes;
    Open();
    ASSERT_NE(PutReady(prompt), "");
    ASSERT_OK(store_->WaitRewritten(nullptr));
    for (const char* selector : {"codes", "ivf", "exact"}) {
      for (const char* estimator : {"none", "scan"}) {
        StepPolicy policy;
        policy.k = 25;
        policy.selector = selector;
        policy.estimator = ParseVariants(estimator)->front();
        const auto session = Attach(prompt, policy);
        ASSERT_TRUE(session);
        const Output first = Step(*session, 1, q);
        WaitLoaded();
        Step(*session, 1, q);  // charged with what was loaded
        const Output again = Step(*session, 1, q);
        const auto stats = store_->Stats().value();
        EXPECT_EQ(stats.selector_memory_capacity, bytes);
        const uint64_t ssd = again.info.ledger.physical_bytes[size_t(Tier::kSsd)];
        if (bytes > 0) {
          EXPECT_GE(stats.selector_memory_bytes, key_bytes);
          held[{selector, estimator}] = first;
          // Values alone, at most a page each.
          EXPECT_LE(ssd, 2 * 25 * 4096u);
        } else {
          EXPECT_LT(stats.selector_memory_bytes, key_bytes);
          EXPECT_GT(ssd, 0u);
          const Output& other = held.at({selector, estimator});
          EXPECT_EQ(first.y, other.y) << selector << ' ' << estimator;
          EXPECT_EQ(first.lse, other.lse);
        }
        EXPECT_EQ(again.y, first.y);
      }
    }
    EXPECT_LE(store_->Stats().value().selector_memory_bytes, bytes);  // idle prefixes, too
  }
}

TEST_F(IngestTest, PromptsShorterThanTheAnchors) {
  AddMaps(64, 5);
  Open();
  for (const uint32_t n : {1u, 3u, 5u, 20u, 21u, 37u}) {
    const auto prompt = MakePrompt(spec_.geometry, n, 100 + n);
    ASSERT_NE(PutReady(prompt), "");
    for (const EstimatorKind estimator : {EstimatorKind::kNone, EstimatorKind::kMoment,
                                          EstimatorKind::kPhi, EstimatorKind::kAuto}) {
      StepPolicy policy;
      policy.estimator = estimator;
      policy.k = 100;  // everything
      const auto session = Attach(prompt, policy);
      ASSERT_TRUE(session);
      const auto q = prompt.Q(0, n - 1, 1);
      const Output out = Step(*session, 0, q);
      for (uint32_t h = 0; h < 4; ++h) {
        const auto rows = prompt.Rows(0, h / 2);
        const auto want = reference::ExactAttention(
            q.subspan(h * 16, 16), 1, spec_.geometry.layers[0],
            {rows.data(), n, spec_.geometry.row(0).bytes(), spec_.geometry.row(0)});
        EXPECT_NEAR(out.lse[h], want.lse[0], 1e-4);
        for (uint32_t i = 0; i < 16; ++i) EXPECT_NEAR(out.y[h * 16 + i], want.y[i], 1e-5);
      }
    }
  }
}

}  // namespace
}  // namespace prefixd::testing
