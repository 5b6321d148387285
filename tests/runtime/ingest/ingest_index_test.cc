// Tests indexes that are made at ingest: they are built, measured, used, and made again where they
// are not sound.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "attention/reference/reference.h"
#include "runtime/indexes/indexes.h"
#include "storage/store/prefix_store.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

using IngestIndexTest = RuntimeTest;

TEST_F(IngestIndexTest, IvfIsBuiltForLongSegmentsAndUsed) {
  const uint64_t seed = Seed("IvfIsBuiltForLongSegmentsAndUsed");
  options_.build_ivf = true;
  options_.ivf_min_tokens = 1500;
  options_.recall_target = 0.5;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 2000, seed);
  const std::string id = PutReady(prompt);
  ASSERT_NE(PutReady(MakePrompt(spec_.geometry, 300, seed + 1)), "");
  const auto detail = store_->Prefix(id);
  ASSERT_OK(detail);
  EXPECT_EQ(std::count(detail->blobs.begin(), detail->blobs.end(), "ivf.1.1"), 1);
  StepPolicy policy;
  policy.k = 40;
  for (const char* selector : {"auto", "ivf", "exact"}) {
    policy.selector = selector;
    const auto session = Attach(prompt, policy);
    ASSERT_TRUE(session);
    const auto q = prompt.Q(1, 1999, 1);
    auto selection = session->Select(1, 0, q.first(32), 40);
    ASSERT_OK(selection);
    ASSERT_EQ(selection->ids.size(), 40u);
    EXPECT_TRUE(std::is_sorted(selection->ids.begin(), selection->ids.end()));
    EXPECT_GE(selection->ids.front(), 4u);
    EXPECT_LT(selection->ids.back(), 1984u);
    const CutKind kind = std::string(selector) == "exact" ? CutKind::kExact : CutKind::kApproximate;
    EXPECT_EQ(selection->cuts[0].kind, kind) << selector;
    EXPECT_EQ(Step(*session, 1, q).info.ledger.retrieved_tokens, 80u);
  }
}

TEST_F(IngestIndexTest, CodesAreBuiltForLongSegmentsAndUsed) {
  const uint64_t seed = Seed("CodesAreBuiltForLongSegmentsAndUsed");
  options_.build_codes = true;
  options_.codes_min_tokens = 1500;
  options_.recall_target = 0.5;  // random keys are the hardest case
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 2500, seed);
  const std::string id = PutReady(prompt);
  const auto detail = store_->Prefix(id);
  ASSERT_OK(detail);
  EXPECT_EQ(std::count(detail->blobs.begin(), detail->blobs.end(), "codes.1.1"), 1);
  EXPECT_EQ(std::count(detail->blobs.begin(), detail->blobs.end(), "ivf.1.1"), 0);
  StepPolicy policy;
  policy.k = 25;
  std::map<std::string, std::vector<std::vector<uint32_t>>> ids;  // for 20 queries
  for (const char* selector : {"auto", "codes", "exact"}) {
    policy.selector = selector;
    const auto session = Attach(prompt, policy);
    ASSERT_TRUE(session);
    const CutKind kind = std::string(selector) == "exact" ? CutKind::kExact : CutKind::kApproximate;
    for (uint32_t t = 2480; t < 2500; ++t) {
      auto selection = session->Select(1, 0, prompt.Q(1, t, 1).first(32), 25);
      ASSERT_OK(selection);
      ASSERT_EQ(selection->ids.size(), 25u);
      EXPECT_GE(selection->ids.front(), 4u);
      EXPECT_LT(selection->ids.back(), 2484u);
      EXPECT_EQ(selection->cuts[0].kind, kind) << selector;
      ids[selector].push_back(selection->ids);
    }
    EXPECT_EQ(Step(*session, 1, prompt.Q(1, 2499, 1)).info.ledger.retrieved_tokens, 50u);
  }
  EXPECT_EQ(ids["auto"], ids["codes"]);
  size_t both = 0;
  for (size_t i = 0; i < 20; ++i) {
    std::vector<uint32_t> common;
    std::ranges::set_intersection(ids["codes"][i], ids["exact"][i], std::back_inserter(common));
    both += common.size();
  }
  EXPECT_GE(both, 20 * 10u);  // out of 25 each
}

