// Tests puts and steps of some of a model's heads, through every kind of client: the rules that the
// parts of a put keep.
#include <atomic>
#include <thread>

#include "tests/client_lib/put_parts.h"

namespace prefixd::testing {
namespace {

TEST_P(PutParts, StoreOnePrefixWithTheLastCommit) {
  auto a = Begin(kFirst, kPatience), b = Begin({1, 0}, kPatience);
  ASSERT_TRUE(a.ok() && b.ok()) << (a.ok() ? b.error().message : a.error().message);
  EXPECT_EQ((*a)->missing(), (TokenRange{0, kTokens}));
  EXPECT_EQ((*b)->missing(), (TokenRange{0, kTokens}));
  const Status written = Write(**a, kFirst);
  ASSERT_TRUE(written.ok()) << written.error().message;
  EXPECT_EQ((*a)->progress().done, uint64_t{2} * kTokens);
  EXPECT_EQ((*a)->progress().total, uint64_t{2} * kTokens);
  EXPECT_EQ((*b)->progress().done, 0u);
  Result<PutResult> of_a = Error{};
  std::thread rank([&] { of_a = (*a)->Commit(); });
  // Nothing is visible before the last part commits.
  EXPECT_EQ(client_->Match({.model = prompt_.model.name, .tokens = prompt_.tokens})->n_tokens, 0u);
  EXPECT_TRUE(Write(**b, kSecond).ok());
  const auto of_b = (*b)->Commit();
  rank.join();
  ASSERT_TRUE(of_b.ok()) << of_b.error().message;
  ASSERT_TRUE(of_a.ok()) << of_a.error().message;
  EXPECT_EQ(of_a->prefix, of_b->prefix);
  EXPECT_EQ(of_a->stored_tokens, kTokens);
  EXPECT_EQ(of_b->stored_tokens, kTokens);
  EXPECT_EQ(of_a->bytes, of_b->bytes);
  EXPECT_EQ(of_a->seconds, of_b->seconds);
  EXPECT_EQ(client_->Stats()->puts, 1u);
  EXPECT_EQ(client_->ListPrefixes({})->prefixes.size(), 1u);
  Ready(of_a->prefix);
  ExpectHalvesOfAWholeStep(*client_, *client_, *client_);
  const auto mine = Attach(*client_), theirs = Attach(*reference_);
  ASSERT_TRUE(mine && theirs);
  std::vector<std::byte> k(prompt_.k[1].size()), v(k.size());
  ASSERT_TRUE(mine->ReadLayer({1, {0, kTokens}, {}, KvOrder::kTokenMajor}, k, v).ok());
  EXPECT_EQ(k, prompt_.k[1]);
  EXPECT_EQ(v, prompt_.v[1]);
}

TEST_P(PutParts, WaitAsLongAsTheySayAndMayCommitAgain) {
  auto a = Begin(kFirst, 30), b = Begin(kSecond);
  ASSERT_TRUE(a.ok() && b.ok());
  ASSERT_TRUE(Write(**a, kFirst).ok() && Write(**b, kSecond, 1).ok());
  const auto early = (*a)->Commit();
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().code, Code::kFailedPrecondition);
  EXPECT_NE(early.error().message.find("KV heads 1..2 of this put are not committed"),
            std::string::npos)
      << early.error().message;
  const auto lacking = (*b)->Commit();  // its own rows are missing
  ASSERT_FALSE(lacking.ok());
  EXPECT_EQ(lacking.error().code, Code::kFailedPrecondition);
  EXPECT_NE(lacking.error().message.find("layer 1 lacks token 0"), std::string::npos)
      << lacking.error().message;
  EXPECT_TRUE(client_->ListPrefixes({})->prefixes.empty());
  ASSERT_TRUE(
      (*b)->Write(1, 0, kTokens, Half(prompt_.k[1], kSecond), Half(prompt_.v[1], kSecond)).ok());
  const auto of_b = (*b)->Commit();
  ASSERT_TRUE(of_b.ok()) << of_b.error().message;
  const auto of_a = (*a)->Commit();
  ASSERT_TRUE(of_a.ok()) << of_a.error().message;
  EXPECT_EQ(of_a->prefix, of_b->prefix);
  const auto over = (*a)->Commit();
  ASSERT_FALSE(over.ok());
  EXPECT_EQ(over.error().code, Code::kFailedPrecondition);
}

TEST_P(PutParts, EndTogether) {
  for (const bool waits : {false, true}) {
    SCOPED_TRACE(waits);
    auto a = Begin(kFirst, kPatience), b = Begin(kSecond);
    ASSERT_TRUE(a.ok() && b.ok());
    ASSERT_TRUE(Write(**a, kFirst, waits ? 2 : 1).ok() && Write(**b, kSecond, 1).ok());
    Status told;
    if (waits) {
      std::thread rank([&] { told = StatusOf((*a)->Commit()); });
      (*b)->Abort();
      rank.join();
    } else {
      (*b)->Abort();
      told = (*a)->Write(1, 0, kTokens, Half(prompt_.k[1], kFirst), Half(prompt_.v[1], kFirst));
      EXPECT_FALSE((*a)->Commit().ok());
    }
    ASSERT_FALSE(told.ok());
    EXPECT_EQ(told.error().code, Code::kUnavailable);
    EXPECT_NE(told.error().message.find("the part of KV heads 1..2 of this put was aborted"),
              std::string::npos)
        << told.error().message;
    EXPECT_TRUE(client_->ListPrefixes({})->prefixes.empty());
    ExpectNothingReserved();
  }
  EXPECT_EQ(client_->Stats()->puts_aborted, 2u);
  // The same heads begin again, also while a part of the ended put is still held.
  auto a = Begin(kFirst), b = Begin(kSecond);
  ASSERT_TRUE(a.ok() && b.ok());
  ASSERT_TRUE(Write(**a, kFirst).ok() && Write(**b, kSecond).ok());
  EXPECT_FALSE((*a)->Commit().ok());
  EXPECT_TRUE((*b)->Commit().ok());
  EXPECT_TRUE((*a)->Commit().ok());
}

TEST_P(PutParts, FindWhatIsStored) {
  Put(*client_);
  auto a = Begin(kFirst);
  ASSERT_TRUE(a.ok());
  EXPECT_EQ((*a)->missing().size(), 0u);
  const auto done = (*a)->Commit();  // nothing is left for other parts
  ASSERT_TRUE(done.ok()) << done.error().message;
  EXPECT_EQ(done->prefix, prefix_);
  EXPECT_EQ(done->stored_tokens, 0u);
}

// A put of all heads that commits first leaves nothing to store; a part of a longer prompt joins
// others of the same one alone.
TEST_P(PutParts, GiveWayToAWholePut) {
  auto a = Begin(kFirst), b = Begin(kSecond);
  ASSERT_TRUE(a.ok() && b.ok());
  Put(*client_);
  ASSERT_TRUE(Write(**a, kFirst).ok() && Write(**b, kSecond).ok());
  EXPECT_FALSE((*a)->Commit().ok());
  const auto of_b = (*b)->Commit(), of_a = (*a)->Commit();
  ASSERT_TRUE(of_a.ok() && of_b.ok());
  EXPECT_EQ(of_a->prefix, prefix_);
  EXPECT_EQ(of_a->stored_tokens, 0u);
  EXPECT_EQ(of_b->stored_tokens, 0u);
  EXPECT_EQ(client_->ListPrefixes({})->prefixes.size(), 1u);
}

TEST_P(PutParts, AreRefusedLikeEverywhere) {
  const auto begin = [this](Store& store, const std::function<void(PutSpec&)>& edit) {
    PutSpec spec = Spec(kFirst);
    spec.tokens.push_back(1);  // another prompt than the one stored
    auto held = store.BeginPut(spec);
    EXPECT_TRUE(held.ok());
    edit(spec);
    return StatusOf(store.BeginPut(spec));
  };
  const auto differs = [&](const char* what, std::function<void(PutSpec&)> edit) {
    return Case{what, Code::kInvalidArgument, [=](Store& store, Session&) {
                  return begin(store, [&](PutSpec& spec) {
                    spec.heads = kSecond;
                    edit(spec);
                  });
                }};
  };
  const auto step = [this](Session& s, HeadRange heads, size_t n, float odd = 0.5f) {
    std::vector<float> q(n * kDim, odd), y(n * kDim), lse(n);
    return s.Step(0, heads, q, y, lse, nullptr);
  };
  const auto exact = [](Session& s, HeadRange heads, size_t n) {
    std::vector<float> q(n * kDim, 0.5f), y(n * kDim), lse(n);
    return s.AttendExact(0, heads, 1, q, y, lse);
  };
  ExpectRefused({{"overlap", Code::kUnavailable,
                  [=](Store& store, Session&) { return begin(store, [](PutSpec&) {}); }},
                 {"overlap and wait", Code::kUnavailable,
                  [=](Store& store, Session&) {
                    return begin(store, [](PutSpec& spec) { spec.wait_ms = 30; });
                  }},
                 differs("label", [](PutSpec& spec) { spec.label = "another"; }),
                 differs("pinned", [](PutSpec& spec) { spec.pinned = true; }),
                 differs("ttl", [](PutSpec& spec) { spec.ttl_seconds = 7; }),
                 differs("encoding", [](PutSpec& spec) { spec.encoding = RowEncoding::kInt8; }),
                 differs("derived", [](PutSpec& spec) { spec.derived = true; }),
                 {"no such head", Code::kInvalidArgument,
                  [=, this](Store& store, Session&) {
                    return StatusOf(store.BeginPut(Spec({2, 0})));
                  }},
                 {"too many heads", Code::kInvalidArgument,
                  [=, this](Store& store, Session&) {
                    return StatusOf(store.BeginPut(Spec({1, 2})));
                  }},
                 {"very many heads", Code::kInvalidArgument,
                  [=, this](Store& store, Session&) {
                    return StatusOf(store.BeginPut(Spec({1, UINT32_MAX})));
                  }},
                 {"rows of all heads", Code::kInvalidArgument,
                  [=, this](Store& store, Session&) {
                    PutSpec spec = Spec(kFirst);
                    spec.tokens.push_back(1);
                    auto put = store.BeginPut(spec);
                    EXPECT_TRUE(put.ok());
                    return (*put)->Write(0, 0, kTokens, prompt_.k[0], prompt_.v[0]);
                  }},
                 {"odd query", Code::kInvalidArgument,
                  [=, this](Store& store, Session&) {
                    PutSpec spec = Spec(kSecond);
                    spec.tokens.push_back(1);
                    auto put = store.BeginPut(spec);
                    EXPECT_TRUE(put.ok());
                    std::vector<float> q(2 * kDim, 1);
                    q.back() = kNan;
                    return (*put)->WriteQueries(0, 3, 1, q);
                  }},
                 {"step no such head", Code::kInvalidArgument,
                  [=](Store&, Session& s) {
                    return step(s, {2, 0}, 2);
                  }},
                 {"step too many", Code::kInvalidArgument,
                  [=](Store&, Session& s) {
                    return step(s, {1, 2}, 4);
                  }},
                 {"step very many", Code::kInvalidArgument,
                  [=](Store&, Session& s) {
                    return step(s, {0, UINT32_MAX}, 4);
                  }},
                 {"step of all sizes", Code::kInvalidArgument,
                  [=](Store&, Session& s) {
                    return step(s, {1, 1}, 4);
                  }},
                 {"step NaN", Code::kInvalidArgument,
                  [=](Store&, Session& s) {
                    return step(s, {1, 1}, 2, kNan);
                  }},
                 {"exact no such head", Code::kInvalidArgument,
                  [=](Store&, Session& s) {
                    return exact(s, {7, 1}, 2);
                  }},
                 {"exact of all sizes", Code::kInvalidArgument, [=](Store&, Session& s) {
                    return exact(s, {0, 1}, 4);
                  }}});
}

// Many threads begin the same two parts again and again, and some give up: whoever commits finds
// the prompt stored once.
TEST_P(PutParts, OfManyEnginesStoreAPromptOnce) {
  std::atomic<uint32_t> failed{0};
  std::vector<std::thread> ranks;
  for (int i = 0; i < 6; ++i) {
    ranks.emplace_back([&, i] {
      const HeadRange heads = i % 2 == 0 ? kFirst : kSecond;
      for (bool gives_up = i >= 4;; gives_up = false) {
        auto put = Begin(heads, kPatience);
        if (!put.ok()) {
          ++failed;
          return;
        }
        if (gives_up) continue;  // which ends the put for the other rank, too
        Status done = (*put)->missing().size() > 0 ? Write(**put, heads) : Status();
        if (done.ok()) done = StatusOf((*put)->Commit());
        if (done.ok()) return;
        if (done.error().code != Code::kUnavailable) {
          ++failed;
          return;
        }
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(failed, 0u);
  EXPECT_EQ(client_->Stats()->puts, 1u);
  EXPECT_EQ(client_->ListPrefixes({})->prefixes.size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Clients, PutParts, EveryKind(), KindName);

}  // namespace
}  // namespace prefixd::testing
