// Tests what sessions, puts and open segments take of the store's budget of memory, and what
// happens when there is none left.
#include <malloc.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "runtime/store/memory_parts.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd {
namespace {

constexpr uint64_t kMebi = 1ull << 20, kGibi = 1ull << 30;

// What this process has allocated.
uint64_t Allocated() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

class MemoryTest : public testing::RuntimeTest {
 protected:
  MemoryTest() {
    spec_.geometry = testing::SmallGeometry(4, 8, 8, 64);
    options_.host_tier_bytes = 16 * kMebi;
    options_.memory_bytes = 512 * kMebi;
    options_.estimators = {EstimatorVariant::Parse("moment/full/cov").value()};
    options_.recluster = false;
    options_.compact_max_tokens = 0;
  }

  // A policy in which every head reads another rank of the cross moment: head h of n reads rank
  // 1 + (h + shift) % ranks.
  StepPolicy RankPerHead(uint32_t ranks, uint32_t shift = 0) const {
    StepPolicy policy;
    policy.estimator = EstimatorKind::kNone;
    const KvGeometry& g = spec_.geometry;
    for (uint32_t head = 0; head < g.n_layers * g.n_kv_heads; ++head) {
      EstimatorVariant variant = EstimatorKind::kMoment;
      variant.rank = 1 + (head + shift) % ranks;
      policy.fixed.push_back({head / g.n_kv_heads, head % g.n_kv_heads, variant});
    }
    policy.k = 8;
    return policy;
  }

