// Tests derived rows: whom they serve, that exact rows of the same tokens are stored beside them,
// and that nothing which rewrites, recovers or carries segments loses the mark.
#include <filesystem>

#include "storage/core/store_core.h"
#include "storage/remote/remote_memory.h"
#include "storage/store/open_store.h"
#include "tests/storage/recover/recover_fixture.h"

namespace prefixd::storage {
namespace {

constexpr Acceptance kAll{true, {}};

// Rows that no exact put makes of the tokens.
RowFn ApproximateRows(std::span<const uint32_t> tokens) {
  std::vector<uint64_t> states = States(tokens);
  for (uint64_t& state : states) state = ~state;
  return RowsFrom(std::move(states));
}

class DerivedRowsTest : public RecoverTest {
 protected:
  Result<std::unique_ptr<SegmentWriter>> Begin(const Tokens& tokens, const PutOptions& options) {
    return store_->BeginPut("m", "t", tokens, "label", options);
  }

  SegmentId PutWith(const Tokens& tokens, const PutOptions& options, const RowFn& rows) {
    auto writer = Begin(tokens, options);
    EXPECT_TRUE(writer.ok()) << writer.error().ToString();
    if ((*writer)->range().size() > 0) {
      EXPECT_TRUE(WriteAll(**writer, model_.geometry, rows, 64, true).ok());
    }
    const auto id = (*writer)->Commit();
    EXPECT_TRUE(id.ok()) << id.error().ToString();
    return id.ok() ? *id : SegmentId{};
  }
  SegmentId PutDerived(const Tokens& tokens, const Acceptance& accept = {}) {
    PutOptions options;
    options.derived = true;
    options.accept = accept;
    return PutWith(tokens, options, ApproximateRows(tokens));
  }

  Lineage LineageOf(const SegmentId& id) { return store_->GetPrefix(id)->lineage; }

  // A prompt, and an answer that was generated behind approximate steps.
  void StorePromptAndAnswer() {
    prompt_id_ = Stored(prompt_);
    answered_id_ = PutDerived(answered_);
    lineage_ = LineageOf(answered_id_);
    EXPECT_NE(lineage_, Lineage{});
  }

  // Checks that only who asks gets the answer, or a longer one, and that it is marked.
  void ExpectAnswerIsDerived() { ExpectDerived(answered_); }
  void ExpectDerived(const Tokens& answered) {
    const Tokens longer = Join(answered, Iota(10, 9000));
    const auto exact = store_->LongestMatch("m", "t", longer);
    ASSERT_OK(exact);
    EXPECT_EQ(exact->n_tokens, prompt_.size());
    EXPECT_EQ(exact->exact_tokens, prompt_.size());
    EXPECT_EQ(store_->LongestMatch("m", "t", longer, {false, Lineage{1}})->n_tokens,
              prompt_.size());
    for (const Acceptance& accept : {kAll, Acceptance{false, lineage_}}) {
      const auto all = store_->LongestMatch("m", "t", longer, accept);
      ASSERT_OK(all);
      EXPECT_EQ(all->n_tokens, answered.size());
      EXPECT_EQ(all->exact_tokens, prompt_.size());
    }
    const auto info = store_->GetPrefix(answered_id_);
    ASSERT_OK(info);
    EXPECT_EQ(info->exact_tokens, prompt_.size());
    EXPECT_EQ(info->lineage, lineage_);
    EXPECT_EQ(store_->GetPrefix(prompt_id_)->exact_tokens, prompt_.size());
    EXPECT_EQ(store_->GetPrefix(prompt_id_)->lineage, Lineage{});
  }

