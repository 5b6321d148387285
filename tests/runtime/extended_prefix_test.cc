// Tests prefixes that take over what a shorter one has loaded: they answer to the bit as those that
// load everything themselves, and read what is behind alone.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "runtime/session/session_impl.h"
#include "runtime/step/step.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

constexpr uint32_t kShort = 1500, kLong = 2600;

class ExtendedPrefixTest : public RuntimeTest {
 protected:
  using Prefix = std::shared_ptr<PreparedPrefix>;

  ExtendedPrefixTest() {
    options_.build_codes = options_.build_ivf = true;
    options_.codes_min_tokens = options_.ivf_min_tokens = 1050;
    options_.recluster = false;
    options_.host_tier_bytes = 0;  // every read comes from the disk
    options_.phi_features = "log8";
    options_.estimators = *ParseVariants("none, moment, moment/r4, centroid, scan, phi");
    AddMaps(512, 7);
    AddMaps(4096, 8);
  }

  // A chain of two segments, each with its own codes.
  void Prepare(const char* name) {
    Open();
    const uint64_t seed = Seed(name);
    prompt_ = MakePrompt(spec_.geometry, kLong, seed);
    ASSERT_NE(PutReady(MakePrompt(spec_.geometry, kShort, seed)), "");
    id_ = PutReady(prompt_);
    session_ = Attach(prompt_, {.mode = StepMode::kFull});
    ASSERT_TRUE(session_);
  }
  SessionImpl& session() const { return dynamic_cast<SessionImpl&>(*session_); }
  SessionServices& services() const { return *session().services(); }

  // The first n tokens with nothing loaded.
  Prefix Fresh(uint32_t n) const {
    const auto plan = *session().plan();
    const auto parts = plan->prefix->parts();
    const storage::SegmentId& id = n <= kShort ? parts.front().id : parts.back().id;
    auto prefix = services().store.prepare(plan->prefix->model(), id, n);
    EXPECT_OK(prefix);
    (*prefix)->memory()->stale = true;  // so that nobody else gets it
    return *std::move(prefix);
  }
  static constexpr index::IndexKind kKinds[] = {index::IndexKind::kExact, index::IndexKind::kCodes,
                                                index::IndexKind::kIvf};
  static std::vector<storage::ReadStats> Load(PreparedPrefix& prefix) {
    std::vector<storage::ReadStats> reads(prefix.heads());
    for (size_t head = 0; head < prefix.heads(); ++head) {
      for (const auto kind : kKinds) EXPECT_OK(prefix.Index(head, kind, &reads[head]));
      EXPECT_OK(prefix.MidKeys(head, Bring::kNow, &reads[head]));
    }
    return reads;
  }
  static std::vector<storage::ReadStats> Extend(PreparedPrefix& prefix,
                                                const PreparedPrefix& shorter) {
    std::vector<storage::ReadStats> reads(prefix.heads());
    for (size_t head = 0; head < prefix.heads(); ++head) {
      for (const auto kind : kKinds) {
        EXPECT_OK(prefix.Extend(shorter, head, kind, &reads[head]));
      }
    }
    return reads;
  }
  static uint64_t Ssd(const std::vector<storage::ReadStats>& reads) {
    uint64_t bytes = 0;
    for (const auto& of_head : reads) bytes += of_head.bytes[static_cast<size_t>(Tier::kSsd)];
    return bytes;
  }