  uint64_t Used(std::string_view kind) const {
    const RuntimeStats stats = store_->Stats().value();
    for (const MemoryOfKind& m : stats.memory_kinds) {
      if (m.kind == kind) return m.bytes;
    }
    return 0;
  }
};

// Bytes of the two factors of one head.
constexpr uint64_t FactorBytes(uint32_t rank) { return uint64_t{rank} * (64 + 64) * 8; }

TEST_F(MemoryTest, VariantsKeepOnlyTheHeadsThatAskForThem) {
  Open();
  const auto prompt = testing::MakePrompt(spec_.geometry, 400, testing::Seed("MemoryVariants"));
  PutReady(prompt);
  StepPolicy plain;
  plain.estimator = EstimatorKind::kNone;
  plain.k = 8;
  auto session = Attach(prompt, plain);
  const uint64_t before = Allocated();
  ASSERT_OK(session->SetPolicy(RankPerHead(32)));
  // 32 heads with ranks 1 to 32 keep as much as all heads with rank 16.5.
  const uint64_t heads = 32, mean = FactorBytes(33) / 2 + (3 * 64) * 8;
  EXPECT_LT(Allocated() - before, 3 * heads * mean);
}

TEST_F(MemoryTest, SummariesAreSharedCountedAndDroppedWithTheLastPolicy) {
  Open();
  const auto prompt = testing::MakePrompt(spec_.geometry, 400, testing::Seed("MemoryShared"));
  PutReady(prompt);
  const uint64_t model = Used("summaries");  // the model itself counts among them
  StepPolicy plain;
  plain.estimator = EstimatorKind::kNone;
  plain.k = 8;
  auto session = Attach(prompt, plain);
  EXPECT_EQ(Used("summaries"), model);
  ASSERT_OK(session->SetPolicy(RankPerHead(32)));
  uint64_t expected = 0;
  for (uint32_t rank = 1; rank <= 32; ++rank) expected += FactorBytes(rank) + 3 * 64 * 8;
  const uint64_t one = Used("summaries") - model;
  EXPECT_GE(one, expected);
  EXPECT_LT(one, expected + 32 * 1024);
  auto second = Attach(prompt, RankPerHead(32));
  EXPECT_EQ(Used("summaries"), model + one);
  ASSERT_OK(second->SetPolicy(RankPerHead(32, 1)));  // other ranks, as many bytes
  EXPECT_EQ(Used("summaries"), model + 2 * one);
  ASSERT_OK(second->SetPolicy(plain));
  EXPECT_EQ(Used("summaries"), model + one);
  const auto q = prompt.Q(0, 399, 1);
  const Output shared = Step(*session, 0, q);
  ASSERT_OK(session->Detach());
  session.reset();
  EXPECT_EQ(Used("summaries"), model);
  // Made again, they answer the same.
  ASSERT_OK(second->SetPolicy(RankPerHead(32)));
  ExpectSame({shared}, {Step(*second, 0, q)});
}

TEST_F(MemoryTest, APolicyThatDoesNotFitIsRefusedAndTheOldOneGoesOn) {
  options_.memory_bytes = 128 * kMebi;
  options_.tenant_memory_share = 0.012;  // 1.5 MiB
  options_.host_tier_bytes = 1 * kMebi;
  options_.selector_memory_bytes = options_.gathered_rows_bytes = 0;
  Open();
  const auto prompt = testing::MakePrompt(spec_.geometry, 400, testing::Seed("MemoryRefused"));
  std::string id;
  {
    // The put needs more than the share, so that another store makes it.
    options_.tenant_memory_share = 1;
    Open();
    id = PutReady(prompt);
    options_.tenant_memory_share = 0.012;
    Open();
  }
  ASSERT_OK(store_->WaitReady(id, nullptr));
  StepPolicy plain;
  plain.estimator = EstimatorKind::kMoment;
  plain.k = 8;
  auto session = Attach(prompt, plain);
  ASSERT_TRUE(session);
  const auto q = prompt.Q(0, 399, 1);
  const Output before = Step(*session, 0, q);
  const uint64_t used = Used("summaries");
  StepPolicy large;
  large.estimator = EstimatorVariant::Parse("moment/full/cov").value();
  large.k = 8;
  const Status refused = session->SetPolicy(large);
  EXPECT_CODE(refused, Code::kResourceExhausted);
  EXPECT_NE(refused.error().message.find("tenant"), std::string::npos) << refused.error().message;
  EXPECT_EQ(Used("summaries"), used);
  ExpectSame({before}, {Step(*session, 0, q)});
  const RuntimeStats stats = store_->Stats().value();
  EXPECT_GE(stats.memory_refused, 1u);
  ASSERT_EQ(stats.memory_tenants.size(), 1u);
  EXPECT_GE(stats.memory_tenants[0].refused, 1u);
  EXPECT_LE(stats.memory_tenants[0].bytes, stats.memory_tenants[0].capacity);
}

TEST_F(MemoryTest, HistoryOfSharedSetsCountsAndEndsWithThePolicy) {
  Open();
  const auto prompt = testing::MakePrompt(spec_.geometry, 400, testing::Seed("MemorySets"));
  PutReady(prompt);
  StepPolicy policy;
  policy.estimator = EstimatorKind::kNone;
  policy.k = 100;
  policy.sharing.block = 64;
  policy.sharing.similarity = 1;  // none is alike: every step keeps a set of its own
  auto session = Attach(prompt, policy);
  EXPECT_EQ(Used("shared_sets"), 0u);
  constexpr int kSteps = 20;
  for (int i = 0; i < kSteps; ++i) Step(*session, 0, prompt.Q(0, 300 + i, 1));
  // A set has its ids and two copies of the query that retrieved it, on each of 8 KV heads.
  const uint64_t least = kSteps * 8 * (100 * sizeof(uint32_t) + 2 * 64 * sizeof(float));
  EXPECT_GE(Used("shared_sets"), least);
  EXPECT_LT(Used("shared_sets"), 3 * least);
  StepPolicy plain = policy;
  plain.sharing.block = 1;
  ASSERT_OK(session->SetPolicy(plain));
  EXPECT_EQ(Used("shared_sets"), 0u);
}

TEST_F(MemoryTest, StepsAnswerWhereNoSetCanBeKept) {
  Open();
  const auto prompt = testing::MakePrompt(spec_.geometry, 400, testing::Seed("MemoryNoSets"));
  PutReady(prompt);
  StepPolicy policy;
  policy.estimator = EstimatorKind::kNone;
  policy.k = 100;
  policy.sharing.block = 8;
  auto session = Attach(prompt, policy);
  StepPolicy alone = policy;
  alone.sharing.block = 1;
  auto other = Attach(prompt, alone);
  const auto q = prompt.Q(0, 399, 1);
  Step(*session, 0, q);  // brings what steps need
  Step(*other, 0, q);
  ASSERT_OK(session->SetPolicy(policy));
  const MemoryCharge rest = store_->memory()->Shared().Charge(MemoryKind::kMessages, kGibi);
  for (int i = 0; i < 4; ++i) {  // retrieved anew each time
    ExpectSame({Step(*other, 0, q)}, {Step(*session, 0, q)});
  }
  EXPECT_EQ(Used("shared_sets"), 0u);
}

TEST_F(MemoryTest, AFullBudgetShedsAttachesAndPutsAndTakesThemAgain) {
  Open();
  const auto prompt = testing::MakePrompt(spec_.geometry, 400, testing::Seed("MemoryFull"));
  PutReady(prompt);
  StepPolicy policy;
  policy.estimator = EstimatorKind::kMoment;
  policy.k = 8;
  const auto attach = [&] {
    return store_->Attach({spec_.name, "", prompt.tokens, "", 0, policy});
  };
  const auto put = [&] { return store_->BeginPut({spec_.name, "other", prompt.tokens, ""}); };
  {
    const MemoryCharge rest = store_->memory()->Shared().Charge(MemoryKind::kMessages, kGibi);
    const auto session = attach();
    EXPECT_CODE(session, Code::kResourceExhausted);
    EXPECT_GT(session.error().retry_after_ms, 0u);
    const auto stream = put();
    EXPECT_CODE(stream, Code::kResourceExhausted);
    EXPECT_GT(stream.error().retry_after_ms, 0u);
    EXPECT_EQ(Used("host_tier"), 0u);  // all pages went before anybody was refused
  }
  ASSERT_OK(attach());
  ASSERT_OK(put());
  EXPECT_EQ(store_->Stats().value().sessions, 0u);
}

TEST_F(MemoryTest, IdlePrefixesGiveTheirKeysBack) {
  Open();
  const auto prompt = testing::MakePrompt(spec_.geometry, 400, testing::Seed("MemoryIdle"));
  PutReady(prompt);
  StepPolicy policy;
  policy.estimator = EstimatorKind::kNone;
  policy.selector = "exact";
  policy.k = 8;
  const auto q = prompt.Q(0, 399, 1);
  const auto step = [&] { return Step(*Attach(prompt, policy), 0, q); };
  const Output before = step();
  EXPECT_GT(Used("keys"), 0u);  // for a session to come
  const auto& memory = *store_->memory();
  {
    const auto most = store_->memory()->Shared().Take(
        MemoryKind::kMessages,
        memory.capacity() - memory.used() + Used("host_tier") + Used("keys"));
    ASSERT_OK(most);
    EXPECT_EQ(Used("keys"), 0u);
  }
  ExpectSame({before}, {step()});
}

// A refused write has written nothing: the same call may be made again.
TEST_F(MemoryTest, ARefusedWriteMayBeRepeated) {
  Open();
  const auto prompt = testing::MakePrompt(spec_.geometry, 400, testing::Seed("MemoryPut"));
  auto put = store_->BeginPut({spec_.name, "", prompt.tokens, ""});
  ASSERT_OK(put);
  const auto write = [&](uint32_t layer, uint32_t first, uint32_t n) {
    return (*put)->Write(layer, first, n, prompt.K(layer, first, n), prompt.V(layer, first, n));
  };
  ASSERT_OK(write(0, 0, 10));
  for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
    for (uint32_t t = layer == 0 ? 10 : 0; t < 400; t += 39) {
      const uint32_t n = std::min(39u, 400 - t);
      if (t % 2 == 0) {
        const MemoryCharge rest = store_->memory()->Shared().Charge(MemoryKind::kMessages, kGibi);
        const Status refused = write(layer, t, n);
        if (!refused.ok()) {
          EXPECT_CODE(refused, Code::kResourceExhausted);
          EXPECT_GT(refused.error().retry_after_ms, 0u);
        } else {
          continue;  // what it took before was enough
        }
      }
      ASSERT_OK(write(layer, t, n));
    }
  }
  const auto result = (*put)->Commit();
  ASSERT_OK(result);
  put->reset();
  EXPECT_LE(Used("puts"), 64 * kMebi);  // idle buffers
  ASSERT_OK(store_->WaitReady(result->prefix, nullptr));
  StepPolicy full;
  full.mode = StepMode::kFull;
  auto session = Attach(prompt, full);
  ExpectSuffix(*session, prompt, 1, 390, 10);
}