TEST_F(IngestIndexTest, IndexesAreMeasuredAndThoseThatFindTooLittleAreNotUsed) {
  const uint64_t seed = Seed("IndexesAreMeasuredAndThoseThatFindTooLittleAreNotUsed");
  options_.build_codes = options_.build_ivf = true;
  options_.codes_min_tokens = options_.ivf_min_tokens = 1500;
  const auto prompt = MakePrompt(spec_.geometry, 2500, seed);
  for (const double target : {0.5, 1.01}) {
    options_.recall_target = target;
    Open();
    const std::string id = PutReady(prompt);
    auto detail = store_->Prefix(id);
    ASSERT_OK(detail);
    ASSERT_EQ(detail->indexes.size(), 8u);  // 2 layers, 2 KV heads, 2 kinds
    for (const IndexRecall& r : detail->indexes) {
      EXPECT_GT(r.queries, 4u);
      EXPECT_EQ(r.k, 25u);
      EXPECT_TRUE(r.recall > 0.05 && r.recall <= 1) << r.index;
      EXPECT_TRUE(r.mass > 0.02 && r.mass <= 1 + 1e-6) << r.index;
      EXPECT_GT(r.effort, 0);
      EXPECT_EQ(r.used, r.recall >= target);
      EXPECT_TRUE(r.used || target > 1);
    }
    for (const char* selector : {"codes", "ivf"}) {
      StepPolicy policy;
      policy.k = 25;
      policy.selector = selector;
      const auto session = Attach(prompt, policy);
      ASSERT_TRUE(session);
      const auto selection = session->Select(1, 1, prompt.Q(1, 2499, 1).last(32), 25);
      ASSERT_OK(selection);
      EXPECT_EQ(selection->cuts[0].kind, target < 1 ? CutKind::kApproximate : CutKind::kExact);
    }
    // A restart measures nothing again.
    Open();
    ASSERT_OK(store_->WaitReady(id, nullptr));
    EXPECT_EQ(store_->Prefix(id)->indexes, detail->indexes);
  }
  const std::string untuned =
      PutReady(MakePrompt(spec_.geometry, 2000, seed + 1), /*queries=*/false);
  const auto detail = store_->Prefix(untuned);
  ASSERT_OK(detail);
  ASSERT_EQ(detail->indexes.size(), 8u);
  for (const IndexRecall& r : detail->indexes) {
    EXPECT_EQ(r.queries, 0u);
    EXPECT_TRUE(r.used);  // no measurement speaks against it
  }
}