  class Turn final : public StepTurn {
   public:
    bool GoesOn() override { return true; }
    bool shared() const override { return false; }
  };
  // A step of a head, with a plan of its own.
  Output StepOver(const Prefix& prefix, const StepPolicy& policy, size_t head,
                  std::span<const float> q) const {
    auto plan = MakePlan(options_, services().prefetcher, prefix, policy, nullptr);
    EXPECT_OK(plan);
    auto compute = Compute::Open("cpu");
    ScratchPool scratch;
    GatheredRowCache gathered(0);
    const LayerShape shape = spec_.geometry.layer(prefix->layer_of(head));
    Output out{std::vector<float>(shape.group_size() * shape.value_dim),
               std::vector<float>(shape.group_size()),
               {}};
    if (!plan.ok()) return out;
    GroupTask task;
    task.plan = *plan;
    task.head = head;
    task.k = (*plan)->heads[head].k;
    task.q = q, task.y = out.y, task.lse = out.lse;
    GroupTask* const one = &task;
    Turn turn;
    StepGroups({**compute, scratch, gathered}, {&one, 1}, turn);
    EXPECT_TRUE(task.status.ok()) << task.status.error().ToString();
    return out;
  }
  void ExpectEqual(const Prefix& prefix, const Prefix& from_scratch) const {
    Random random(prefix->n_tokens());
    const LayerShape shape = spec_.geometry.layer(0);
    for (size_t head = 0; head < prefix->heads(); ++head) {
      ASSERT_TRUE(prefix->holds_keys(head));
      const auto keys = prefix->MidKeys(head, Bring::kNow, nullptr);
      const auto want = from_scratch->MidKeys(head, Bring::kNow, nullptr);
      ASSERT_EQ((*keys)->count, prefix->partition().mid.size());
      ASSERT_EQ((*keys)->count, (*want)->count);
      EXPECT_EQ(std::memcmp((*keys)->data, (*want)->data, (*keys)->count * (*keys)->stride), 0);
      for (const char* selector : {"exact", "codes", "ivf", "auto"}) {
        for (const char* estimator :
             {"none", "moment", "moment/r4", "centroid", "scan", "phi", "auto"}) {
          SCOPED_TRACE(std::string(selector) + ", " + estimator);
          StepPolicy policy;
          policy.k = 40;
          policy.selector = selector;
          policy.estimator = *EstimatorVariant::Parse(estimator);
          const auto q = random.Normals(size_t{shape.group_size()} * shape.key_dim);
          ExpectSame({StepOver(prefix, policy, head, q)},
                     {StepOver(from_scratch, policy, head, q)});
        }
      }
    }
  }

  SyntheticPrompt prompt_;
  std::string id_;
  std::shared_ptr<Session> session_;
};

TEST_F(ExtendedPrefixTest, AnswersAsOneThatLoadsEverything) {
  Prepare("ExtendedPrefix");
  Prefix last = Fresh(kShort);
  Load(*last);
  for (const uint32_t n : {kShort + 100, kShort + 200, kShort + 500, kLong}) {
    SCOPED_TRACE(n);
    const Prefix from_scratch = Fresh(n), prefix = Fresh(n);
    const uint64_t all = Ssd(Load(*from_scratch)), some = Ssd(Extend(*prefix, *last));
    // Keys at least are not read again; which indexes are used depends on what was measured of
    // them.
    const uint64_t keys =
        last->heads() * last->partition().mid.size() * spec_.geometry.row(0).key_bytes();
    EXPECT_LT(some, all - keys / 2);
    ExpectEqual(prefix, from_scratch);
    last = prefix;
  }
}

// Most of the time nothing is copied, and two that continue the same one do not disturb each other.
TEST_F(ExtendedPrefixTest, KeysAreSharedWithOneThatContinues) {
  Prepare("ExtendedPrefixShared");
  const Prefix base = Fresh(kShort);
  Load(*base);
  const Prefix longer = Fresh(kShort + 100);
  Extend(*longer, *base);
  EXPECT_NE(longer->memory()->keys, base->memory()->keys);  // which had no room
  const Prefix next = Fresh(kShort + 200), sibling = Fresh(kShort + 250);
  Extend(*next, *longer);
  EXPECT_EQ(next->memory()->keys, longer->memory()->keys);
  Extend(*sibling, *longer);
  EXPECT_NE(sibling->memory()->keys, longer->memory()->keys);
  for (const Prefix& prefix : {base, longer, next, sibling}) {
    const Prefix from_scratch = Fresh(prefix->n_tokens());
    Load(*from_scratch);
    ExpectEqual(prefix, from_scratch);
  }
}

