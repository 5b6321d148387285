// Tests background rewriting from a user's side: nothing changes but where rows lie.
#include <cstring>
#include <numeric>

#include "base/every_page.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd {
namespace {

using testing::MakePrompt;

class RewriteTest : public testing::RuntimeTest {
 protected:
  RewriteTest() {
    options_.recluster_min_tokens = 100;
    options_.recluster_chunk_tokens = 256;
  }

  std::vector<Output> Steps(const testing::SyntheticPrompt& prompt, const StepPolicy& policy,
                            uint64_t seed) {
    std::vector<Output> out;
    auto session = Attach(prompt, policy);
    if (!session) return out;
    testing::Random random(seed);
    for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
      std::vector<float> q(size_t{spec_.geometry.n_q_heads} * spec_.geometry.key_dim);
      for (float& x : q) x = random.Normal();
      out.push_back(Step(*session, layer, q));
    }
    return out;
  }
};

TEST_F(RewriteTest, StepsAreTheSameBeforeAndAfterSettling) {
  options_.recluster = false;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 700, 21);
  const std::string id = PutReady(prompt);
  StepPolicy retrieve, full;
  retrieve.k = 40;
  full.mode = StepMode::kFull;
  const auto before = Steps(prompt, retrieve, 3), exact = Steps(prompt, full, 3);
  ASSERT_OK(store_->WaitRewritten(nullptr));
  EXPECT_FALSE(store_->Prefix(id)->summary.reclustered);
  options_.recluster = true;
  Open();
  ASSERT_OK(store_->WaitRewritten(nullptr));
  EXPECT_TRUE(store_->Prefix(id)->summary.reclustered);
  EXPECT_EQ(store_->Stats().value().reclustered, 1u);
  EXPECT_GT(store_->Stats().value().bytes_rewritten, 0u);
  ExpectSame(before, Steps(prompt, retrieve, 3));
  // Exact attention runs over other pieces, so results are equal but for rounding.
  const auto reclustered = Steps(prompt, full, 3);
  ASSERT_EQ(reclustered.size(), exact.size());
  for (size_t i = 0; i < exact.size(); ++i) {
    for (size_t j = 0; j < exact[i].y.size(); ++j) {
      EXPECT_NEAR(exact[i].y[j], reclustered[i].y[j], 1e-5);
    }
  }
  Open();
  ASSERT_OK(store_->WaitRewritten(nullptr));
  EXPECT_EQ(store_->Stats().value().reclustered, 0u);  // it is reclustered already
  ExpectSame(before, Steps(prompt, retrieve, 3));
}

// A session that attaches at the very moment of a compactionion has all derived data of the two
// segments.
TEST_F(RewriteTest, ACompactedSegmentHasWhatItsPartsHad) {
  AddMaps(4096, testing::Seed("ACompactedSegmentHasWhatItsPartsHad"));
  options_.phi_features = "log8";
  options_.estimators = *ParseVariants("none, moment, phi, centroid");
  options_.compact_max_tokens = 0;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 500, 29);
  PutReady(MakePrompt(spec_.geometry, 250, 29));
  PutReady(prompt);
  ASSERT_OK(store_->WaitRewritten(nullptr));
  options_.compact_max_tokens = 8192;
  Open();
  while (store_->Stats().value().compacted == 0) {
    const auto stats = store_->Stats().value();
    if (stats.ingest_queue + stats.rewrite_queue > 0) continue;
    ASSERT_GT(store_->Stats().value().compacted, 0u);
  }
  for (const EstimatorKind kind : {EstimatorKind::kPhi, EstimatorKind::kCentroid}) {
    StepPolicy policy;
    policy.estimator = kind;
    policy.k = 30;
    const auto session = Attach(prompt, policy);
    ASSERT_TRUE(session);
    EXPECT_EQ(session->info().parts.size(), 1u);
    const Output out = Step(*session, 1, prompt.Q(1, 499, 1));
    EXPECT_EQ(out.info.ledger.feature_bytes, kind == EstimatorKind::kPhi ? 2u * 30 * 8 : 0u);
  }
}

// WaitReady works even while the prefix's segments are compacted.
TEST_F(RewriteTest, WaitingForAPrefixGoesOnThroughACompaction) {
  Open();
  PutReady(MakePrompt(spec_.geometry, 60, 31));
  ASSERT_OK(store_->WaitRewritten(nullptr));
  const std::string id = Put(MakePrompt(spec_.geometry, 120, 31));
  bool first = true;
  ASSERT_OK(store_->WaitReady(id, [&](uint64_t, uint64_t, std::string_view) {
    if (std::exchange(first, false)) {
      const Status reclustered = store_->WaitRewritten(nullptr);
      EXPECT_TRUE(reclustered.ok());
    }
    return true;
  }));
  EXPECT_EQ(store_->Stats().value().compacted, 1u);
  EXPECT_EQ(store_->Prefix(id)->chain.size(), 1u);
  const auto removed = [&](uint64_t, uint64_t, std::string_view) {
    EXPECT_TRUE(store_->Remove(id).ok());
    return true;
  };
  ASSERT_OK(store_->WaitReady(id, removed));  // it was ready
  EXPECT_CODE(store_->WaitReady(id, nullptr), Code::kNotFound);
}

TEST_F(RewriteTest, TurnsOfAConversationAreCompactedAndKeepTheirNames) {
  Open();
  std::vector<std::string> ids;
  for (uint32_t turn = 1; turn <= 8; ++turn) {
    ids.push_back(PutReady(MakePrompt(spec_.geometry, turn * 60, 23)));
    ASSERT_OK(store_->WaitRewritten(nullptr));
  }
  EXPECT_GT(store_->Stats().value().compacted, 0u);
  EXPECT_LT(store_->Prefix(ids.back())->chain.size(), 8u);
  EXPECT_EQ(EveryPrefix(*store_).value().size(), 8u);
  for (const bool reopened : {false, true}) {
    if (reopened) Open();
    for (uint32_t turn = 1; turn <= 8; ++turn) {
      const auto prompt = MakePrompt(spec_.geometry, turn * 60, 23);
      ASSERT_OK(store_->WaitReady(ids[turn - 1], nullptr));
      EXPECT_EQ(store_->Prefix(ids[turn - 1])->summary.n_tokens, turn * 60);
      StepPolicy full;
      full.mode = StepMode::kFull;
      auto session = store_->Attach({spec_.name, "", {}, ids[turn - 1], 0, full});
      ASSERT_OK(session);
      EXPECT_EQ((*session)->info().n_tokens, turn * 60);
      std::vector<std::byte> rows(size_t{60} * turn * spec_.geometry.row(0).bytes());
      ASSERT_OK((*session)->ReadRange(1, 1, {0, turn * 60}, rows));
      const auto expected = prompt.K(1, 0, turn * 60);
      const size_t key = spec_.geometry.row(0).key_bytes(), row = spec_.geometry.row(0).bytes();
      for (uint32_t t = 0; t < turn * 60; ++t) {
        ASSERT_EQ(
            std::memcmp(rows.data() + t * row,
                        expected.data() + (size_t{t} * spec_.geometry.n_kv_heads + 1) * key, key),
            0);
      }
    }
  }
  for (const std::string& id : ids) ASSERT_OK(store_->Remove(id));
  EXPECT_TRUE(EveryPrefix(*store_).value().empty());
  EXPECT_EQ(store_->Stats().value().bytes_on_disk, 0u);
}

}  // namespace
}  // namespace prefixd
