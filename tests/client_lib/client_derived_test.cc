// Tests derived rows and what a verification covers, on every kind of client.
#include <algorithm>

#include "tests/client_lib/client_scenario.h"

namespace prefixd::testing {
namespace {

constexpr uint32_t kAnswer = 50;

class ClientDerived : public ClientScenario {
 protected:
  // Returns the prompt with `n` more tokens, whose rows are made from `salt`.
  Prompt Continued(const Prompt& prompt, uint32_t n, uint64_t salt) const {
    Prompt p = prompt;
    const Prompt more = MakePrompt(n, salt);
    p.tokens.insert(p.tokens.end(), more.tokens.begin(), more.tokens.end());
    for (size_t layer = 0; layer < p.k.size(); ++layer) {
      p.k[layer].insert(p.k[layer].end(), more.k[layer].begin(), more.k[layer].end());
      p.v[layer].insert(p.v[layer].end(), more.v[layer].begin(), more.v[layer].end());
    }
    return p;
  }

  PutSpec SpecOf(const Prompt& p) const {
    PutSpec spec;
    spec.model = p.model.name;
    spec.tokens = p.tokens;
    return spec;
  }
  PutResult Stored(const PutSpec& spec, const Prompt& p) {
    auto put = client_->BeginPut(spec);
    EXPECT_TRUE(put.ok()) << (put.ok() ? "" : put.error().message);
    if (!put.ok()) return {};
    EXPECT_TRUE(WriteRows(**put, p).ok());
    auto done = (*put)->Commit();
    EXPECT_TRUE(done.ok()) << (done.ok() ? "" : done.error().message);
    return done.ok() ? *done : PutResult{};
  }

  uint32_t Matched(const Prompt& p, const std::string& lineage, bool accept = false) {
    const auto match = client_->Match({.model = p.model.name,
                                       .tokens = p.tokens,
                                       .accept_approximate = accept,
                                       .lineage = lineage});
    EXPECT_TRUE(match.ok()) << (match.ok() ? "" : match.error().message);
    return match.ok() ? match->n_tokens : 0;
  }
};

TEST_P(ClientDerived, RowsBehindAnApproximateStepServeWhoAsks) {
  Put(*client_);
  const Prompt answered = Continued(prompt_, kAnswer, 5);
  PutSpec spec = SpecOf(answered);
  spec.derived = true;
  const PutResult derived = Stored(spec, answered);
  EXPECT_EQ(derived.stored_tokens, kAnswer);
  EXPECT_EQ(derived.exact_tokens, kTokens);
  ASSERT_EQ(derived.lineage.size(), 32u);
  EXPECT_EQ(Matched(answered, ""), kTokens);
  EXPECT_EQ(Matched(answered, std::string(32, '7')), kTokens);
  EXPECT_EQ(Matched(answered, derived.lineage), kTokens + kAnswer);
  EXPECT_EQ(Matched(answered, "", true), kTokens + kAnswer);
  const auto malformed =
      client_->Match({.model = answered.model.name, .tokens = answered.tokens, .lineage = "mine"});
  EXPECT_EQ(malformed.error().code, Code::kInvalidArgument);

  AttachSpec attach;
  attach.model = answered.model.name;
  attach.tokens = answered.tokens;
  attach.policy.mode = StepMode::kFull;
  auto session = client_->Attach(attach);
  ASSERT_TRUE(session.ok()) << session.error().message;
  EXPECT_EQ((*session)->info().n_tokens, kTokens);
  EXPECT_EQ((*session)->info().exact_tokens, kTokens);
  attach.lineage = derived.lineage;
  session = client_->Attach(attach);
  ASSERT_TRUE(session.ok()) << session.error().message;
  EXPECT_EQ((*session)->info().n_tokens, kTokens + kAnswer);
  EXPECT_EQ((*session)->info().exact_tokens, kTokens);
  // By its id, too, and cut where it is exact without asking.
  attach.tokens.clear();
  attach.prefix = derived.prefix;
  attach.lineage.clear();
  const auto refused = client_->Attach(attach);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kFailedPrecondition);
  EXPECT_NE(refused.error().message.find("from " + std::to_string(kTokens)), std::string::npos);
  attach.n_tokens = kTokens;
  EXPECT_TRUE(client_->Attach(attach).ok());
  attach.n_tokens = 0;
  attach.accept_approximate = true;
  EXPECT_TRUE(client_->Attach(attach).ok());

