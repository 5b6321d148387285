// Tests what Session::Persist stores and sessions that go on over it, against plain lists of rows
// and attention in float64.
#include <limits>
#include <thread>
#include <vector>

#include "tests/runtime/step/own_tokens_fixture.h"

namespace prefixd {
namespace {

using testing::kFull;
using testing::NaiveOwn;
using testing::Seed;

constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();

// What a session attends to behind the prompt, and how much of it is its prefix's by now.
struct Seen {
  std::shared_ptr<Session> session;
  NaiveOwn rows = {};              // of all tokens behind the prompt
  std::vector<uint32_t> ids = {};  // of the first of them
  uint32_t moved = 0;              // tokens of them in the prefix
  uint32_t persisted = 0;          // what the last Persist covers
  uint32_t derived_from = kNever;
};

class PersistTest : public testing::OwnTokensTest {
 protected:
  uint32_t Whole(const Seen& s) const {
    uint32_t least = kNever;
    for (uint32_t l = 0; l < spec_.geometry.n_layers; ++l) {
      for (uint32_t h = 0; h < spec_.geometry.layer(l).n_kv_heads; ++h) {
        least = std::min(least, Count(s.rows, l, h));
      }
    }
    return least;
  }
  void Append(Seen& s, uint32_t layer, HeadRange heads, uint32_t n) {
    const Token block = MakeTokens(layer, heads.n, n);
    ASSERT_OK(s.session->Append(layer, heads, n, block.k, block.v));
    Note(s.rows, layer, heads, n, block);
  }
  void AppendToAll(Seen& s, uint32_t n) {
    for (uint32_t l = 0; l < spec_.geometry.n_layers; ++l) Append(s, l, All(l), n);
  }
  // Brings all heads to as many tokens as the one with the most has.
  void Level(Seen& s) {
    uint32_t most = 0;
    for (uint32_t l = 0; l < 2; ++l) {
      for (uint32_t h = 0; h < 2; ++h) most = std::max(most, Count(s.rows, l, h));
    }
    for (uint32_t l = 0; l < 2; ++l) {
      for (uint32_t h = 0; h < 2; ++h) Append(s, l, {h, 1}, most - Count(s.rows, l, h));
    }
  }
  // One token of a layer.
  void Decode(Seen& s, uint32_t layer, HeadRange heads, bool exact = true) {
    const Token token = MakeTokens(layer, heads.n, 1);
    const auto q = MakeQueries(layer, heads.n, 1);
    State out = Room(layer, heads.n, 1);
    if (!exact && s.derived_from == kNever) s.derived_from = Whole(s);
    ASSERT_OK(s.session->StepAppend(layer, heads, q, token.k, token.v, out.y, out.lse, nullptr));
    Note(s.rows, layer, heads, 1, token);
    if (exact) ExpectExact(s.rows, layer, heads, q, out.y, out.lse);
  }
  // The ids of own tokens up to the n-th, drawn when they are first needed: two sessions that go on
  // apart do not meet.
  std::vector<uint32_t> IdsOf(Seen& s, uint32_t n) {
    while (s.ids.size() < s.moved + n) s.ids.push_back(random_->Int(1, 1u << 30));
    return {s.ids.begin() + s.moved, s.ids.begin() + s.moved + n};
  }
  std::vector<uint32_t> AllIds(Seen& s, uint32_t n) {
    std::vector<uint32_t> all = prompt_.tokens;
    IdsOf(s, n);
    all.insert(all.end(), s.ids.begin(), s.ids.begin() + s.moved + n);
    return all;
  }
  Result<PutResult> Persist(Seen& s, uint32_t n, const PersistSpec& spec = {}) {
    const auto ids = IdsOf(s, n);
    auto done = s.session->Persist(ids, spec);
    if (!done.ok()) return done;
    EXPECT_EQ(done->n_tokens, prompt_.n_tokens + s.moved + n);
    const uint32_t exact = std::min(s.derived_from, s.moved + n);
    EXPECT_EQ(done->exact_tokens, prompt_.n_tokens + exact);
    EXPECT_EQ(done->lineage.empty(), exact == s.moved + n);
    s.persisted = s.moved + n;
    return done;
  }
  void GoOn(Seen& s, uint32_t window) {
    const uint32_t before = s.session->report()->own_tokens;
    auto next = s.session->ForkPersisted(window);
    ASSERT_OK(next);
    const uint32_t left = s.persisted - s.moved;
    s.moved = s.persisted - std::min(window, left);
    s.session = *std::move(next);
    EXPECT_EQ(s.session->info().n_tokens, prompt_.n_tokens + s.moved);
    EXPECT_EQ(s.session->report()->own_tokens, before - left + std::min(window, left));
  }
  uint32_t Matched(Seen& s, uint32_t n, const std::string& lineage = "", bool accept = false) {
    const auto match = store_->Match({.model = spec_.name,
                                      .tokens = AllIds(s, n),
                                      .accept_approximate = accept,
                                      .lineage = lineage});
    EXPECT_OK(match);
    return match.ok() ? match->n_tokens - std::min(match->n_tokens, prompt_.n_tokens) : 0;
  }
};

// Rounds of appending, persisting and going on answer as one session that holds all in memory, and
// memory stays within the window.
TEST_F(PersistTest, RoundsOverStoredTokensAnswerAsOneSessionInMemory) {
  Prepare("PersistRounds");
  Seen s{.session = Attach(prompt_, kFull)};
  const auto whole = Attach(prompt_, kFull);
  constexpr uint32_t kRound = 150, kWindow = 40;
  for (int round = 0; round < 3; ++round) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const Token block = MakeTokens(layer, 2, kRound);
      for (Session* both : {s.session.get(), whole.get()}) {
        ASSERT_OK(both->Append(layer, kRound, block.k, block.v));
      }
      Note(s.rows, layer, All(layer), kRound, block);
    }
    const auto done = Persist(s, s.session->report()->own_tokens);
    ASSERT_OK(done);
    EXPECT_EQ(done->stored_tokens, kRound + (round > 0 ? 1 : 0));
    ASSERT_OK(store_->WaitReady(done->prefix, nullptr));
    GoOn(s, kWindow);
    if (HasFatalFailure()) return;
    EXPECT_EQ(s.session->report()->own_tokens, kWindow);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const Token token = MakeTokens(layer, 2, 1);
      const auto q = MakeQueries(layer, 2, 1);
      State mine = Room(layer, 2, 1), theirs = Room(layer, 2, 1);
      ASSERT_OK(s.session->StepAppend(layer, q, token.k, token.v, mine.y, mine.lse, nullptr));
      ASSERT_OK(whole->StepAppend(layer, q, token.k, token.v, theirs.y, theirs.lse, nullptr));
      Note(s.rows, layer, All(layer), 1, token);
      ExpectExact(s.rows, layer, All(layer), q, mine.y, mine.lse);
      for (size_t i = 0; i < mine.y.size(); ++i) EXPECT_NEAR(mine.y[i], theirs.y[i], 1e-5);
    }
    // The stored ones are retrieved as the prompt's are: all of them, if the policy may.
    const auto aside = s.session->Fork();
    ASSERT_OK(aside);
    ASSERT_OK((*aside)->SetPolicy({.estimator = EstimatorKind::kNone, .k = 10000}));
    const auto q = MakeQueries(1, 2, 1);
    const Output retrieved = Step(**aside, 1, q);
    NaiveOwn stored = s.rows;
    for (auto& [head, rows] : stored.rows) {
      rows.resize(s.moved * spec_.geometry.row(head.first).bytes());
    }
    ExpectExact(stored, 1, All(1), q, retrieved.y, retrieved.lse);
  }
  ASSERT_OK(whole->Detach());
  // A head's window takes a chunk or two, whatever went before it.
  const uint64_t chunk = 64 * spec_.geometry.row(0).bytes() + 256;
  EXPECT_LE(Used(), 4 * 2 * chunk);
  s = {};
  EXPECT_EQ(Used(), 0u);
}