TEST_F(ExtendedPrefixTest, WhatDoesNotFitIsLoaded) {
  Prepare("ExtendedPrefixUnfit");
  const Prefix base = Fresh(kShort), longer = Fresh(kLong), from_scratch = Fresh(kShort);
  Load(*longer), Load(*from_scratch);
  Extend(*base, *longer);  // it is the other one that continues
  ExpectEqual(base, from_scratch);
  // Keys that the shorter one does not hold are left to the steps.
  const Prefix empty = Fresh(kShort), next = Fresh(kLong);
  Extend(*next, *empty);
  EXPECT_FALSE(next->holds_keys(0));
  Load(*next);
  ExpectEqual(next, longer);
}

// Beside little memory there is no spare room, and in the end none at all.
TEST_F(ExtendedPrefixTest, MemoryForKeysIsBounded) {
  const uint64_t token = 4 * spec_.geometry.row(0).key_bytes();
  options_.build_codes = options_.build_ivf = false;
  options_.selector_memory_bytes = token * (kShort + kShort + 150);
  Prepare("ExtendedPrefixMemory");
  const Prefix base = Fresh(kShort);
  std::vector<storage::ReadStats> reads(4);
  for (size_t head = 0; head < 4; ++head) ASSERT_OK(base->MidKeys(head, Bring::kNow, nullptr));
  const Prefix longer = Fresh(kShort + 100), longest = Fresh(kLong);
  for (size_t head = 0; head < 4; ++head) {
    EXPECT_OK(longer->Extend(*base, head, index::IndexKind::kExact, &reads[head]));
    EXPECT_OK(longest->Extend(*longer, head, index::IndexKind::kExact, &reads[head]));
    EXPECT_TRUE(longer->holds_keys(head));
    EXPECT_FALSE(longest->holds_keys(head));
  }
  EXPECT_EQ(longer->memory()->keys->room(), longer->partition().mid.size());
  EXPECT_LE(store_->Stats()->selector_memory_bytes, options_.selector_memory_bytes);
}

// Keys of some heads are taken over, and leave room to grow as those of all do.
TEST_F(ExtendedPrefixTest, KeysOfSomeHeadsAreTakenOver) {
  const uint64_t head_token = spec_.geometry.row(0).key_bytes();
  options_.build_codes = options_.build_ivf = false;
  // Half of it is one head, with room to grow.
  options_.selector_memory_bytes = head_token * 5000;
  Prepare("ExtendedPrefixSome");
  const Prefix base = Fresh(kShort);
  Load(*base);
  EXPECT_TRUE(base->holds_keys(0));
  EXPECT_FALSE(base->holds_keys(1) || base->holds_keys(3));
  const Prefix longer = Fresh(kShort + 100), longest = Fresh(kShort + 200);
  const std::vector<storage::ReadStats> reads = Extend(*longer, *base);
  Extend(*longest, *longer);
  EXPECT_TRUE(longer->holds_keys(0));
  EXPECT_FALSE(longer->holds_keys(1));
  EXPECT_EQ(longest->memory()->keys, longer->memory()->keys);
  EXPECT_LT(Ssd({reads[0]}), head_token * kShort / 2);  // copied, and not read
  for (const Prefix& prefix : {base, longer, longest}) {
    const Prefix from_scratch = Fresh(prefix->n_tokens());
    for (size_t head = 0; head < prefix->heads(); ++head) {
      const auto keys = prefix->MidKeys(head, Bring::kNow, nullptr);
      const auto want = from_scratch->MidKeys(head, Bring::kNow, nullptr);
      ASSERT_OK(keys);
      ASSERT_OK(want);
      if (!keys->has_value() || !want->has_value()) continue;
      ASSERT_EQ((*keys)->count, (*want)->count);
      EXPECT_EQ(std::memcmp((*keys)->data, (*want)->data, (*keys)->count * (*keys)->stride), 0);
    }
  }
  EXPECT_LE(store_->Stats()->selector_memory_bytes, options_.selector_memory_bytes);
}

}  // namespace
}  // namespace prefixd::testing