  const auto detail = client_->Prefix(derived.prefix);
  ASSERT_TRUE(detail.ok());
  EXPECT_EQ(detail->summary.exact_tokens, kTokens);
  EXPECT_EQ(client_->Prefix(prefix_)->summary.exact_tokens, kTokens);
}

TEST_P(ClientDerived, TheLineageOutlivesTheConnectionAndMarksContinuations) {
  Put(*client_);
  const Prompt answered = Continued(prompt_, kAnswer, 5), next = Continued(answered, 30, 6);
  PutSpec spec = SpecOf(answered);
  spec.derived = true;
  const std::string lineage = Stored(spec, answered).lineage;
  if (daemon_) {
    auto again = RemoteStore::Connect(daemon_->address(), {});
    ASSERT_TRUE(again.ok());
    client_ = *std::move(again);
  }
  spec = SpecOf(next);  // it claims to be exact
  spec.lineage = lineage;
  auto put = client_->BeginPut(spec);
  ASSERT_TRUE(put.ok()) << put.error().message;
  EXPECT_EQ((*put)->missing(), (TokenRange{kTokens + kAnswer, kTokens + kAnswer + 30}));
  (*put)->Abort();
  const PutResult continued = Stored(spec, next);
  EXPECT_EQ(continued.lineage, lineage);
  EXPECT_EQ(continued.exact_tokens, kTokens);
  EXPECT_EQ(Matched(next, ""), kTokens);
  EXPECT_EQ(Matched(next, lineage), next.tokens.size());
}

TEST_P(ClientDerived, AnExactPutOfTheSameTokensIsStoredAndServes) {
  Put(*client_);
  const Prompt answered = Continued(prompt_, kAnswer, 5), exact = Continued(prompt_, kAnswer, 5);
  PutSpec spec = SpecOf(answered);
  spec.derived = true;
  const PutResult derived = Stored(spec, answered);
  const PutResult own = Stored(SpecOf(exact), exact);
  EXPECT_EQ(own.stored_tokens, kAnswer);
  EXPECT_EQ(own.lineage, "");
  EXPECT_EQ(own.exact_tokens, kTokens + kAnswer);
  EXPECT_NE(own.prefix, derived.prefix);
  const auto match = client_->Match({.model = exact.model.name,
                                     .tokens = exact.tokens,
                                     .accept_approximate = true,
                                     .lineage = derived.lineage});
  ASSERT_TRUE(match.ok());
  EXPECT_EQ(match->prefix, own.prefix);
  EXPECT_EQ(match->exact_tokens, kTokens + kAnswer);
  spec.lineage = derived.lineage;
  EXPECT_EQ(Stored(spec, answered).stored_tokens, 0u);
}

TEST_P(ClientDerived, AVerificationCoversTheChain) {
  Put(*client_);
  const Prompt next = Continued(prompt_, 60, 6), other = MakePrompt(100, 77);
  const std::string longer = Stored(SpecOf(next), next).prefix;
  const std::string second = Stored(SpecOf(other), other).prefix;
  uint64_t last = 0, total = 0;
  const auto verify = client_->Verify(longer, [&](uint64_t done, uint64_t of, std::string_view) {
    EXPECT_GE(done, last);
    last = done, total = of;
    return true;
  });
  ASSERT_TRUE(verify.ok()) << verify.error().message;
  EXPECT_EQ(verify->covered, client_->Prefix(longer)->chain);
  EXPECT_EQ(verify->segments, 2u);
  EXPECT_EQ(last, total);
  auto whole = client_->VerifyTenant("", nullptr);
  ASSERT_TRUE(whole.ok()) << whole.error().message;
  EXPECT_EQ(whole->segments, 3u);
  std::ranges::sort(whole->covered);
  std::vector<std::string> all = {prefix_, longer, second};
  std::ranges::sort(all);
  EXPECT_EQ(whole->covered, all);
}

INSTANTIATE_TEST_SUITE_P(Clients, ClientDerived, EveryKind(), KindName);

}  // namespace
}  // namespace prefixd::testing
