// Tests live rows, own tokens that sessions move: they serve nobody but who says so, whatever else
// is accepted, and are gone once the store is opened again, also from a rebuilt catalog.
#include <filesystem>

#include "storage/core/store_core.h"
#include "storage/store/open_store.h"
#include "tests/storage/recover/recover_fixture.h"

namespace prefixd::storage {
namespace {

class LiveRowsTest : public RecoverTest {
 protected:
  SegmentId PutLive(const Tokens& tokens, uint32_t begins) {
    PutOptions options;
    options.pinned = true;
    options.live = options.accept.live = true;
    auto writer = store_->BeginPut("m", "t", tokens, "", options);
    EXPECT_TRUE(writer.ok()) << writer.error().ToString();
    EXPECT_EQ((*writer)->range().begin, begins);
    EXPECT_TRUE(WriteAll(**writer, model_.geometry, RowsFrom(States(tokens)), 64, true).ok());
    const auto id = (*writer)->Commit();
    EXPECT_TRUE(id.ok()) << id.error().ToString();
    return id.ok() ? *id : SegmentId{};
  }
  // A prompt, and what a session has moved behind it in two steps.
  void Store() {
    prompt_id_ = Stored(prompt_);
    first_id_ = PutLive(first_, 150);
    second_id_ = PutLive(second_, 230);
  }
  void ExpectPromptAlone() {
    EXPECT_EQ(FilesIn(options_.dir / "segments"), 1u);
    EXPECT_EQ(store_->stats().segments, 1u);
    EXPECT_CODE(store_->GetPrefix(second_id_), Code::kNotFound);
    EXPECT_EQ(store_->GetPrefix(prompt_id_)->children, 0u);
    ExpectWhole(prompt_id_, prompt_);
    EXPECT_TRUE(store_->Verify(nullptr, nullptr)->damaged.empty());
  }

  const Tokens prompt_ = Iota(150), first_ = Join(prompt_, Iota(80, 5000)),
               second_ = Join(first_, Iota(60, 7000));
  SegmentId prompt_id_, first_id_, second_id_;
};

TEST_F(LiveRowsTest, ServeWhoeverSaysSoAlone) {
  Store();
  const Acceptance all{.approximate = true}, live{.live = true};
  for (const Tokens& tokens : {first_, second_}) {
    for (const Acceptance& accept : {Acceptance{}, all}) {
      EXPECT_EQ(store_->LongestMatch("m", "t", tokens, accept)->n_tokens, 150u);
      const auto explained = store_->ExplainMatch("m", "t", tokens, accept);
      ASSERT_OK(explained);
      EXPECT_EQ(explained->derived_tokens, 0u);
      EXPECT_TRUE(explained->unusable.empty());
    }
    EXPECT_EQ(store_->LongestMatch("m", "t", tokens, live)->n_tokens, tokens.size());
  }
  const auto listed = store_->ListPrefixes();
  ASSERT_EQ(listed.size(), 1u);
  EXPECT_EQ(listed[0].id, prompt_id_);
  ExpectWhole(second_id_, second_);
  // The same tokens, put by somebody, are stored beside them.
  const SegmentId mine = Stored(second_);
  EXPECT_NE(mine, second_id_);
  EXPECT_EQ(store_->LongestMatch("m", "t", second_)->id, mine);
  // Neither joins the other.
  EXPECT_CODE(store_->Compact(second_id_, 10000), Code::kFailedPrecondition);
  // They go one by one, and leave no history.
  ASSERT_OK(store_->Remove(first_id_));
  EXPECT_FALSE(store_->GetPrefix(first_id_)->listed);
  ExpectWhole(second_id_, second_);
  ASSERT_OK(store_->Remove(second_id_));
  EXPECT_CODE(store_->GetPrefix(first_id_), Code::kNotFound);
  EXPECT_EQ(store_->stats().segments, 2u);
}

TEST_F(LiveRowsTest, AreGoneWhenTheStoreIsOpenedAgain) {
  Store();
  ASSERT_OK(store_->PutBlob(second_id_, "note", "maker", std::vector<std::byte>(100)));
  Open();
  ExpectPromptAlone();
  EXPECT_EQ(store_->stats().recovered_orphans, 2u);
  EXPECT_EQ(store_->ExplainMatch("m", "t", second_)->gone, std::nullopt);
  // One of them was removed before, and only continued.
  Store();
  ASSERT_OK(store_->Remove(first_id_));
  Open();
  ExpectPromptAlone();
}

TEST_F(LiveRowsTest, AreNotInACatalogMadeOfTheFiles) {
  Store();
  store_.reset();
  fs::remove_all(catalog());
  EXPECT_EQ(Recovered().segments, 1u);
  Open();
  ExpectPromptAlone();
}

}  // namespace
}  // namespace prefixd::storage