TEST_F(PersistTest, StoresWhatIsNewAndOutlivesTheSession) {
  Prepare("PersistNew");
  Seen s{.session = Attach(prompt_, kFull)};
  AppendToAll(s, 90);
  EXPECT_CODE(s.session->ForkPersisted(0), Code::kFailedPrecondition);
  const auto first = Persist(s, 50, {.label = "chat", .pinned = true});
  ASSERT_OK(first);
  EXPECT_EQ(first->stored_tokens, 50u);
  EXPECT_EQ(store_->Prefix(first->prefix)->summary.label, "chat");
  EXPECT_TRUE(store_->Prefix(first->prefix)->summary.pinned);
  EXPECT_EQ(s.session->report()->own_tokens, 90u);
  EXPECT_EQ(Matched(s, 90), 50u);
  const auto second = Persist(s, 90);
  ASSERT_OK(second);
  EXPECT_EQ(second->stored_tokens, 40u);
  EXPECT_EQ(Persist(s, 90)->stored_tokens, 0u);
  // A truncated session branches off.
  ASSERT_OK(s.session->Truncate(70));
  for (auto& [head, rows] : s.rows.rows) {
    rows.resize(70 * spec_.geometry.row(head.first).bytes());
  }
  const std::vector<uint32_t> before = AllIds(s, 90);
  s.ids.resize(70);
  AppendToAll(s, 8);
  EXPECT_EQ(Persist(s, 78)->stored_tokens, 8u);
  EXPECT_EQ(store_->Match({.model = spec_.name, .tokens = before})->n_tokens, 390u);
  // What another session stored is not stored again.
  const auto ids = IdsOf(s, 78);
  Seen other{.session = Attach(prompt_, kFull)};
  AppendToAll(other, 78);
  EXPECT_EQ(other.session->Persist(ids)->stored_tokens, 0u);

  ASSERT_OK(s.session->Detach());
  EXPECT_CODE(s.session->Persist(ids), Code::kFailedPrecondition);
  EXPECT_CODE(s.session->ForkPersisted(0), Code::kFailedPrecondition);
  s.session.reset(), other.session.reset();
  Open();
  s.session = *store_->Attach({spec_.name, "", AllIds(s, 78), "", 0, kFull});
  s.moved = 78;
  EXPECT_EQ(s.session->info().n_tokens, 378u);
  Decode(s, 0, All(0));
  Decode(s, 1, All(1));
  // Without Persist nothing stays.
  ASSERT_OK(s.session->Detach());
  EXPECT_EQ(Matched(s, 1), 78u);
}

