// Tests that what is derived of a prefix waits until somebody asks for it, where the store is told
// so: no put, restart or session that reads everything makes it; each of the others does.
#include <string>

#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class DeferredTest : public RuntimeTest {
 protected:
  DeferredTest() { options_.defer_ingest = true; }

  static SyntheticPrompt Beginning(const SyntheticPrompt& prompt, uint32_t n) {
    return Branch(prompt, n, MakePrompt(prompt.geometry, n, 1));
  }

  // The state when nothing is at work any more.
  IngestState Settled(const std::string& id) {
    EXPECT_OK(store_->WaitRewritten(nullptr));
    const auto stats = store_->Stats();
    EXPECT_OK(stats);
    EXPECT_EQ(stats->ingest_queue, 0u);
    const auto detail = store_->Prefix(id);
    EXPECT_OK(detail);
    if (!detail.ok()) return IngestState::kFailed;
    const bool made = std::ranges::find(detail->blobs, "ingest") != detail->blobs.end();
    EXPECT_EQ(made, detail->summary.ingest == IngestState::kReady);
    return detail->summary.ingest;
  }

  std::shared_ptr<Session> AttachId(const std::string& id, const StepPolicy& policy) {
    auto session = store_->Attach({.prefix = id, .policy = policy});
    EXPECT_OK(session);
    return session.ok() ? *session : nullptr;
  }
};

constexpr StepMode kFull = StepMode::kFull;

TEST_F(DeferredTest, NothingIsMadeForWhoReadsEverything) {
  const uint64_t seed = Seed("NothingIsMadeForWhoReadsEverything");
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 600, seed);
  const std::string id = Put(prompt);
  ASSERT_NE(id, "");
  EXPECT_EQ(Settled(id), IngestState::kDeferred);
  {
    const auto session = AttachId(id, {.mode = kFull});
    ASSERT_TRUE(session);
    EXPECT_EQ(Settled(id), IngestState::kDeferred);
  }
  Open();
  EXPECT_EQ(Settled(id), IngestState::kDeferred);
  // Another start of the store may not defer.
  options_.defer_ingest = false;
  Open();
  EXPECT_EQ(Settled(id), IngestState::kReady);
  options_.defer_ingest = true;
  Open();
  EXPECT_EQ(Settled(id), IngestState::kReady);
}

TEST_F(DeferredTest, ASessionThatReadsLessAsksForTheWholeChain) {
  const uint64_t seed = Seed("ASessionThatReadsLessAsksForTheWholeChain");
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 900, seed);
  const std::string half = Put(Beginning(prompt, 500)), whole = Put(prompt);
  ASSERT_NE(half, "");
  ASSERT_NE(whole, "");
  ASSERT_NE(half, whole);
  // It answers at once.
  const auto session = AttachId(whole, {.budget = 0.1});
  ASSERT_TRUE(session);
  EXPECT_EQ(Settled(half), IngestState::kReady);
  EXPECT_EQ(Settled(whole), IngestState::kReady);
}

TEST_F(DeferredTest, APolicyThatReadsLessAsks) {
  const uint64_t seed = Seed("APolicyThatReadsLessAsks");
  Open();
  const std::string id = Put(MakePrompt(spec_.geometry, 600, seed));
  const auto session = AttachId(id, {.mode = kFull});
  ASSERT_TRUE(session);
  ASSERT_OK(session->SetPolicy({.mode = kFull}));
  EXPECT_EQ(Settled(id), IngestState::kDeferred);
  ASSERT_OK(session->SetPolicy({.budget = 0.1}));
  EXPECT_EQ(Settled(id), IngestState::kReady);
}

TEST_F(DeferredTest, WhoWaitsAsks) {
  const uint64_t seed = Seed("WhoWaitsAsks");
  Open();
  const std::string id = Put(MakePrompt(spec_.geometry, 600, seed));
  ASSERT_OK(store_->WaitReady(id, nullptr));
  EXPECT_EQ(Settled(id), IngestState::kReady);
}

TEST_F(DeferredTest, WhoCompressesAsks) {
  const uint64_t seed = Seed("WhoCompressesAsks");
  Open();
  const std::string id = Put(MakePrompt(spec_.geometry, 600, seed));
  const CompressSpec spec{.keep = 0.5, .policy = "window"};
  const auto refused = store_->Compress(id, spec, nullptr);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kFailedPrecondition);
  EXPECT_EQ(Settled(id), IngestState::kReady);  // as it says, one has to wait
  EXPECT_OK(store_->Compress(id, spec, nullptr));
}

// A removal that is refused changes nothing, and one that is not leaves nothing to be made.
TEST_F(DeferredTest, ARefusedRemovalMakesNothing) {
  const uint64_t seed = Seed("ARefusedRemovalMakesNothing");
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 900, seed);
  const std::string half = Put(Beginning(prompt, 500)), whole = Put(prompt);
  ASSERT_OK(store_->Remove(half));  // the longer one needs it
  EXPECT_EQ(Settled(whole), IngestState::kDeferred);
  ASSERT_OK(store_->Remove(whole));
  EXPECT_OK(store_->WaitRewritten(nullptr));
}

}  // namespace
}  // namespace prefixd::testing