  const Tokens prompt_ = Iota(150), answered_ = Join(prompt_, Iota(70, 5000));
  SegmentId prompt_id_, answered_id_;
  Lineage lineage_{};
};

TEST_F(DerivedRowsTest, MatchesEndBeforeThemUnlessAsked) {
  StorePromptAndAnswer();
  ExpectAnswerIsDerived();
  Open();
  ExpectAnswerIsDerived();
  EXPECT_TRUE(store_->Verify(nullptr, nullptr)->damaged.empty());
}

TEST_F(DerivedRowsTest, APromptThatIsDerivedFromItsFirstTokenMatchesNobody) {
  const Tokens few = Iota(5, 300);
  for (const Tokens& tokens : {few, prompt_}) {
    const SegmentId id = PutDerived(tokens);
    EXPECT_EQ(store_->LongestMatch("m", "t", tokens)->n_tokens, 0u);
    EXPECT_EQ(store_->LongestMatch("m", "t", tokens, kAll)->n_tokens, tokens.size());
    EXPECT_EQ(store_->LongestMatch("m", "t", tokens, {false, LineageOf(id)})->n_tokens,
              tokens.size());
    EXPECT_EQ(store_->LongestMatch("m", "t", tokens, kAll)->exact_tokens, 0u);
  }
}

TEST_F(DerivedRowsTest, ExactRowsAreStoredBesideThemAndServe) {
  StorePromptAndAnswer();
  const Tokens longer = Join(answered_, Iota(30, 8000));
  {
    auto writer = Begin(longer, {});
    ASSERT_OK(writer);
    EXPECT_EQ((*writer)->range(), (TokenRange{150, 250}));
  }
  const SegmentId exact = Stored(longer);
  // The match serves the exact rows also who would take the others.
  for (const Acceptance& accept : {Acceptance{}, kAll, Acceptance{false, lineage_}}) {
    for (const Tokens& tokens : {answered_, longer}) {
      const auto match = store_->LongestMatch("m", "t", tokens, accept);
      ASSERT_OK(match);
      EXPECT_EQ(match->n_tokens, tokens.size());
      EXPECT_EQ(match->exact_tokens, tokens.size());
      EXPECT_EQ(match->id, exact);
    }
  }
  ExpectWhole(exact, longer);
  const auto prefix = store_->OpenPrefix(answered_id_, 0);
  ASSERT_OK(prefix);
  std::vector<std::byte> row(row_bytes_), expected(row_bytes_);
  ASSERT_OK((*prefix)->ReadRange(1, 1, {200, 201}, row, nullptr));
  ApproximateRows(answered_)(200, 1, 1, expected);
  EXPECT_EQ(row, expected);  // both are there
  // A derived put of tokens that are stored exactly stores nothing.
  const size_t files = FilesIn(options_.dir / "segments");
  EXPECT_EQ(PutDerived(longer), exact);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), files);
}

TEST_F(DerivedRowsTest, RootsOfBothKindsServeTheExactOne) {
  const Tokens shorter = Iota(9, 40);  // below a block: found by its root, not by a hash
  for (const Tokens& tokens : {shorter, prompt_}) {
    for (int i = 0; i < 3; ++i) PutDerived(tokens);
    const SegmentId exact = Stored(tokens);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(PutDerived(tokens), exact);
    const auto match = store_->LongestMatch("m", "t", tokens, kAll);
    ASSERT_OK(match);
    EXPECT_EQ(match->id, exact);
    EXPECT_EQ(match->exact_tokens, tokens.size());
  }
}

TEST_F(DerivedRowsTest, WhatContinuesThemIsDerivedWhateverItClaims) {
  StorePromptAndAnswer();
  const Tokens longer = Join(answered_, Iota(40, 7000));
  PutOptions claims_exact;
  claims_exact.accept = {false, lineage_};
  const SegmentId by_lineage = PutWith(longer, claims_exact, ApproximateRows(longer));
  EXPECT_EQ(LineageOf(by_lineage), lineage_);
  EXPECT_EQ(store_->GetPrefix(by_lineage)->chain,
            (std::vector<SegmentId>{prompt_id_, answered_id_, by_lineage}));
  EXPECT_EQ(store_->LongestMatch("m", "t", longer)->n_tokens, prompt_.size());
  // Whoever accepts all and continues them joins their lineage.
  const Tokens other = Join(answered_, Iota(40, 6000));
  claims_exact.accept = {true, Lineage{3}};
  const SegmentId by_acceptance = PutWith(other, claims_exact, ApproximateRows(other));
  EXPECT_EQ(LineageOf(by_acceptance), lineage_);
  // Without a lineage a derived put draws its own.
  const Tokens third = Join(prompt_, Iota(40, 4000));
  const SegmentId own = PutDerived(third);
  EXPECT_NE(LineageOf(own), lineage_);
  EXPECT_EQ(store_->LongestMatch("m", "t", third, {false, lineage_})->n_tokens, prompt_.size());
  const SegmentId given = PutDerived(Join(prompt_, Iota(40, 3000)), {false, lineage_});
  EXPECT_EQ(LineageOf(given), lineage_);
  EXPECT_TRUE(store_->Verify(nullptr, nullptr)->damaged.empty());  // each segment says so itself
}

TEST_F(DerivedRowsTest, APutThatComesFirstGivesWayOnlyToItsKind) {
  Stored(prompt_);
  auto exact = Begin(answered_, {});
  ASSERT_OK(exact);
  PutOptions accepting;
  accepting.accept = kAll;
  auto exact_accepting = Begin(answered_, accepting);
  ASSERT_OK(exact_accepting);
  PutOptions derived;
  derived.derived = true;
  auto late = Begin(answered_, derived);
  ASSERT_OK(late);
  const SegmentId first = PutDerived(answered_);
  for (auto* writer : {&*exact, &*exact_accepting}) {
    ASSERT_OK(WriteAll(**writer, model_.geometry, answered_, 64, true));
  }
  ASSERT_OK(WriteAll(**late, model_.geometry, ApproximateRows(answered_), 64, true));
  const auto stored = (*exact_accepting)->Commit();
  ASSERT_OK(stored);
  EXPECT_NE(*stored, first);
  EXPECT_EQ(*(*exact)->Commit(), *stored);
  EXPECT_EQ(*(*late)->Commit(), *stored);
}