TEST_F(PersistTest, RowsBehindAnApproximateStepAreDerived) {
  Prepare("PersistDerived");
  const StepPolicy sparse = {.estimator = EstimatorKind::kMoment, .budget = 0.1};
  Seen s{.session = Attach(prompt_, sparse)};
  AppendToAll(s, 20);  // the question, read exactly
  for (int t = 0; t < 30; ++t) {
    for (uint32_t layer = 0; layer < 2; ++layer) Decode(s, layer, All(layer), false);
  }
  EXPECT_EQ(s.derived_from, 20u);
  const auto done = Persist(s, 50);
  ASSERT_OK(done);
  EXPECT_EQ(done->stored_tokens, 50u);
  EXPECT_EQ(Matched(s, 50), 20u);
  EXPECT_EQ(Matched(s, 50, done->lineage), 50u);
  EXPECT_EQ(Matched(s, 50, "", true), 50u);
  // What follows continues the lineage, from a fork and from the session that goes on, too.
  for (uint32_t layer = 0; layer < 2; ++layer) Decode(s, layer, All(layer), false);
  const auto more = Persist(s, 51);
  ASSERT_OK(more);
  EXPECT_EQ(more->stored_tokens, 1u);
  EXPECT_EQ(more->lineage, done->lineage);
  ASSERT_OK(store_->WaitReady(more->prefix, nullptr));
  GoOn(s, 4);
  EXPECT_EQ(s.session->info().exact_tokens, 320u);
  ASSERT_OK(s.session->SetPolicy(kFull));
  for (uint32_t layer = 0; layer < 2; ++layer) Decode(s, layer, All(layer));
  const auto after = Persist(s, 5);
  ASSERT_OK(after);
  EXPECT_EQ(after->stored_tokens, 1u);
  EXPECT_EQ(after->lineage, done->lineage);

  // Draft tokens that went leave no mark, nor does a step of mode full make one.
  Seen draft{.session = Attach(prompt_, kFull)};
  AppendToAll(draft, 10);
  Decode(draft, 0, All(0));
  Decode(draft, 1, All(1));
  ASSERT_OK(draft.session->SetPolicy(sparse));
  Decode(draft, 0, All(0), false);
  EXPECT_EQ(draft.derived_from, 11u);
  ASSERT_OK(draft.session->Truncate(11));
  for (auto& [head, rows] : draft.rows.rows) {
    rows.resize(11 * spec_.geometry.row(head.first).bytes());
  }
  draft.derived_from = kNever;
  AppendToAll(draft, 5);
  ASSERT_OK(Persist(draft, 16));
  EXPECT_EQ(Matched(draft, 16), 16u);
  // Rows behind a step that did not bring its row may come by any Append.
  (void)Step(*draft.session, 0, MakeQueries(0, 2, 1));
  draft.derived_from = 16;
  AppendToAll(draft, 3);
  ASSERT_OK(Persist(draft, 19));
  EXPECT_EQ(Matched(draft, 19), 16u);
  ASSERT_OK(draft.session->Truncate(14));
  for (auto& [head, rows] : draft.rows.rows) {
    rows.resize(14 * spec_.geometry.row(head.first).bytes());
  }
  draft.ids.resize(14);
  draft.derived_from = 14;
  AppendToAll(draft, 3);
  ASSERT_OK(Persist(draft, 17));
  EXPECT_EQ(Matched(draft, 17), 14u);
  // The engine's own word.
  Seen told{.session = Attach(prompt_, kFull)};
  AppendToAll(told, 10);
  told.derived_from = 0;
  ASSERT_OK(Persist(told, 10, {.derived = true}));
  EXPECT_EQ(Matched(told, 10), 0u);
}