TEST_F(MemoryTest, IngestWaitsForMemoryAndGoesOn) {
  Open();
  const auto prompt = testing::MakePrompt(spec_.geometry, 400, testing::Seed("MemoryIngest"));
  auto put = store_->BeginPut({spec_.name, "", prompt.tokens, ""});
  ASSERT_OK(put);
  for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
    ASSERT_OK((*put)->Write(layer, 0, 400, prompt.K(layer, 0, 400), prompt.V(layer, 0, 400)));
  }
  MemoryCharge rest = store_->memory()->Shared().Charge(MemoryKind::kMessages, kGibi);
  const auto result = (*put)->Commit();
  ASSERT_OK(result);
  while (store_->Stats().value().memory_refused < 2) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const auto waiting = store_->Prefix(result->prefix);
  ASSERT_OK(waiting);
  EXPECT_EQ(waiting->summary.ingest, IngestState::kRunning);
  rest.Release();
  ASSERT_OK(store_->WaitReady(result->prefix, nullptr));
}

TEST_F(MemoryTest, TenantsAreNamedWithWhatTheyHold) {
  Open();
  const auto prompt = testing::MakePrompt(spec_.geometry, 400, testing::Seed("MemoryTenants"));
  const std::string id = Put(prompt, true, 100, "team-a");
  ASSERT_OK(store_->WaitReady(id, nullptr));
  StepPolicy policy;
  policy.estimator = EstimatorKind::kMoment;
  policy.k = 8;
  auto session = store_->Attach({spec_.name, "team-a", prompt.tokens, "", 0, policy});
  ASSERT_OK(session);
  Step(**session, 0, prompt.Q(0, 399, 1));
  const RuntimeStats stats = store_->Stats().value();
  const auto tenant = std::ranges::find(stats.memory_tenants, "team-a", &MemoryOfTenant::tenant);
  ASSERT_TRUE(tenant != stats.memory_tenants.end());
  EXPECT_GE(tenant->bytes, Used("summaries") + Used("sessions"));
  EXPECT_GT(tenant->host_tier_bytes, 0u);
  uint64_t sum = 0;
  for (const MemoryOfKind& kind : stats.memory_kinds) sum += kind.bytes;
  EXPECT_EQ(sum, stats.memory_bytes);
  EXPECT_EQ(stats.memory_capacity, 512 * kMebi);
}

