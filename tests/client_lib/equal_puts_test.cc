// Tests several puts of the same tokens at the same time, through every kind of client.
#include <atomic>
#include <thread>

#include "base/every_page.h"
#include "tests/client_lib/client_scenario.h"

namespace prefixd::testing {
namespace {

class EqualPuts : public ClientScenario {
 protected:
  void SetUp() override {
    ClientScenario::SetUp();
    ASSERT_TRUE(client_->RegisterModel(prompt_.model).ok());
  }
  Result<std::unique_ptr<PutStream>> Begin(uint32_t wait_ms = 0, bool alone = false) const {
    PutSpec spec{prompt_.model.name, "", prompt_.tokens, "equal"};
    spec.wait_ms = wait_ms;
    spec.alone = alone;
    return client_->BeginPut(spec);
  }
};

TEST_P(EqualPuts, TheSecondWaitsForTheFirstAndFindsIt) {
  auto first = Begin();
  ASSERT_TRUE(first.ok() && WriteRows(**first, prompt_).ok());
  std::atomic<bool> began{false};
  Result<std::unique_ptr<PutStream>> second = Error{};
  std::thread other([&] {
    began = true;
    second = Begin(60000);
  });
  while (!began) std::this_thread::yield();
  // Other calls of the same client go on meanwhile.
  EXPECT_EQ(client_->Match({.model = prompt_.model.name, .tokens = prompt_.tokens})->n_tokens, 0u);
  const auto done = (*first)->Commit();
  other.join();
  ASSERT_TRUE(done.ok()) << done.error().message;
  ASSERT_TRUE(second.ok()) << second.error().message;
  EXPECT_EQ((*second)->missing().size(), 0u);
  const auto again = (*second)->Commit();
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(again->prefix, done->prefix);
  EXPECT_EQ(again->stored_tokens, 0u);
  EXPECT_EQ(EveryPrefix(*client_)->size(), 1u);
}

TEST_P(EqualPuts, TheSecondStoresWhatTheFirstDoesNot) {
  auto first = Begin();
  ASSERT_TRUE(first.ok());
  std::thread other([&] {
    auto second = Begin(60000);
    ASSERT_TRUE(second.ok()) << second.error().message;
    EXPECT_EQ((*second)->missing(), (TokenRange{0, kTokens}));
    ASSERT_TRUE(WriteRows(**second, prompt_).ok());
    const auto done = (*second)->Commit();
    ASSERT_TRUE(done.ok()) << done.error().message;
    EXPECT_EQ(done->stored_tokens, kTokens);
  });
  (*first)->Abort();
  other.join();
  EXPECT_EQ(EveryPrefix(*client_)->size(), 1u);
}

TEST_P(EqualPuts, WhoWillNotWaitIsToldOrGoesOn) {
  auto first = Begin();
  ASSERT_TRUE(first.ok());
  for (const uint32_t wait_ms : {0u, 60u}) {
    const auto alone = Begin(wait_ms, true);
    ASSERT_FALSE(alone.ok());
    EXPECT_EQ(alone.error().code, Code::kUnavailable);
    EXPECT_NE(alone.error().message.find("another put of these tokens is under way"),
              std::string::npos)
        << alone.error().message;
  }
  for (const uint32_t wait_ms : {0u, 60u}) {
    const auto too = Begin(wait_ms);
    ASSERT_TRUE(too.ok()) << too.error().message;
    EXPECT_EQ((*too)->missing().size(), kTokens);
  }
  // Other prompts wait for nobody, and neither do those of another tenant.
  PutSpec other{prompt_.model.name, "", MakePrompt(100, 99).tokens, ""};
  other.alone = true;
  EXPECT_TRUE(client_->BeginPut(other).ok());
  first->reset();  // as an abort
  EXPECT_TRUE(Begin(0, true).ok());
}

TEST_P(EqualPuts, ASecondCommitStoresNoSecondCopy) {
  auto first = Begin(), second = Begin();
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(WriteRows(**first, prompt_).ok() && WriteRows(**second, prompt_).ok());
  const auto one = (*first)->Commit(), two = (*second)->Commit();
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ(one->prefix, two->prefix);
  EXPECT_EQ(one->stored_tokens, kTokens);
  EXPECT_EQ(two->stored_tokens, 0u);
  EXPECT_EQ(two->bytes, 0u);
  const auto prefixes = EveryPrefix(*client_);
  ASSERT_TRUE(prefixes.ok());
  ASSERT_EQ(prefixes->size(), 1u);
  EXPECT_EQ((*prefixes)[0].own_tokens, kTokens);
  EXPECT_EQ(client_->Verify("", {})->segments, 1u);
  EXPECT_EQ(client_->Stats()->puts, 1u);
}

TEST_P(EqualPuts, ManyEnginesStoreAPromptOnce) {
  std::atomic<uint32_t> stored{0}, failed{0};
  std::vector<std::thread> engines;
  for (int i = 0; i < 6; ++i) {
    engines.emplace_back([&] {
      auto put = Begin(60000);
      if (!put.ok()) {
        ++failed;
        return;
      }
      const bool new_tokens = (*put)->missing().size() > 0;
      if (new_tokens && !WriteRows(**put, prompt_).ok()) ++failed;
      const auto done = (*put)->Commit();
      if (!done.ok()) ++failed;
      stored += new_tokens ? 1 : 0;
    });
  }
  for (std::thread& engine : engines) engine.join();
  EXPECT_EQ(failed, 0u);
  EXPECT_EQ(stored, 1u);
  EXPECT_EQ(client_->Stats()->puts, 1u);
}

INSTANTIATE_TEST_SUITE_P(Clients, EqualPuts, EveryKind(), KindName);

}  // namespace
}  // namespace prefixd::testing