TEST_F(PersistTest, ExactTokensThatAreGoneAreStoredAgainAsExact) {
  Prepare("PersistExactGone");
  Seen s{.session = Attach(prompt_, {.estimator = EstimatorKind::kMoment, .budget = 0.1})};
  AppendToAll(s, 20);
  const auto exact = Persist(s, 20);
  ASSERT_OK(exact);
  ASSERT_OK(store_->Remove(exact->prefix));
  EXPECT_EQ(Matched(s, 20), 0u);
  for (int t = 0; t < 5; ++t) {
    for (uint32_t layer = 0; layer < 2; ++layer) Decode(s, layer, All(layer), false);
  }
  const auto done = Persist(s, 25);  // which compares exact_tokens
  ASSERT_OK(done);
  EXPECT_EQ(done->stored_tokens, 25u);
  EXPECT_EQ(Matched(s, 25), 20u);
  EXPECT_EQ(Matched(s, 25, done->lineage), 25u);
  // What is there is not stored again.
  EXPECT_EQ(Persist(s, 25)->stored_tokens, 0u);
}

// Random calls on some sessions and their forks.
TEST_F(PersistTest, RandomCallsKeepWhatListsOfRowsKeep) {
  Prepare("PersistRandom", 60);
  const StepPolicy sparse = {.estimator = EstimatorKind::kNone, .k = 4};
  std::vector<Seen> all;
  all.push_back({.session = Attach(prompt_, kFull)});
  const auto upto = [&](uint32_t n) { return random_->Int(0, n - 1); };
  uint64_t persisted = 0, went_on = 0;
  for (int i = 0; i < 500 && !HasFailure(); ++i) {
    Seen& s = all[upto(uint32_t(all.size()))];
    const uint32_t layer = upto(2), what = upto(26);
    const uint32_t most = s.session->report()->own_tokens;
    const uint32_t whole = Whole(s) - s.moved;
    if (what < 7) {
      Decode(s, layer, what < 5 ? HeadRange{0, 2} : HeadRange{upto(2), 1});
    } else if (what < 9) {
      ASSERT_OK(s.session->SetPolicy(sparse));
      Decode(s, layer, {0, 2}, false);
      ASSERT_OK(s.session->SetPolicy(kFull));
    } else if (what < 12) {
      AppendToAll(s, 1 + upto(70));
    } else if (what < 14) {
      Level(s);
    } else if (what < 17) {
      const uint32_t n = upto(3) == 0 ? upto(most + 1) : most - std::min(most, upto(6));
      ASSERT_OK(s.session->Truncate(n));
      for (auto& [head, rows] : s.rows.rows) {
        rows.resize(std::min(rows.size(), (s.moved + n) * spec_.geometry.row(head.first).bytes()));
      }
      s.ids.resize(std::min<size_t>(s.ids.size(), s.moved + n));
      s.persisted = std::min(s.persisted, s.moved + n);
      if (s.moved + n <= s.derived_from) s.derived_from = kNever;
    } else if (what < 19 && all.size() < 5) {
      auto fork = s.session->Fork();
      ASSERT_OK(fork);
      Seen copy = s;
      copy.session = *std::move(fork);
      all.push_back(std::move(copy));
    } else if (what < 23) {
      const uint32_t n = upto(3) == 0 ? upto(whole + 1) : whole;
      if (n == 0) {
        EXPECT_CODE(s.session->Persist({}), Code::kInvalidArgument);
      } else {
        const auto done = Persist(s, n);
        ASSERT_OK(done);
        ++persisted;
        EXPECT_EQ(Matched(s, n, done->lineage), s.moved + n);
        EXPECT_EQ(Matched(s, n), std::min(s.derived_from, s.moved + n));
        if (upto(2) == 0) ASSERT_OK(store_->WaitReady(done->prefix, nullptr));
      }
      if (most > whole) {
        EXPECT_CODE(s.session->Persist(std::vector<uint32_t>(whole + 1)),
                    Code::kFailedPrecondition);
      }
      EXPECT_CODE(s.session->Persist(std::vector<uint32_t>(most + 1)), Code::kInvalidArgument);
    } else if (what < 25) {
      if (s.persisted > s.moved) {
        GoOn(s, upto(2) == 0 ? upto(80) : 0);
        ++went_on;
      } else {
        EXPECT_CODE(s.session->ForkPersisted(upto(10)), Code::kFailedPrecondition);
      }
    } else if (all.size() > 1) {
      s = std::move(all.back());
      all.pop_back();
    }
  }
  EXPECT_GT(persisted, 10u);
  EXPECT_GT(went_on, 5u);
  all.clear();
  EXPECT_EQ(Used(), 0u);
  const auto verified = store_->Verify("", nullptr);
  ASSERT_OK(verified);
}

