// Tests what a store says while what is stored changes between two looks at it, and lists whose
// entries are large.
#include <atomic>
#include <memory>

#include "runtime/store/store_lists.h"
#include "tests/runtime/runtime_fixture.h"
#include "tests/runtime/watched_store.h"

namespace prefixd::testing {
namespace {

using storage::SegmentId;

class ChangingStoreTest : public RuntimeTest {
 protected:
  ChangingStoreTest() {
    options_.recluster = false;
    options_.scrub_bytes_per_second = 0;
  }

  void OpenWatched() {
    store_.reset();
    auto opened = LocalStore::Open(
        options_,
        [this](const storage::StoreOptions& at) -> Result<std::unique_ptr<storage::PrefixStore>> {
          PREFIXD_ASSIGN(auto inner, storage::PrefixStore::Open(at));
          auto watched = std::make_unique<WatchedStore>(std::move(inner));
          watched_ = watched.get();
          return std::unique_ptr<storage::PrefixStore>(std::move(watched));
        });
    ASSERT_OK(opened);
    store_ = *std::move(opened);
    ASSERT_OK(store_->RegisterModel(spec_));
  }

  // Owned by the store, whose own threads may call what is set here until the test has ended: that
  // has what it uses by value.
  WatchedStore* watched_ = nullptr;
};

// A segment that was compacted once has no name; when it is compacted again, between the match and
// the look at its chain, nothing is left under its id.
TEST_F(ChangingStoreTest, AttachFollowsAPrefixThatIsCompactedMeanwhile) {
  OpenWatched();
  const auto whole = MakePrompt(spec_.geometry, 300, Seed("ChangingStore"));
  std::vector<std::string> ids;
  for (const uint32_t n : {100u, 200u, 300u}) {
    auto put = store_->BeginPut(
        {spec_.name, "", std::vector(whole.tokens.begin(), whole.tokens.begin() + n), "test"});
    ASSERT_OK(put);
    const TokenRange missing = (*put)->missing();
    for (uint32_t l = 0; l < spec_.geometry.n_layers; ++l) {
      ASSERT_OK((*put)->Write(l, missing.begin, missing.size(),
                              whole.K(l, missing.begin, missing.size()),
                              whole.V(l, missing.begin, missing.size())));
    }
    const auto stored = (*put)->Commit();
    ASSERT_OK(stored);
    ids.push_back(stored->prefix);
    ASSERT_OK(store_->WaitReady(stored->prefix, nullptr));
  }
  auto& storage = watched_->inner();
  const auto once = storage.Compact(*SegmentId::Parse(ids[2]), 1000);
  ASSERT_OK(once);
  const auto compacted = std::make_shared<std::atomic<int>>(0);
  watched_->behind_get = [&storage, once = *once, compacted](const SegmentId& id) {
    if (id != once || compacted->exchange(1) != 0) return;
    const auto twice = storage.Compact(once, 1000);
    EXPECT_OK(twice);
  };
  watched_->watching = true;
  StepPolicy full;
  full.mode = StepMode::kFull;
  const auto session = store_->Attach({spec_.name, "", whole.tokens, "", 0, full});
  ASSERT_OK(session);
  EXPECT_EQ(*compacted, 1);
  EXPECT_EQ((*session)->info().n_tokens, 300u);
  ExpectSuffix(**session, whole, 1, 296, 4);
}

// What is gone for good is not found, and is not looked for without end.
TEST_F(ChangingStoreTest, AttachToAPrefixThatIsRemovedMeanwhileFindsNone) {
  OpenWatched();
  const auto prompt = MakePrompt(spec_.geometry, 100, Seed("ChangingStore") + 1);
  const std::string id = PutReady(prompt);
  watched_->behind_get = [this, id](const SegmentId& asked) {
    if (asked.ToString() != id || !watched_->watching.exchange(false)) return;
    EXPECT_OK(watched_->inner().Remove(asked));
  };
  watched_->watching = true;
  EXPECT_CODE(store_->Attach({.model = spec_.name, .tokens = prompt.tokens}), Code::kNotFound);
}

// A page ends by its bytes, too: labels and tenants may be long.
TEST_F(ChangingStoreTest, PagesOfPrefixesEndByTheirBytes) {
  OpenWatched();
  constexpr uint32_t kStored = 900;  // fewer than a page may have, of 8 KiB each
  std::vector<storage::PrefixInfo> infos(kStored);
  for (uint32_t i = 0; i < kStored; ++i) {
    infos[i].id.bytes = {};
    infos[i].id.bytes[0] = static_cast<uint8_t>(i / 256);
    infos[i].id.bytes[1] = static_cast<uint8_t>(i % 256);
    infos[i].chain = {infos[i].id};
    infos[i].model = spec_.name;
    infos[i].label.assign(8192, 'x');
  }
  watched_->list = [infos](const storage::PrefixesAfter& after) {
    std::vector<storage::PrefixInfo> page;
    for (const storage::PrefixInfo& info : infos) {
      if (page.size() == after.limit) break;
      if (after.id == SegmentId{} || after.id < info.id) page.push_back(info);
    }
    return page;
  };
  watched_->watching = true;
  ListSpec spec;
  std::vector<std::string> seen;
  int pages = 0;
  do {
    const auto page = store_->ListPrefixes(spec);
    ASSERT_OK(page);
    ASSERT_FALSE(page->prefixes.empty());
    EXPECT_LE(page->prefixes.size() * 8192, kMaxPageBytes);
    for (const PrefixSummary& summary : page->prefixes) seen.push_back(summary.id);
    spec.after = page->next;
    ++pages;
  } while (!spec.after.empty());
  EXPECT_EQ(pages, 2);
  ASSERT_EQ(seen.size(), kStored);
  for (uint32_t i = 0; i < kStored; ++i) EXPECT_EQ(seen[i], infos[i].id.ToString());
}

}  // namespace
}  // namespace prefixd::testing
