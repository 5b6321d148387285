// Tests that what sessions have loaded of a prefix serves the next ones while no other prefix needs
// the memory.
#include "runtime/store/local_store.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class PreparedCacheTest : public RuntimeTest {
 protected:
  PreparedCacheTest() {
    options_.build_codes = true;
    options_.codes_min_tokens = 1500;
    options_.host_tier_bytes = 0;  // every read comes from the disk
    options_.recluster = false;
    policy_.k = 25;
    policy_.selector = "codes";
  }

  static constexpr uint32_t kTokens = 2500;

  // Returns the bytes of all heads' keys in memory.
  uint64_t KeyBytes() const {
    const KvGeometry& g = spec_.geometry;
    return uint64_t{g.n_layers} * g.n_kv_heads * (kTokens - 20) * g.row(0).key_bytes();
  }
  static uint64_t Ssd(const Output& out) {
    return out.info.ledger.physical_bytes[static_cast<size_t>(Tier::kSsd)];
  }
  // Bytes of the pages that hold the rows of two heads, once: the most that a step reads when all
  // keys are in memory.
  static constexpr uint64_t kRowPages = 2 * (kTokens / 64 + 1) * 4096;

  // Returns what a session reads until everything that a layer's steps need is in memory.
  uint64_t SsdUntilLoaded(Session& session, uint32_t layer, std::span<const float> q) {
    Step(session, layer, q);
    WaitLoaded();
    Step(session, layer, q);  // is charged with what was preloaded
    return session.report()->total.physical_bytes[static_cast<size_t>(Tier::kSsd)];
  }

  StepPolicy policy_;
};

TEST_F(PreparedCacheTest, TheNextSessionReadsValuesAlone) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, kTokens, Seed("TheNextSessionReadsValuesAlone"));
  const std::string prefix = PutReady(prompt);
  const auto q = prompt.Q(1, kTokens - 1, 1);
  auto session = Attach(prompt, policy_);
  ASSERT_TRUE(session);
  EXPECT_GT(SsdUntilLoaded(*session, 1, q), kRowPages);
  const Output first = Step(*session, 1, q);
  EXPECT_LE(Ssd(first), kRowPages);
  session.reset();
  EXPECT_GT(store_->Stats().value().selector_memory_bytes, KeyBytes());
  session = Attach(prompt, policy_);
  ASSERT_TRUE(session);
  const Output again = Step(*session, 1, q);
  EXPECT_LE(Ssd(again), kRowPages);
  EXPECT_EQ(again.y, first.y);
  EXPECT_EQ(again.lse, first.lse);
  // The same segment with another length is another prefix.
  AttachSpec shorter;
  shorter.model = spec_.name;
  shorter.prefix = prefix;
  shorter.n_tokens = kTokens - 100;
  shorter.policy = policy_;
  const auto cut = store_->Attach(shorter);
  ASSERT_OK(cut);
  EXPECT_GT(SsdUntilLoaded(**cut, 1, q), kRowPages);
}

TEST_F(PreparedCacheTest, FirstStepsDoNotWaitForKeys) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, kTokens, Seed("FirstStepsDoNotWaitForKeys"));
  const std::string prefix = PutReady(prompt);
  Open();
  const auto q = prompt.Q(1, kTokens - 1, 1);
  // Steps return the same bits with all keys in memory, some of them, or none.
  auto session = Attach(prompt, policy_);
  ASSERT_TRUE(session);
  const Output first = Step(*session, 1, q);
  WaitLoaded();
  const Output loaded = Step(*session, 1, q);
  EXPECT_EQ(loaded.y, first.y);
  EXPECT_EQ(loaded.lse, first.lse);
  // The session was charged with all preloading, including the keys of both heads.
  Step(*session, 0, prompt.Q(0, kTokens - 1, 1));
  const auto report = *session->report();
  EXPECT_GT(report.total.physical_bytes[static_cast<size_t>(Tier::kSsd)], KeyBytes());
  session.reset();
  // Preloading under way holds nothing open once the last session is gone.
  for (int i = 0; i < 20; ++i) {
    Open();
    session = Attach(prompt, policy_);
    ASSERT_TRUE(session);
    EXPECT_EQ(Step(*session, 1, q).y, first.y);
    session.reset();
    EXPECT_EQ(store_->Stats().value().preload_queue, 0u);
  }
  ASSERT_OK(store_->Remove(prefix));
}