// A prefix of a few tokens is continued by no put: its rows are stored again.
TEST_F(PersistTest, ContinuesPrefixesOfAnyLengthModelAndEncoding) {
  spec_.geometry.layers[1].sliding_window = 8;
  for (const uint32_t n_tokens : {5u, 40u}) {
    for (const bool int8 : {false, true}) {
      if (int8) options_.encoding = "int8";
      Prepare(int8 ? "PersistShortInt8" : "PersistShort", n_tokens);
      Seen s{.session = Attach(prompt_, kFull)};
      Append(s, 0, All(0), 30);
      EXPECT_CODE(Persist(s, 30), Code::kFailedPrecondition);  // the window's layer lacks its rows
      Append(s, 1, All(1), 30);
      EXPECT_EQ(s.session->report()->own_tokens, 30u);
      const auto done = Persist(s, 30, {.encoding = RowEncoding::kAsGiven});
      ASSERT_OK(done);
      EXPECT_EQ(done->stored_tokens, n_tokens < 16 ? n_tokens + 30 : 30);
      EXPECT_EQ(done->encoding, RowEncoding::kAsGiven);
      const auto next = s.session->ForkPersisted(0);
      ASSERT_OK(next);
      for (uint32_t layer = 0; layer < 2; ++layer) {
        const RowShape row = spec_.geometry.row(layer);
        std::vector<std::byte> k(30 * 2 * row.key_bytes()), v(30 * 2 * row.value_bytes());
        ASSERT_OK((*next)->ReadLayer(
            {.layer = layer, .tokens = {n_tokens, n_tokens + 30}, .order = KvOrder::kHeadMajor}, k,
            v));
        for (uint32_t h = 0; h < 2; ++h) {
          for (uint32_t t = 0; t < 30; ++t) {
            const std::byte* want = &s.rows.rows[{layer, h}][t * row.bytes()];
            EXPECT_EQ(std::memcmp(want, &k[(h * 30 + t) * row.key_bytes()], row.key_bytes()), 0);
            EXPECT_EQ(std::memcmp(want + row.key_bytes(), &v[(h * 30 + t) * row.value_bytes()],
                                  row.value_bytes()),
                      0);
          }
        }
      }
    }
  }
}