// ---- the parts of the memory --------------------------------------------------------------------

uint64_t Sum(const RuntimeOptions& o) {
  return o.host_tier_bytes + o.selector_memory_bytes + o.gathered_rows_bytes;
}

TEST(MemoryParts, FollowFromTheMemory) {
  const auto parts = WithMemoryParts({.memory_bytes = 8 * kGibi}, 64 * kGibi);
  ASSERT_OK(parts);
  EXPECT_EQ(parts->memory_bytes, 8 * kGibi);
  EXPECT_GT(parts->host_tier_bytes, 3 * kGibi);
  EXPECT_GT(parts->selector_memory_bytes, kGibi);
  EXPECT_GT(parts->gathered_rows_bytes, 0u);
  EXPECT_LT(Sum(*parts), 6 * kGibi);  // calls, sessions and puts need some, too
}

TEST(MemoryParts, WithoutMemoryTheyAreHalfTheMachine) {
  const auto parts = WithMemoryParts({}, 16 * kGibi);
  ASSERT_OK(parts);
  EXPECT_EQ(parts->memory_bytes, 8 * kGibi);
  const auto pinned = WithMemoryParts({.host_tier_bytes = 10 * kGibi}, 16 * kGibi);
  ASSERT_OK(pinned);
  EXPECT_GT(pinned->memory_bytes, 13 * kGibi);
  EXPECT_EQ(pinned->host_tier_bytes, 10 * kGibi);
  EXPECT_LT(Sum(*pinned), pinned->memory_bytes);
  EXPECT_GT(MachineMemory(), 0u);
}

TEST(MemoryParts, GivenOnesStayAndTheOthersMakeRoom) {
  const auto parts =
      WithMemoryParts({.memory_bytes = kGibi, .host_tier_bytes = 600 * kMebi}, 64 * kGibi);
  ASSERT_OK(parts);
  EXPECT_EQ(parts->host_tier_bytes, 600 * kMebi);
  EXPECT_GT(parts->selector_memory_bytes, 0u);
  EXPECT_LT(Sum(*parts), 700 * kMebi);
  const auto none = WithMemoryParts({.memory_bytes = kGibi, .host_tier_bytes = 0}, 64 * kGibi);
  ASSERT_OK(none);
  EXPECT_EQ(none->host_tier_bytes, 0u);
}

TEST(MemoryParts, WhatDoesNotFitIsSaidWithNumbers) {
  const auto together = WithMemoryParts(
      {.memory_bytes = kGibi, .host_tier_bytes = 800 * kMebi, .selector_memory_bytes = 300 * kMebi},
      64 * kGibi);
  EXPECT_CODE(together, Code::kInvalidArgument);
  for (const char* part : {"store.host_tier_mib 800 MiB", "store.selector_memory_mib 300 MiB",
                           "store.memory_mib 1024 MiB"}) {
    EXPECT_NE(together.error().message.find(part), std::string::npos) << together.error().message;
  }
  EXPECT_CODE(WithMemoryParts({.memory_bytes = 16 * kMebi}, 64 * kGibi), Code::kInvalidArgument);
  EXPECT_CODE(WithMemoryParts({.host_tier_bytes = 65 * kGibi}, 64 * kGibi), Code::kInvalidArgument);
}

}  // namespace
}  // namespace prefixd