TEST_F(PreparedCacheTest, IdleMemoryGivesWay) {
  options_.selector_memory_bytes = KeyBytes() * 3 / 2;
  Open();
  const auto one = MakePrompt(spec_.geometry, kTokens, Seed("IdleMemoryGivesWay"));
  const auto two = MakePrompt(spec_.geometry, kTokens, Seed("IdleMemoryGivesWay") + 1);
  ASSERT_NE(PutReady(one), "");
  ASSERT_NE(PutReady(two), "");
  for (const auto* prompt : {&one, &two, &one}) {
    const auto q = prompt->Q(1, kTokens - 1, 1);
    const auto session = Attach(*prompt, policy_);
    ASSERT_TRUE(session);
    EXPECT_GT(SsdUntilLoaded(*session, 1, q), kRowPages);
    EXPECT_LE(Ssd(Step(*session, 1, q)), kRowPages);  // other keys made room for this prompt's
    const auto stats = store_->Stats().value();
    EXPECT_GE(stats.selector_memory_bytes, KeyBytes());
    EXPECT_LE(stats.selector_memory_bytes, stats.selector_memory_capacity);
  }
}

// Where not all keys fit, those of some heads do.
TEST_F(PreparedCacheTest, KeysOfSomeHeadsSaveTheirReads) {
  const auto prompt = MakePrompt(spec_.geometry, kTokens, Seed("KeysOfSomeHeadsSaveTheirReads"));
  const auto q0 = prompt.Q(0, kTokens - 1, 1), q1 = prompt.Q(1, kTokens - 1, 1);
  struct Steps {
    Output first, second;
    uint64_t held = 0;
  };
  const auto steps = [&](uint64_t memory) {
    options_.selector_memory_bytes = memory;
    Open();
    Steps out;
    EXPECT_NE(PutReady(prompt), "");
    const auto session = Attach(prompt, policy_);
    for (int i = 0; i < 2; ++i) {  // the second time all that has room is there
      out.first = Step(*session, 0, q0), out.second = Step(*session, 1, q1);
      WaitLoaded();
    }
    out.first = Step(*session, 0, q0), out.second = Step(*session, 1, q1);
    out.held = store_->Stats().value().selector_memory_bytes;
    return out;
  };
  const Steps none = steps(0), all = steps(64 << 20), some = steps(KeyBytes() * 3 / 4);
  const uint64_t of_head = KeyBytes() / 4;
  EXPECT_EQ(all.held - none.held, KeyBytes());
  EXPECT_EQ(some.held - none.held, of_head);  // as many as half of the memory holds
  EXPECT_LT(Ssd(some.first), Ssd(none.first));
  EXPECT_GT(Ssd(some.first), Ssd(all.first));
  EXPECT_EQ(Ssd(some.second), Ssd(none.second));
  for (const Steps* other : {&none, &all}) {
    EXPECT_EQ(some.first.y, other->first.y);
    EXPECT_EQ(some.first.lse, other->first.lse);
    EXPECT_EQ(some.second.y, other->second.y);
  }
}

TEST_F(PreparedCacheTest, TheNextSessionGetsTheKeysThatHadNoRoom) {
  const auto one = MakePrompt(spec_.geometry, kTokens, Seed("TheNextSessionGetsTheKeys"));
  const auto two = MakePrompt(spec_.geometry, kTokens, Seed("TheNextSessionGetsTheKeys") + 1);
  options_.selector_memory_bytes = KeyBytes() * 15 / 8;
  Open();
  ASSERT_NE(PutReady(one), "");
  ASSERT_NE(PutReady(two), "");
  const auto q = two.Q(1, kTokens - 1, 1);
  auto first = Attach(one, policy_), session = Attach(two, policy_);
  ASSERT_TRUE(first && session);
  SsdUntilLoaded(*first, 1, one.Q(1, kTokens - 1, 1));
  SsdUntilLoaded(*session, 1, q);
  const Output some = Step(*session, 1, q);
  EXPECT_GT(Ssd(some), kRowPages);
  EXPECT_GT(store_->Stats().value().selector_memory_bytes, KeyBytes() * 5 / 4);
  first.reset(), session.reset();
  session = Attach(two, policy_);
  ASSERT_TRUE(session);
  SsdUntilLoaded(*session, 1, q);
  const Output all = Step(*session, 1, q);
  EXPECT_LE(Ssd(all), kRowPages);
  EXPECT_EQ(all.y, some.y);
}

TEST_F(PreparedCacheTest, WhatIsIdleHoldsNothingOpen) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, kTokens, Seed("WhatIsIdleHoldsNothingOpen"));
  const std::string prefix = PutReady(prompt);
  auto session = Attach(prompt, policy_);
  ASSERT_TRUE(session);
  Step(*session, 0, prompt.Q(0, kTokens - 1, 1));
  EXPECT_CODE(store_->Remove(prefix), Code::kFailedPrecondition);
  session.reset();
  ASSERT_OK(store_->Remove(prefix));
  EXPECT_EQ(store_->Stats().value().selector_memory_bytes, 0u);
}

}  // namespace
}  // namespace prefixd::testing
