// Runs every failure of puts, of models and of prefixes on every kind of client.
#include <cstring>
#include <functional>
#include <vector>

#include "base/every_page.h"
#include "tests/client_lib/client_refusals.h"

namespace prefixd::testing {
namespace {

using StoreRefusals = ClientRefusals;

TEST_P(StoreRefusals, Puts) {
  constexpr Code kArgument = Code::kInvalidArgument, kState = Code::kFailedPrecondition;
  const std::string& model = prompt_.model.name;
  constexpr uint32_t kN = 40;
  constexpr size_t kToken = 2 * kDim * 2;
  // Begins a put of other tokens, runs `body` and aborts it.
  using Body = std::function<Status(PutStream&)>;
  const auto with = [&](const Body& body) {
    return [&, body](Store& store, Session&) -> Status {
      std::vector<uint32_t> tokens(kN);
      for (uint32_t i = 0; i < kN; ++i) tokens[i] = 60000 + i;
      PREFIXD_ASSIGN(auto put, store.BeginPut({model, "", tokens, ""}));
      return body(*put);
    };
  };
  const auto begin = [&](PutSpec spec) {
    return [spec](Store& store, Session&) { return StatusOf(store.BeginPut(spec)); };
  };
  const auto write = [](PutStream& put, uint32_t layer, uint32_t first, uint32_t n,
                        size_t k_extra = 0, size_t v_extra = 0, int odd = -1) {
    std::vector<std::byte> k(n * kToken + k_extra), v(n * kToken + v_extra);
    const uint16_t nan = 0x7fc0, inf = 0x7f80;
    if (odd == 0) std::memcpy(k.data() + 70, &nan, 2);
    if (odd == 1) std::memcpy(v.data() + 130, &inf, 2);
    return put.Write(layer, first, n, k, v);
  };
  const auto queries = [](PutStream& put, uint32_t layer, uint32_t first, uint32_t n, size_t extra,
                          float odd) {
    std::vector<float> q(n * kQ + extra, 0.5f);
    if (!q.empty()) q.back() = odd;
    return put.WriteQueries(layer, first, n, q);
  };
  const auto all = [&](PutStream& put) -> Status {
    PREFIXD_TRY(write(put, 0, 0, kN));
    return write(put, 1, 0, kN);
  };
  ExpectRefused({
      {"unknown model", Code::kNotFound, begin({"nobody", "", {1, 2, 3}, ""})},
      {"no tokens", kArgument, begin({model, "", {}, ""})},
      {"label", kArgument, begin({model, "", {1, 2}, std::string(4097, 'x')})},
      {"lifetime", kArgument, begin({model, "", {1, 2}, "", false, 1ull << 40})},
      {"layer", kArgument, with([&](auto& p) { return write(p, 2, 0, 4); })},
      {"beyond", kArgument, with([&](auto& p) { return write(p, 0, kN - 1, 2); })},
      {"beyond all", kArgument, with([&](auto& p) { return write(p, 0, 0xffffffff, 2); })},
      {"k", kArgument, with([&](auto& p) { return write(p, 0, 0, 4, 1); })},
      {"v", kArgument, with([&](auto& p) { return write(p, 0, 0, 4, 0, 1); })},
      {"layer before k", kArgument, with([&](auto& p) { return write(p, 2, 0, 4, 1); })},
      {"NaN", kArgument, with([&](auto& p) { return write(p, 0, 3, 4, 0, 0, 0); })},
      {"Inf", kArgument, with([&](auto& p) { return write(p, 1, 3, 4, 0, 0, 1); })},
      {"twice", kArgument, with([&](auto& p) -> Status {
         PREFIXD_TRY(write(p, 0, 0, 4));
         return write(p, 0, 3, 4);
       })},
      {"queries: layer", kArgument, with([&](auto& p) { return queries(p, 2, 0, 4, 0, 0); })},
      {"queries: beyond", kArgument, with([&](auto& p) { return queries(p, 0, kN, 1, 0, 0); })},
      {"queries: size", kArgument, with([&](auto& p) { return queries(p, 0, 0, 4, 1, 0); })},
      {"queries: NaN", kArgument, with([&](auto& p) { return queries(p, 0, 0, 4, 0, kNan); })},
      {"nothing written", kState, with([](auto& p) { return StatusOf(p.Commit()); })},
      {"a layer missing", kState, with([&](auto& p) -> Status {
         PREFIXD_TRY(write(p, 0, 0, kN));
         PREFIXD_TRY(write(p, 1, 0, 7));
         return StatusOf(p.Commit());
       })},
      {"write after abort", kState, with([&](auto& p) {
         p.Abort();
         return write(p, 9, 0, 4, 1);
       })},
      {"queries after abort", kState, with([&](auto& p) {
         p.Abort();
         return queries(p, 9, 0, 4, 1, 0);
       })},
      {"commit after abort", kState, with([&](auto& p) -> Status {
         PREFIXD_TRY(all(p));
         p.Abort();
         p.Abort();
         return StatusOf(p.Commit());
       })},
      {"commit twice", kState, with([&](auto& p) -> Status {
         PREFIXD_TRY(all(p));
         PREFIXD_TRY(StatusOf(p.Commit()));
         return StatusOf(p.Commit());
       })},
      // Stored by the case before: nothing is missing, and the put ends all the same.
      {"write after commit", kState, with([&](auto& p) -> Status {
         PREFIXD_TRY(StatusOf(p.Commit()));
         p.Abort();
         return write(p, 0, 0, 4);
       })},
  });
  for (Store* store : {client_.get(), reference_.get()}) {
    EXPECT_EQ(EveryPrefix(*store)->size(), 2u);  // an abort after the commit removes nothing
  }
}

// A commit that comes too early names what is missing, and the put goes on.
TEST_P(StoreRefusals, AnEarlyCommitLeavesThePut) {
  Put(*client_);
  std::vector<std::string> messages;
  for (Store* store : {client_.get(), reference_.get()}) {
    Prompt other = MakePrompt(60, Seed("AnEarlyCommitLeavesThePut"));
    auto put = store->BeginPut({other.model.name, "", other.tokens, ""});
    ASSERT_TRUE(put.ok()) << put.error().message;
    ASSERT_TRUE((*put)->Write(0, 0, 60, other.k[0], other.v[0]).ok());
    for (int i = 0; i < 2; ++i) {
      const auto early = (*put)->Commit();
      ASSERT_FALSE(early.ok());
      EXPECT_EQ(early.error().code, Code::kFailedPrecondition);
      messages.push_back(early.error().message);
    }
    EXPECT_EQ(store->Match({.model = other.model.name, .tokens = other.tokens})->n_tokens, 0u);
    const Status rest = (*put)->Write(1, 0, 60, other.k[1], other.v[1]);
    ASSERT_TRUE(rest.ok()) << rest.error().message;
    EXPECT_EQ((*put)->progress().done, 120u);
    const auto done = (*put)->Commit();
    ASSERT_TRUE(done.ok()) << done.error().message;
    EXPECT_EQ(done->stored_tokens, 60u);
    EXPECT_EQ(store->Match({.model = other.model.name, .tokens = other.tokens})->n_tokens, 60u);
  }
  for (const std::string& message : messages) {
    EXPECT_EQ(message, "the put is incomplete: layer 1 lacks token 0");
  }
}

TEST_P(StoreRefusals, ModelsAndPrefixes) {
  constexpr Code kArgument = Code::kInvalidArgument, kState = Code::kFailedPrecondition;
  const std::string unknown(32, '0');
  const auto attach = [](const AttachSpec& spec) {
    return [spec](Store& store, Session&) { return StatusOf(store.Attach(spec)); };
  };
  const auto on_id = [this](std::function<Status(Store&, const std::string&)> call) {
    return [this, call](Store& store, Session&) { return call(store, Id(store)); };
  };
  const std::string& model = prompt_.model.name;
  const auto never = [](uint64_t, uint64_t, std::string_view) { return false; };
  ModelSpec nameless = prompt_.model, shapeless = prompt_.model, other = prompt_.model;
  nameless.name = "";
  shapeless.geometry.n_q_heads = 3;
  shapeless.name = "shapeless";
  other.identity = {{"weights", "others"}};
  std::vector<Case> cases = {
      {"model: no name", kArgument, [&](auto& s, auto&) { return s.RegisterModel(nameless); }},
      {"model: shape", kArgument, [&](auto& s, auto&) { return s.RegisterModel(shapeless); }},
      {"model: taken", Code::kAlreadyExists,
       [&](auto& s, auto&) { return s.RegisterModel(other); }},
      {"match: model", Code::kNotFound,
       [&](auto& s, auto&) {
         return StatusOf(s.Match({.model = "nobody", .tokens = prompt_.tokens}));
       }},
      {"attach: model", Code::kNotFound, attach({.model = "nobody", .tokens = prompt_.tokens})},
      {"attach: nothing named", kArgument, attach({.model = model})},
      {"attach: other tokens", Code::kNotFound, attach({.model = model, .tokens = {1, 2, 3}})},
      {"attach: unknown prefix", Code::kNotFound, attach({.prefix = unknown})},
      {"attach: no id", Code::kNotFound, attach({.prefix = "such a thing"})},
      {"attach: cut of tokens", kArgument,
       attach({.model = model, .tokens = prompt_.tokens, .n_tokens = kTokens + 1})},
      {"attach: policy", kArgument,
       attach({.model = model, .tokens = prompt_.tokens, .policy = {.budget = 0}})},
      {"attach: infeasible", Code::kInfeasible,
       attach({.model = model, .tokens = prompt_.tokens, .policy = {.budget = 1e-4}})},
      {"attach: cut of a prefix", kArgument, on_id([](Store& s, const std::string& id) {
         return StatusOf(s.Attach({.prefix = id, .n_tokens = kTokens + 1}));
       })},
      {"attach: model of a prefix", kArgument, on_id([](Store& s, const std::string& id) {
         return StatusOf(s.Attach({.model = "nobody", .prefix = id}));
       })},
      {"remove: attached", kState,
       on_id([](Store& s, const std::string& id) { return s.Remove(id); })},
      {"lifetime: too long", kArgument, on_id([](Store& s, const std::string& id) {
         return s.SetLifetime(id, {{}, 1ull << 40});
       })},
      {"verify: cancelled", Code::kCancelled,
       on_id([never](Store& s, const std::string& id) { return StatusOf(s.Verify(id, never)); })},
  };
  for (const std::string& id : {unknown, std::string("no id at all")}) {
    const Code code = Code::kNotFound;
    cases.push_back({"prefix", code, [id](auto& s, auto&) { return StatusOf(s.Prefix(id)); }});
    cases.push_back({"remove", code, [id](auto& s, auto&) { return s.Remove(id); }});
    cases.push_back({"lifetime", code, [id](auto& s, auto&) { return s.SetLifetime(id, {}); }});
    cases.push_back({"verify", code, [id](auto& s, auto&) { return StatusOf(s.Verify(id, {})); }});
    cases.push_back({"ready", code, [id](auto& s, auto&) { return s.WaitReady(id, {}); }});
  }
  ExpectRefused(cases);
}

INSTANTIATE_TEST_SUITE_P(Clients, StoreRefusals, EveryKind(), KindName);

// Stores that may hold two sessions and a megabyte.
class ClientLimits : public ClientRefusals {
 protected:
  void Limit(RuntimeOptions& options, std::vector<std::string>& args) const override {
    options.max_sessions = 2;
    options.quota_bytes = 1 << 20;
    options.evict = "never";
    args.insert(args.end(), {"--max-sessions", "2", "--quota-mib", "1", "--evict", "never"});
  }
};

TEST_P(ClientLimits, SessionsAndQuota) {
  Put(*client_);
  std::vector<std::shared_ptr<Session>> held;
  for (Store* store : {client_.get(), reference_.get()}) held.push_back(Attach(*store));
  const auto session = Attach(*client_), reference = Attach(*reference_);
  ASSERT_TRUE(session && reference);
  const auto attach = [&](Store& store, Session&) {
    return StatusOf(
        store.Attach({.model = prompt_.model.name, .tokens = prompt_.tokens, .policy = {.k = 8}}));
  };
  const std::vector<uint32_t> many(20000, 7);
  ExpectRefused({{"sessions", Code::kResourceExhausted, attach},
                 {"sessions, again", Code::kResourceExhausted, attach}},
                *session, *reference);
  // The message names what is stored already, blobs included, which differs from run to run.
  for (Store* store : {client_.get(), reference_.get()}) {
    const auto put = store->BeginPut({prompt_.model.name, "", many, ""});
    ASSERT_FALSE(put.ok());
    EXPECT_EQ(put.error().code, Code::kResourceExhausted);
    EXPECT_EQ(put.error().message.find("the store's quota of 1048576 bytes is used up"), 0u)
        << put.error().message;
    EXPECT_EQ(store->Match({.model = prompt_.model.name, .tokens = prompt_.tokens})->n_tokens,
              kTokens);
  }
  // Refused sessions take no place: one that ends makes room for one.
  ASSERT_TRUE(held[0]->Detach().ok() && held[1]->Detach().ok());
  EXPECT_TRUE(Attach(*client_) && Attach(*reference_));
}

INSTANTIATE_TEST_SUITE_P(Clients, ClientLimits, EveryKind(), KindName);

}  // namespace
}  // namespace prefixd::testing
