// Tests the calls on a store through the C interface, and what it refuses.
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "prefixd/prefixd.h"
#include "tests/client_lib/c_api_fixture.h"
#include "tests/support/test.h"

namespace prefixd::testing {
namespace {

using Json = nlohmann::json;

TEST_P(CApi, StoredPrefixesAreListedMatchedCheckedAndRemoved) {
  Put();
  std::vector<uint32_t> longer = tokens_;
  longer.push_back(1);
  pfx_match_options wanted = PFX_MATCH_OPTIONS_INIT;
  wanted.model = "m", wanted.tokens = longer.data(), wanted.n_tokens = longer.size();
  pfx_match_result match = PFX_MATCH_RESULT_INIT;
  ASSERT_EQ(pfx_match(client_, &wanted, &match), PFX_OK);
  EXPECT_EQ(match.exact_tokens, kTokens);
  EXPECT_EQ(match.n_tokens, kTokens);
  EXPECT_EQ(match.prefix, prefix_);
  EXPECT_EQ(match.estimate.tokens, kTokens);
  EXPECT_EQ(match.estimate.recompute_source, PFX_SOURCE_UNKNOWN);
  wanted.prefill_tokens_per_second = 2;
  wanted.cached_tokens = 10;
  ASSERT_EQ(pfx_match(client_, &wanted, &match), PFX_OK);
  EXPECT_EQ(match.estimate.tokens, kTokens - 10);
  EXPECT_EQ(match.estimate.recompute_source, PFX_SOURCE_GIVEN);
  EXPECT_EQ(match.estimate.recompute_seconds, (kTokens - 10) / 2.0);
  EXPECT_EQ(match.estimate.advice, PFX_ADVICE_UNKNOWN);
  pfx_pending_match* pending = nullptr;
  for (const bool awaited : {true, false}) {
    ASSERT_EQ(pfx_match_begin(client_, &wanted, 3600'000, &pending), PFX_OK);
    match = PFX_MATCH_RESULT_INIT;
    ASSERT_EQ(pfx_match_end(pending, awaited ? &match : nullptr), PFX_OK);
    EXPECT_EQ(match.n_tokens, awaited ? kTokens : 0);
  }
  wanted.model = "x";
  ASSERT_EQ(pfx_match_begin(client_, &wanted, 0, &pending), PFX_OK);
  EXPECT_EQ(pfx_match_ready(pending), 1);  // no patience: there is an answer, or none
  const pfx_code code = pfx_match_end(pending, &match);
  EXPECT_TRUE(code == PFX_NOT_FOUND || code == PFX_DEADLINE_EXCEEDED) << code;
  EXPECT_STREQ(pfx_code_name(PFX_DEADLINE_EXCEEDED), "deadline_exceeded");
  EXPECT_EQ(pfx_match_end(nullptr, nullptr), PFX_INVALID_ARGUMENT);
  char* json = nullptr;
  ASSERT_EQ(pfx_list_prefixes(client_, nullptr, &json), PFX_OK);
  EXPECT_EQ(Json::parse(json)["prefixes"][0]["label"], "c");
  EXPECT_EQ(Json::parse(json)["next"], "");
  pfx_free(json);
  ASSERT_EQ(pfx_list_prefixes(client_, R"({"tenant": "", "limit": 1})", &json), PFX_OK);
  EXPECT_EQ(Json::parse(json)["prefixes"].size(), 1u);
  pfx_free(json);
  EXPECT_EQ(pfx_list_prefixes(client_, R"({"after": "x"})", &json), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_list_prefixes(client_, R"({"page": 1})", &json), PFX_INVALID_ARGUMENT);
  ASSERT_EQ(pfx_set_lifetime(client_, prefix_.c_str(), R"({"pinned": true})"), PFX_OK);
  ASSERT_EQ(pfx_prefix(client_, prefix_.c_str(), &json), PFX_OK);
  EXPECT_EQ(Json::parse(json)["summary"]["pinned"], true);
  pfx_free(json);
  wanted = PFX_MATCH_OPTIONS_INIT;
  wanted.model = "m";
  const uint32_t unknown[] = {7, 7, 7};
  wanted.tokens = unknown;
  wanted.n_tokens = 3;
  ASSERT_EQ(pfx_explain(client_, &wanted, R"([["weights", "w"]])", &json), PFX_OK)
      << pfx_last_error();
  EXPECT_EQ(Json::parse(json)["asked_tokens"], 3);
  EXPECT_FALSE(Json::parse(json)["misses"].empty());
  pfx_free(json);
  EXPECT_EQ(pfx_explain(client_, &wanted, "[1]", &json), PFX_INVALID_ARGUMENT);
  ASSERT_EQ(pfx_rewrite(client_, prefix_.c_str(), "compact", nullptr, nullptr, &json), PFX_OK)
      << pfx_last_error();
  EXPECT_EQ(Json::parse(json)["segments"], 1);
  pfx_free(json);
  EXPECT_EQ(pfx_rewrite(client_, prefix_.c_str(), "fold", nullptr, nullptr, nullptr),
            PFX_INVALID_ARGUMENT);
  ASSERT_EQ(pfx_verify(client_, nullptr, nullptr, nullptr, &json), PFX_OK) << pfx_last_error();
  EXPECT_EQ(Json::parse(json)["segments"], 1);
  pfx_free(json);
  ASSERT_EQ(pfx_list_models(client_, R"({"limit": 1})", &json), PFX_OK);
  EXPECT_EQ(Json::parse(json)["models"][0]["name"], "m");
  pfx_free(json);
  ASSERT_EQ(pfx_model(client_, "m", &json), PFX_OK);
  EXPECT_EQ(Json::parse(json)["name"], "m");
  pfx_free(json);
  EXPECT_EQ(pfx_model(client_, "x", &json), PFX_NOT_FOUND);
  EXPECT_EQ(pfx_remove_model(client_, "m"), PFX_FAILED_PRECONDITION);
  ASSERT_EQ(pfx_stats(client_, &json), PFX_OK);
  EXPECT_EQ(Json::parse(json)["prefixes"], 1);
  pfx_free(json);
  session_ = Attach(R"({"mode": "full"})");
  ASSERT_EQ(pfx_session_report(session_, &json), PFX_OK);
  EXPECT_EQ(Json::parse(json)["info"]["n_tokens"], kTokens);
  pfx_free(json);
  ASSERT_EQ(pfx_session_detach(session_, nullptr), PFX_OK);
  EXPECT_EQ(pfx_session_detach(session_, nullptr), PFX_FAILED_PRECONDITION);
  ASSERT_EQ(pfx_remove(client_, prefix_.c_str()), PFX_OK) << pfx_last_error();
  EXPECT_EQ(pfx_remove_model(client_, "m"), PFX_OK) << pfx_last_error();
  EXPECT_EQ(pfx_remove(client_, prefix_.c_str()), PFX_NOT_FOUND);
}

TEST_P(CApi, CompressedPrefixesAreFoundWhereTheyAreAccepted) {
  Put();
  ASSERT_EQ(pfx_wait_ready(client_, prefix_.c_str(), nullptr, nullptr), PFX_OK);
  EXPECT_EQ(pfx_compress(client_, prefix_.c_str(), R"({"keeps": 1})", nullptr, nullptr, nullptr),
            PFX_INVALID_ARGUMENT);
  char* json = nullptr;
  const char* spec = R"({"keep": 0.25, "policy": "window", "dry_run": true})";
  ASSERT_EQ(pfx_compress(client_, prefix_.c_str(), spec, nullptr, nullptr, &json), PFX_OK)
      << pfx_last_error();
  EXPECT_EQ(Json::parse(json)["compressed"], false);
  pfx_free(json);
  pfx_match_options wanted = PFX_MATCH_OPTIONS_INIT;
  wanted.model = "m";
  wanted.tokens = tokens_.data();
  wanted.n_tokens = tokens_.size();
  pfx_match_result match = PFX_MATCH_RESULT_INIT;
  ASSERT_EQ(pfx_match(client_, &wanted, &match), PFX_OK);
  EXPECT_EQ(match.n_tokens, kTokens);
  spec = R"({"keep": 0.25, "policy": "window"})";
  ASSERT_EQ(pfx_compress(client_, prefix_.c_str(), spec, nullptr, nullptr, &json), PFX_OK)
      << pfx_last_error();
  EXPECT_EQ(Json::parse(json)["compressed"], true);
  EXPECT_LT(Json::parse(json)["bytes_after"], Json::parse(json)["bytes_before"]);
  pfx_free(json);
  ASSERT_EQ(pfx_match(client_, &wanted, &match), PFX_OK);
  EXPECT_EQ(match.n_tokens, 0u);
  EXPECT_EQ(match.compressed, 0);
  wanted.accept_compressed = 1;
  ASSERT_EQ(pfx_match(client_, &wanted, &match), PFX_OK);
  EXPECT_EQ(match.n_tokens, kTokens);
  EXPECT_EQ(match.compressed, 1);
  pfx_attach_options attach = PFX_ATTACH_OPTIONS_INIT;
  attach.model = "m";
  attach.tokens = tokens_.data();
  attach.n_tokens = tokens_.size();
  attach.policy_json = R"({"budget": 0.2, "estimator": "moment"})";
  EXPECT_NE(pfx_attach(client_, &attach, &session_), PFX_OK);
  attach.accept_compressed = 1;
  ASSERT_EQ(pfx_attach(client_, &attach, &session_), PFX_OK) << pfx_last_error();
  std::vector<float> y(kQHeads * kDim), lse(kQHeads);
  ASSERT_EQ(pfx_step(session_, 0, q_.data(), kQ, y.data(), y.size(), lse.data(), lse.size()),
            PFX_OK)
      << pfx_last_error();
  for (const float x : y) EXPECT_TRUE(std::isfinite(x));
}

TEST_P(CApi, WhatIsWrongIsSaid) {
  Put();
  pfx_attach_options options = PFX_ATTACH_OPTIONS_INIT;
  options.model = "m";
  options.prefix = prefix_.c_str();
  options.policy_json = R"({"estimater": "moment"})";
  EXPECT_EQ(pfx_attach(client_, &options, &session_), PFX_INVALID_ARGUMENT);
  EXPECT_NE(std::string(pfx_last_error()).find("policy.estimater: no such field"),
            std::string::npos)
      << pfx_last_error();
  options.policy_json = R"({"spread": 0.5})";
  EXPECT_EQ(pfx_attach(client_, &options, &session_), PFX_INVALID_ARGUMENT);
  EXPECT_NE(std::string(pfx_last_error()).find("policy.spread: expected"), std::string::npos)
      << pfx_last_error();
  options.policy_json = R"({"budget": 0.0001})";
  EXPECT_EQ(pfx_attach(client_, &options, &session_), PFX_INFEASIBLE);
  options.policy_json = "not JSON";
  EXPECT_EQ(pfx_attach(client_, &options, &session_), PFX_INVALID_ARGUMENT);
  options.policy_json = nullptr;
  options.struct_size = sizeof(options) + 8;
  EXPECT_EQ(pfx_attach(client_, &options, &session_), PFX_INVALID_ARGUMENT);
  // A caller built before the policy was added has a shorter struct; the rest takes its default.
  options.struct_size = offsetof(pfx_attach_options, policy_json);
  options.policy_json = "never looked at";
  options.cut = 200;
  EXPECT_EQ(pfx_attach(client_, &options, &session_), PFX_INFEASIBLE);  // 2% of 200 tokens
  options.model = "nobody";
  options.prefix = nullptr;
  options.tokens = tokens_.data();
  options.n_tokens = kTokens;
  EXPECT_EQ(pfx_attach(client_, &options, &session_), PFX_NOT_FOUND);
  EXPECT_EQ(session_, nullptr);
  EXPECT_EQ(pfx_attach(nullptr, &options, &session_), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_register_model(client_, R"({"name": "m", "geometrie": {}})"), PFX_INVALID_ARGUMENT);
  std::string other = kModel;
  other.replace(other.find("random"), 6, "others");
  EXPECT_EQ(pfx_register_model(client_, other.c_str()), PFX_ALREADY_EXISTS) << pfx_last_error();

  session_ = Attach(R"({"mode": "full"})");
  float y[kQ], lse[kQHeads];
  q_[5] = NAN;
  EXPECT_EQ(pfx_step(session_, 0, q_.data(), kQ, y, kQ, lse, kQHeads), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_step(session_, 0, nullptr, kQ, y, kQ, lse, kQHeads), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_step(session_, 0, q_.data(), kQ - 1, y, kQ, lse, kQHeads), PFX_INVALID_ARGUMENT);
  // Each thread has its own message.
  const std::string mine = pfx_last_error();
  std::thread([] { EXPECT_STREQ(pfx_last_error(), ""); }).join();
  EXPECT_EQ(mine, pfx_last_error());
}

TEST_P(CApi, ProgressCanCancel) {
  Put();
  const auto stop = [](void*, uint64_t, uint64_t, const char*) { return 1; };
  EXPECT_EQ(pfx_verify(client_, "", stop, nullptr, nullptr), PFX_CANCELLED) << pfx_last_error();
}

TEST_P(CApi, ARestartIsWaitedForUnlessItMayNotBe) {
  if (!GetParam()) GTEST_SKIP() << "an embedded store ends with its process";
  Put();
  pfx_connect_options impatient = PFX_CONNECT_OPTIONS_INIT;
  const std::string address = daemon_->address();
  impatient.address = address.c_str();
  impatient.reconnect_ms = UINT32_MAX;
  pfx_store* other = nullptr;
  ASSERT_EQ(pfx_connect(&impatient, &other), PFX_OK) << pfx_last_error();
  pfx_attach_options attach = PFX_ATTACH_OPTIONS_INIT;
  attach.model = "m";
  attach.tokens = tokens_.data();
  attach.n_tokens = kTokens;
  attach.policy_json = R"({"mode": "full"})";
  pfx_session* ends = nullptr;
  ASSERT_EQ(pfx_attach(client_, &attach, &session_), PFX_OK) << pfx_last_error();
  ASSERT_EQ(pfx_attach(other, &attach, &ends), PFX_OK) << pfx_last_error();
  const auto step = [&](pfx_session* session, std::vector<float>& y) {
    std::vector<float> lse(kQHeads);
    return pfx_step(session, 0, q_.data(), kQHeads * kDim, y.data(), y.size(), lse.data(),
                    lse.size());
  };
  std::vector<float> before(kQHeads * kDim), after(before);
  ASSERT_EQ(step(session_, before), PFX_OK) << pfx_last_error();
  daemon_.reset();  // kill -9
  EXPECT_EQ(step(ends, after), PFX_UNAVAILABLE);
  daemon_ = std::make_unique<DaemonProcess>(dir_.path());
  ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  ASSERT_EQ(step(session_, after), PFX_OK) << pfx_last_error();
  EXPECT_EQ(before, after);
  EXPECT_EQ(step(ends, after), PFX_UNAVAILABLE);
  pfx_session_free(ends);
  pfx_store_close(other);
}

INSTANTIATE_TEST_SUITE_P(Clients, CApi, ::testing::Bool(), [](const auto& param) {
  return std::string(param.param ? "Daemon" : "Embedded");
});

}  // namespace
}  // namespace prefixd::testing