TEST_F(PersistTest, ARefusedCallChangesNothing) {
  Prepare("PersistRefused");
  Seen s{.session = Attach(prompt_, kFull)};
  Append(s, 0, All(0), 70);
  Append(s, 1, {0, 1}, 70);
  // A rank that has some heads alone.
  const auto part = s.session->Persist(std::vector<uint32_t>(70, 1));
  EXPECT_CODE(part, Code::kFailedPrecondition);
  EXPECT_NE(part.error().message.find("KV head 1 of layer 1 has 0"), std::string::npos)
      << part.error().message;
  Append(s, 1, {1, 1}, 70);
  EXPECT_CODE(s.session->Persist({}), Code::kInvalidArgument);
  EXPECT_CODE(s.session->Persist(std::vector<uint32_t>(71, 1)), Code::kInvalidArgument);
  EXPECT_CODE(Persist(s, 70, {.label = std::string(5000, 'x')}), Code::kInvalidArgument);
  EXPECT_CODE(Persist(s, 70, {.ttl_seconds = 1ull << 60}), Code::kInvalidArgument);
  {
    // Another put of these tokens is under way.
    const auto other = store_->BeginPut({.model = spec_.name, .tokens = AllIds(s, 70)});
    ASSERT_OK(other);
    EXPECT_CODE(Persist(s, 70, {.alone = true}), Code::kUnavailable);
    std::thread cancel([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      s.session->Cancel();
    });
    EXPECT_CODE(Persist(s, 70, {.wait_ms = 600'000}), Code::kCancelled);
    cancel.join();
  }
  EXPECT_EQ(s.session->report()->own_tokens, 70u);
  EXPECT_CODE(s.session->ForkPersisted(0), Code::kFailedPrecondition);
  EXPECT_EQ(Matched(s, 70), 0u);
  ASSERT_OK(Persist(s, 70));
  // What was persisted and is gone is not gone on over, and can be persisted again.
  const auto match = store_->Match({.model = spec_.name, .tokens = AllIds(s, 70)});
  ASSERT_OK(match);
  ASSERT_OK(store_->Remove(match->prefix));
  EXPECT_CODE(s.session->ForkPersisted(0), Code::kNotFound);
  EXPECT_EQ(Persist(s, 70)->stored_tokens, 70u);
  GoOn(s, 0);
  Decode(s, 0, All(0));
}

TEST_F(PersistTest, ItNeedsRoomOnTheDiskAsPutsDo) {
  spec_.geometry = testing::SmallGeometry(2, 8, 8, 64);
  Prepare("PersistRoom", 100);
  options_.quota_bytes = store_->Stats().value().bytes_on_disk + (1 << 20);
  Open();
  Seen s{.session = Attach(prompt_, kFull)};
  AppendToAll(s, 1024);  // 4 MiB
  const auto refused = Persist(s, 1024);
  EXPECT_CODE(refused, Code::kResourceExhausted);
  EXPECT_EQ(s.session->report()->own_tokens, 1024u);
  Decode(s, 0, All(0));
  Decode(s, 1, All(1));
  ASSERT_OK(Persist(s, 64));
}

}  // namespace
}  // namespace prefixd