TEST_F(DerivedRowsTest, RewritingKeepsTheMarkAndMergesOneKindOnly) {
  StorePromptAndAnswer();
  ASSERT_OK(store_->Recluster(answered_id_, Reversed(row_bytes_)));
  ExpectAnswerIsDerived();
  const auto refused = store_->Compact(answered_id_, 1000);
  ASSERT_FALSE(refused.ok());
  EXPECT_CODE(refused, Code::kFailedPrecondition);
  EXPECT_NE(refused.error().message.find("derived"), std::string::npos);
  const Tokens longer = Join(answered_, Iota(40, 7000));
  const SegmentId tail = PutDerived(longer, {false, lineage_});
  const auto compacted = store_->Compact(tail, 1000);
  ASSERT_OK(compacted);
  EXPECT_EQ(LineageOf(*compacted), lineage_);
  for (const bool reopened : {false, true}) {
    if (reopened) Open();
    ExpectDerived(longer);
    EXPECT_TRUE(store_->Verify(nullptr, nullptr)->damaged.empty());
  }
}

TEST_F(DerivedRowsTest, RecoveryKeepsTheMark) {
  StorePromptAndAnswer();
  Stored(Join(prompt_, Iota(20, 8000)));
  store_.reset();
  fs::remove_all(catalog());
  const RecoverReport report = Recovered(true);
  EXPECT_EQ(report.segments, 3u);
  EXPECT_TRUE(report.quarantined.empty());
  Open();
  ExpectAnswerIsDerived();
}

// A commit that the catalog lost is made again from the sealed file.
TEST_F(DerivedRowsTest, AdoptionKeepsTheMark) {
  prompt_id_ = Stored(prompt_);
  store_.reset();
  fs::copy(catalog(), dir_.path() / "before", fs::copy_options::recursive);
  Open();
  answered_id_ = PutDerived(answered_);
  lineage_ = LineageOf(answered_id_);
  store_.reset();
  fs::remove_all(catalog());
  fs::copy(dir_.path() / "before", catalog(), fs::copy_options::recursive);
  Open();
  EXPECT_EQ(store_->stats().recovered_commits, 1u);
  ExpectAnswerIsDerived();
}

TEST_F(DerivedRowsTest, TheMarkTravelsToARemoteTierAndBack) {
  StorePromptAndAnswer();
  MemoryRemoteTier tier;
  ASSERT_OK(store_->Push(answered_id_, tier, nullptr));
  options_.dir = dir_.path() / "other";
  Open();
  ASSERT_OK(store_->Pull(answered_id_, tier, nullptr));
  ExpectAnswerIsDerived();
  Open();
  ExpectAnswerIsDerived();
}

// The file and the catalog both say it; where they differ the segment is not served.
TEST_F(DerivedRowsTest, AMarkThatTheCatalogLostIsDamage) {
  StorePromptAndAnswer();
  store_.reset();
  {
    auto core = OpenStoreCore(options_);
    ASSERT_OK(core);
    SegmentRecord record = *(*core)->tree.Record(answered_id_);
    record.lineage = {};
    CatalogChange change;
    change.put.push_back({record, std::nullopt});
    ASSERT_OK((*core)->catalog->Apply(change));
  }
  Open();
  ASSERT_OK(store_->CheckEnds([] { return true; }));
  EXPECT_TRUE(store_->GetPrefix(answered_id_)->quarantined);
  EXPECT_EQ(store_->LongestMatch("m", "t", answered_, kAll)->n_tokens, prompt_.size());
}

TEST_F(DerivedRowsTest, AHeaderWhoseBitAndLineageDisagreeIsRefused) {
  SegmentHeader header;
  header.segment = header.file = {1};
  header.tokens = {0, 10};
  header.n_layers = header.n_kv_heads = 1;
  header.key_dim = header.value_dim = 8;
  header.manifest_bytes = 1;
  std::vector<std::byte> bytes(kPageBytes);
  const PageBytes page(bytes.data(), kPageBytes);
  header.lineage = {7};
  header.Encode(page);
  EXPECT_CODE(SegmentHeader::Decode(page), Code::kCorrupt);
  header.incompat |= kIncompatDerivedRows;
  header.Encode(page);
  const auto decoded = SegmentHeader::Decode(page);
  ASSERT_OK(decoded);
  EXPECT_EQ(*decoded, header);
  header.lineage = {};
  header.Encode(page);
  EXPECT_CODE(SegmentHeader::Decode(page), Code::kCorrupt);
}

TEST(LineageNames, AreHexDigits) {
  EXPECT_EQ(*ParseLineage(""), Lineage{});
  const Lineage lineage{1, 2, 0xff};
  EXPECT_EQ(*ParseLineage(LineageName(lineage)), lineage);
  EXPECT_EQ(LineageName({}), "");
  const std::string zeros(32, '0');
  for (const std::string& bad : {std::string("1"), std::string("x"), zeros, zeros + "1"}) {
    EXPECT_CODE(ParseLineage(bad), Code::kInvalidArgument);
  }
}

}  // namespace
}  // namespace prefixd::storage