// A store of an older build may have indexes of retired kinds: it opens, serves, and drops them.
TEST_F(IngestIndexTest, IndexesOfRetiredKindsAreDropped) {
  options_.build_codes = true;
  options_.codes_min_tokens = 1500;
  options_.recluster = false;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 2500, Seed("IndexesOfRetiredKindsAreDropped"));
  const std::string id = PutReady(prompt);
  const auto before = store_->Prefix(id);
  ASSERT_OK(before);
  store_.reset();
  const auto segment = *storage::SegmentId::Parse(id);
  storage::StoreOptions at;
  at.dir = options_.dir;
  at.host_tier_bytes = 0;
  at.min_free_bytes = options_.min_free_bytes;
  {
    auto storage = storage::PrefixStore::Open(at);
    ASSERT_OK(storage);
    const std::vector<std::byte> bytes(3000, std::byte{7});
    for (const char* name : {"hnsw.1.1", "recall.hnsw", "pages.0.1", "recall.pages"}) {
      ASSERT_OK((*storage)->PutBlob(segment, name, "an older build", bytes));
    }
  }
  const uint64_t kept = before->summary.own_bytes;
  Open();
  ASSERT_OK(store_->WaitReady(id, nullptr));
  const auto after = store_->Prefix(id);
  ASSERT_OK(after);
  EXPECT_EQ(after->blobs, before->blobs);
  EXPECT_EQ(after->indexes, before->indexes);
  EXPECT_EQ(after->summary.own_bytes, kept);
  StepPolicy policy;
  policy.k = 25;
  EXPECT_EQ(Step(*Attach(prompt, policy), 1, prompt.Q(1, 2499, 1)).info.ledger.retrieved_tokens,
            50u);
  for (const char* gone : {"hnsw", "pages"}) {
    policy.selector = gone;
    const auto refused = store_->Attach({spec_.name, "", {}, id, 0, policy});
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
    EXPECT_NE(refused.error().message.find("auto, exact, codes or ivf"), std::string::npos)
        << refused.error().message;
  }
}

// An index that this build did not write for these tokens is never used, and made again.
TEST_F(IngestIndexTest, UnsoundIndexesAreMadeAgain) {
  const uint64_t seed = Seed("UnsoundIndexesAreMadeAgain");
  options_.build_codes = options_.build_ivf = true;
  options_.codes_min_tokens = options_.ivf_min_tokens = 1500;
  options_.recall_target = 0.5;
  options_.recluster = false;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 2500, seed);
  const std::string id = PutReady(prompt);
  const std::string other = PutReady(MakePrompt(spec_.geometry, 2000, seed + 1));
  for (const auto kind : {index::IndexKind::kCodes, index::IndexKind::kIvf}) {
    const std::string name = IndexBlobName(kind, 1, 1);
    const std::string producer = IndexProducer(kind, options_.anchors);
    for (const char* what : {"damaged", "foreign", "older", "of other tokens"}) {
      store_.reset();
      {
        storage::StoreOptions at;
        at.dir = options_.dir;
        at.host_tier_bytes = 0;
        at.min_free_bytes = options_.min_free_bytes;
        auto storage = storage::PrefixStore::Open(at);
        ASSERT_OK(storage);
        const auto segment = *storage::SegmentId::Parse(id);
        std::vector<std::byte> bytes = *(*storage)->GetBlob(segment, name, producer);
        if (what == std::string("foreign")) std::ranges::fill(bytes, std::byte{0x5a});
        if (what == std::string("older")) bytes[8] = std::byte{0};  // the envelope's version
        if (what == std::string("of other tokens")) {
          bytes = *(*storage)->GetBlob(*storage::SegmentId::Parse(other), name, producer);
        }
        if (what != std::string("damaged")) {
          ASSERT_OK((*storage)->PutBlob(segment, name, producer, bytes));
        }
      }
      if (what == std::string("damaged")) {
        const auto path = options_.dir / "segments" / (id + "." + name + ".blob");
        FlipByte(path, std::filesystem::file_size(path) - 1);
      }
      Open();
      StepPolicy policy;
      policy.k = 25;
      policy.selector = index::IndexName(kind);
      const auto q = prompt.Q(1, 2499, 1).last(32);
      const auto kind_of_cut = [&] {
        const auto session = Attach(prompt, policy);
        const auto selection = session->Select(1, 1, q, 25);
        EXPECT_TRUE(selection.ok());
        return selection.ok() ? selection->cuts[0].kind : CutKind::kNone;
      };
      EXPECT_EQ(kind_of_cut(), CutKind::kExact) << name << ' ' << what;
      ASSERT_OK(store_->WaitReady(id, nullptr));
      EXPECT_EQ(kind_of_cut(), CutKind::kApproximate) << name << ' ' << what;
    }
  }
}

}  // namespace
}  // namespace prefixd::testing
