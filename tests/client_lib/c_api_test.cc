// Tests the C interface, embedded and against the real daemon. Links libprefixd.so alone, so that a
// symbol that is not exported cannot be used here.
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "prefixd/merge.h"
#include "prefixd/prefixd.h"
#include "tests/daemon/daemon_process.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using Json = nlohmann::json;
using testing::DaemonDir;
using testing::DaemonProcess;

constexpr uint32_t kLayers = 2, kQHeads = 4, kKvHeads = 2, kDim = 16, kTokens = 300;
constexpr size_t kQ = kQHeads * kDim;
constexpr const char* kModel =
    R"({"name": "m", "identity": [["weights", "random"]], "geometry": {"n_layers": 2,
        "n_q_heads": 4, "n_kv_heads": 2, "key_dim": 16, "value_dim": 16, "dtype": "f32",
        "layers": [{"scale": 0.25}, {"scale": 0.25}]}})";

class CApi : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    std::mt19937_64 rng(testing::Seed("CApi"));
    std::normal_distribution<float> normal;
    for (uint32_t i = 0; i < kTokens; ++i) tokens_.push_back(uint32_t(rng() % 50000));
    for (auto* rows : {&k_, &v_}) {
      rows->resize(kLayers * kTokens * kKvHeads * kDim);
      for (float& x : *rows) x = normal(rng);
    }
    q_.resize(3 * kQ);
    for (float& x : q_) x = normal(rng);
    if (GetParam()) {
      daemon_ = std::make_unique<DaemonProcess>(dir_.path());
      ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
      pfx_connect_options options = PFX_CONNECT_OPTIONS_INIT;
      const std::string address = daemon_->address();
      options.address = address.c_str();
      ASSERT_EQ(pfx_connect(&options, &client_), PFX_OK) << pfx_last_error();
    } else {
      pfx_open_options options = PFX_OPEN_OPTIONS_INIT;
      const std::string dir = dir_.path() / "store";
      options.dir = dir.c_str();
      options.options_json = R"({"host_tier_bytes": 67108864, "min_free_bytes": 0, "threads": 2})";
      ASSERT_EQ(pfx_open(&options, &client_), PFX_OK) << pfx_last_error();
    }
    ASSERT_EQ(pfx_register_model(client_, kModel), PFX_OK) << pfx_last_error();
  }
  void TearDown() override {
    pfx_session_free(session_);
    pfx_store_close(client_);
  }

  const float* Row(const std::vector<float>& rows, uint32_t layer, uint32_t token) const {
    return rows.data() + (size_t{layer} * kTokens + token) * kKvHeads * kDim;
  }

  void Put() {
    pfx_put_options options = PFX_PUT_OPTIONS_INIT;
    options.model = "m";
    options.tokens = tokens_.data();
    options.n_tokens = kTokens;
    options.label = "c";
    pfx_put* put = nullptr;
    ASSERT_EQ(pfx_begin_put(client_, &options, &put), PFX_OK) << pfx_last_error();
    uint32_t begin = 9, end = 9;
    ASSERT_EQ(pfx_put_missing(put, &begin, &end), PFX_OK);
    EXPECT_EQ(begin, 0u);
    EXPECT_EQ(end, kTokens);
    options.alone = 1;  // while the first is under way
    options.wait_ms = 20;
    pfx_put* second = nullptr;
    EXPECT_EQ(pfx_begin_put(client_, &options, &second), PFX_UNAVAILABLE) << pfx_last_error();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const size_t bytes = kTokens * kKvHeads * kDim * sizeof(float);
      EXPECT_EQ(pfx_put_write(put, layer, 0, kTokens, Row(k_, layer, 0), bytes - 4,
                              Row(v_, layer, 0), bytes),
                PFX_INVALID_ARGUMENT);
      EXPECT_EQ(pfx_put_commit(put, nullptr), PFX_FAILED_PRECONDITION);  // too early; it goes on
      EXPECT_NE(std::string(pfx_last_error()).find("lacks token 0"), std::string::npos);
      ASSERT_EQ(
          pfx_put_write(put, layer, 0, kTokens, Row(k_, layer, 0), bytes, Row(v_, layer, 0), bytes),
          PFX_OK)
          << pfx_last_error();
      ASSERT_EQ(pfx_put_write_queries(put, layer, kTokens - 3, 3, q_.data(), q_.size()), PFX_OK);
    }
    pfx_put_result result = PFX_PUT_RESULT_INIT;
    ASSERT_EQ(pfx_put_commit(put, &result), PFX_OK) << pfx_last_error();
    EXPECT_EQ(pfx_put_commit(put, &result), PFX_FAILED_PRECONDITION);
    pfx_put_free(put);
    EXPECT_EQ(result.stored_tokens, kTokens);
    prefix_ = result.prefix;
    ASSERT_EQ(prefix_.size(), 32u);
    int calls = 0;
    const auto count = [](void* user, uint64_t, uint64_t, const char*) {
      ++*static_cast<int*>(user);
      return 0;
    };
    ASSERT_EQ(pfx_wait_ready(client_, result.prefix, count, &calls), PFX_OK) << pfx_last_error();
  }

  pfx_session* Attach(const char* policy) {
    pfx_attach_options options = PFX_ATTACH_OPTIONS_INIT;
    options.model = "m";
    options.tokens = tokens_.data();
    options.n_tokens = kTokens;
    options.policy_json = policy;
    pfx_session* session = nullptr;
    EXPECT_EQ(pfx_attach(client_, &options, &session), PFX_OK) << pfx_last_error();
    return session;
  }

  // Computes head `head` of `layer` over the whole prefix, in doubles.
  void Reference(uint32_t layer, uint32_t head, const float* q, double* y, double* lse) const {
    std::vector<double> s(kTokens);
    double sum = 0;
    const uint32_t kv = head / (kQHeads / kKvHeads);
    std::fill_n(y, kDim, 0.0);
    for (uint32_t t = 0; t < kTokens; ++t) {
      for (uint32_t d = 0; d < kDim; ++d) s[t] += 0.25 * q[d] * Row(k_, layer, t)[kv * kDim + d];
      sum += std::exp(s[t]);
    }
    for (uint32_t t = 0; t < kTokens; ++t) {
      for (uint32_t d = 0; d < kDim; ++d) {
        y[d] += std::exp(s[t]) / sum * Row(v_, layer, t)[kv * kDim + d];
      }
    }
    *lse = std::log(sum);
  }

  void ExpectReference(uint32_t layer, const float* q, const float* y, const float* lse) const {
    for (uint32_t head = 0; head < kQHeads; ++head) {
      double want[kDim], want_lse;
      Reference(layer, head, q + head * kDim, want, &want_lse);
      EXPECT_NEAR(lse[head], want_lse, 1e-4);
      for (uint32_t d = 0; d < kDim; ++d) EXPECT_NEAR(y[head * kDim + d], want[d], 1e-4);
    }
  }

  DaemonDir dir_;
  std::unique_ptr<DaemonProcess> daemon_;
  pfx_store* client_ = nullptr;
  pfx_session* session_ = nullptr;
  std::vector<uint32_t> tokens_;
  std::vector<float> k_, v_, q_;
  std::string prefix_;
};

TEST_P(CApi, FullStepsAndExactBlocksAreAttentionOverThePrefix) {
  Put();
  session_ = Attach(R"({"mode": "full"})");
  float y[3 * kQ], lse[3 * kQHeads];
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    ASSERT_EQ(pfx_step(session_, layer, q_.data(), kQ, y, kQ, lse, kQHeads), PFX_OK)
        << pfx_last_error();
    ExpectReference(layer, q_.data(), y, lse);
    ASSERT_EQ(
        pfx_attend_exact(session_, layer, 0, 0, 3, q_.data(), 3 * kQ, y, 3 * kQ, lse, 3 * kQHeads),
        PFX_OK);
    for (int i = 0; i < 3; ++i) {
      ExpectReference(layer, q_.data() + i * kQ, y + i * kQ, lse + i * kQHeads);
    }
  }
}

TEST_P(CApi, ABatchIsItsStepsAndEachHasItsOwnCode) {
  Put();
  session_ = Attach(R"({"mode": "full"})");
  pfx_session* other = Attach(R"({"k": 20, "estimator": "none"})");
  float y[3][kQ], lse[3][kQHeads], alone[kQ], alone_lse[kQHeads];
  pfx_step_request requests[3] = {};
  for (int i = 0; i < 3; ++i) {
    requests[i] = {i == 1 ? other : session_,
                   i == 2 ? 77u : 0u,
                   PFX_INTERNAL,
                   q_.data(),
                   kQ,
                   y[i],
                   kQ,
                   lse[i],
                   kQHeads,
                   0,
                   0};
  }
  EXPECT_EQ(pfx_step_batch(client_, requests, 3, sizeof(pfx_step_request)), PFX_INVALID_ARGUMENT);
  EXPECT_NE(std::string(pfx_last_error()).find("request 2: layer 77"), std::string::npos)
      << pfx_last_error();
  EXPECT_EQ(requests[0].code, PFX_OK);
  EXPECT_EQ(requests[1].code, PFX_OK);
  EXPECT_EQ(requests[2].code, PFX_INVALID_ARGUMENT);
  ExpectReference(0, q_.data(), y[0], lse[0]);
  ASSERT_EQ(pfx_step(other, 0, q_.data(), kQ, alone, kQ, alone_lse, kQHeads), PFX_OK);
  for (size_t i = 0; i < kQ; ++i) EXPECT_NEAR(alone[i], y[1][i], 1e-6);
  EXPECT_EQ(pfx_step_batch(client_, requests, 3, sizeof(pfx_step_request) - 8),
            PFX_INVALID_ARGUMENT);
  pfx_session_free(other);
}

// Two ranks in one process: each has one KV head of two.
TEST_P(CApi, RanksPutAndStepTheirOwnHeads) {
  constexpr size_t kHalf = kQ / 2;
  pfx_put* parts[2] = {};
  for (uint32_t r = 0; r < 2; ++r) {
    pfx_put_options options = PFX_PUT_OPTIONS_INIT;
    options.model = "m";
    options.tokens = tokens_.data();
    options.n_tokens = tokens_.size();
    options.first_head = r;
    options.n_heads = 1;
    ASSERT_EQ(pfx_begin_put(client_, &options, &parts[r]), PFX_OK) << pfx_last_error();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      std::vector<float> k, v;
      for (size_t t = 0; t < kTokens; ++t) {
        const size_t at = ((layer * kTokens + t) * 2 + r) * kDim;
        k.insert(k.end(), &k_[at], &k_[at] + kDim);
        v.insert(v.end(), &v_[at], &v_[at] + kDim);
      }
      ASSERT_EQ(pfx_put_write(parts[r], layer, 0, kTokens, k.data(), k.size() * sizeof(float),
                              v.data(), v.size() * sizeof(float)),
                PFX_OK)
          << pfx_last_error();
    }
  }
  pfx_put_result results[2] = {PFX_PUT_RESULT_INIT, PFX_PUT_RESULT_INIT};
  EXPECT_EQ(pfx_put_commit(parts[0], &results[0]), PFX_FAILED_PRECONDITION);
  EXPECT_NE(std::string(pfx_last_error()).find("KV heads 1..2"), std::string::npos);
  ASSERT_EQ(pfx_put_commit(parts[1], &results[1]), PFX_OK) << pfx_last_error();
  ASSERT_EQ(pfx_put_commit(parts[0], &results[0]), PFX_OK) << pfx_last_error();
  EXPECT_STREQ(results[0].prefix, results[1].prefix);
  EXPECT_EQ(results[0].stored_tokens, kTokens);
  for (pfx_put* part : parts) pfx_put_free(part);

  session_ = Attach(R"({"mode": "full"})");
  float y[3 * kQ], lse[3 * kQHeads];
  pfx_step_request halves[2] = {};
  for (uint32_t r = 0; r < 2; ++r) {
    halves[r] = {session_,
                 1u,
                 PFX_INTERNAL,
                 q_.data() + r * kHalf,
                 kHalf,
                 y + r * kHalf,
                 kHalf,
                 lse + r * kQHeads / 2,
                 size_t{kQHeads} / 2,
                 r,
                 1u};
  }
  ASSERT_EQ(pfx_step_batch(client_, halves, 2, sizeof(pfx_step_request)), PFX_OK)
      << pfx_last_error();
  ExpectReference(1, q_.data(), y, lse);
  float half_y[kHalf], half_lse[kQHeads / 2];
  ASSERT_EQ(pfx_attend_exact(session_, 1, 1, 1, 1, q_.data() + kHalf, kHalf, half_y, kHalf,
                             half_lse, kQHeads / 2),
            PFX_OK)
      << pfx_last_error();
  for (size_t i = 0; i < kHalf; ++i) EXPECT_NEAR(half_y[i], y[kHalf + i], 1e-5);
  EXPECT_EQ(pfx_attend_exact(session_, 1, 2, 0, 1, q_.data(), kHalf, half_y, kHalf, half_lse, 2),
            PFX_INVALID_ARGUMENT);
}

TEST_P(CApi, RowsComeBackAsTheyWerePut) {
  Put();
  session_ = Attach(R"({"mode": "full"})");
  pfx_session_shape shape = PFX_SESSION_SHAPE_INIT;
  ASSERT_EQ(pfx_session_get_shape(session_, &shape), PFX_OK);
  EXPECT_EQ(shape.n_tokens, kTokens);
  EXPECT_EQ(shape.row_bytes, 2 * kDim * sizeof(float));
  EXPECT_STREQ(shape.dtype, "f32");
  const uint32_t ids[] = {0, 7, 299};
  float rows[3][2 * kDim], range[2][2 * kDim];
  ASSERT_EQ(pfx_read_rows(session_, 1, 1, ids, 3, rows, sizeof(rows)), PFX_OK) << pfx_last_error();
  ASSERT_EQ(pfx_read_range(session_, 1, 1, 7, 9, range, sizeof(range)), PFX_OK);
  EXPECT_EQ(pfx_read_range(session_, 1, 1, 7, 9, range, 8), PFX_INVALID_ARGUMENT);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(std::equal(rows[i], rows[i] + kDim, Row(k_, 1, ids[i]) + kDim));
    EXPECT_TRUE(std::equal(rows[i] + kDim, rows[i] + 2 * kDim, Row(v_, 1, ids[i]) + kDim));
  }
  EXPECT_TRUE(std::ranges::equal(range[0], rows[1]));
  uint32_t selected[20];
  size_t n = 0;
  pfx_cut cuts[2];
  ASSERT_EQ(pfx_select(session_, 0, 0, q_.data(), 2 * kDim, 20, selected, &n, cuts, 2), PFX_OK)
      << pfx_last_error();
  EXPECT_EQ(n, 20u);
  EXPECT_TRUE(std::is_sorted(selected, selected + n));
  EXPECT_EQ(cuts[0].kind, PFX_CUT_EXACT);
}

// Three layers: as the model's, with heads and dimensions of its own, and without rows.
TEST_P(CApi, LayersMayDiffer) {
  ASSERT_EQ(pfx_register_model(client_, R"({"name": "layers", "geometry": {"n_layers": 3,
      "n_q_heads": 4, "n_kv_heads": 2, "key_dim": 16, "value_dim": 16, "dtype": "f32",
      "layers": [{"scale": 0.25}, {"scale": 0.25, "n_q_heads": 1, "n_kv_heads": 1, "key_dim": 8},
                 {"scale": 0.25, "stored": false}]}})"),
            PFX_OK)
      << pfx_last_error();
  pfx_put_options options = PFX_PUT_OPTIONS_INIT;
  options.model = "layers", options.tokens = tokens_.data(), options.n_tokens = kTokens;
  pfx_put* put = nullptr;
  ASSERT_EQ(pfx_begin_put(client_, &options, &put), PFX_OK) << pfx_last_error();
  const size_t row = kDim * sizeof(float);
  ASSERT_EQ(
      pfx_put_write(put, 0, 0, kTokens, k_.data(), kTokens * 2 * row, v_.data(), kTokens * 2 * row),
      PFX_OK);
  EXPECT_EQ(pfx_put_write(put, 1, 0, kTokens, k_.data(), kTokens * row, v_.data(), kTokens * row),
            PFX_INVALID_ARGUMENT);
  ASSERT_EQ(
      pfx_put_write(put, 1, 0, kTokens, k_.data(), kTokens * row / 2, v_.data(), kTokens * row),
      PFX_OK)
      << pfx_last_error();
  EXPECT_EQ(pfx_put_write(put, 2, 0, 0, nullptr, 0, nullptr, 0), PFX_INVALID_ARGUMENT);
  ASSERT_EQ(pfx_put_commit(put, nullptr), PFX_OK) << pfx_last_error();
  pfx_put_free(put);
  pfx_attach_options attach = PFX_ATTACH_OPTIONS_INIT;
  attach.model = "layers", attach.tokens = tokens_.data(), attach.n_tokens = kTokens;
  attach.policy_json = R"({"mode": "full"})";
  ASSERT_EQ(pfx_attach(client_, &attach, &session_), PFX_OK) << pfx_last_error();
  const uint32_t shapes[3][5] = {{4, 2, 16, 16, 128}, {1, 1, 8, 16, 96}, {0, 0, 0, 0, 0}};
  for (uint32_t layer = 0; layer < 3; ++layer) {
    pfx_layer_shape shape = PFX_LAYER_SHAPE_INIT;
    ASSERT_EQ(pfx_session_get_layer(session_, layer, &shape), PFX_OK) << pfx_last_error();
    const uint32_t got[5] = {shape.n_q_heads, shape.n_kv_heads, shape.key_dim, shape.value_dim,
                             shape.row_bytes};
    EXPECT_TRUE(std::ranges::equal(got, shapes[layer])) << layer;
  }
  pfx_layer_shape shape = PFX_LAYER_SHAPE_INIT;
  EXPECT_EQ(pfx_session_get_layer(session_, 3, &shape), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_session_get_layer(nullptr, 0, &shape), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_session_get_layer(session_, 0, nullptr), PFX_INVALID_ARGUMENT);
  // Layer 1 by definition, in float64: a key is 8 floats, a value 16.
  double total = 0;
  std::vector<double> sum(kDim);
  for (uint32_t t = 0; t < kTokens; ++t) {
    double score = 0;
    for (uint32_t i = 0; i < 8; ++i) score += 0.25 * q_[i] * k_[t * 8 + i];
    total += std::exp(score);
    for (uint32_t i = 0; i < kDim; ++i) sum[i] += std::exp(score) * v_[t * kDim + i];
  }
  float y[kDim], lse = 0;
  ASSERT_EQ(pfx_step(session_, 1, q_.data(), 8, y, kDim, &lse, 1), PFX_OK) << pfx_last_error();
  EXPECT_NEAR(lse, std::log(total), 1e-4);
  for (uint32_t i = 0; i < kDim; ++i) EXPECT_NEAR(y[i], sum[i] / total, 1e-4);
  EXPECT_EQ(pfx_step(session_, 1, q_.data(), kQ, y, kDim, &lse, 1), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_step(session_, 2, q_.data(), 0, y, 0, &lse, 0), PFX_INVALID_ARGUMENT);
  EXPECT_NE(std::string(pfx_last_error()).find("layer 2 has no rows"), std::string::npos);
}

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

TEST_P(CApi, RestoreBringsEveryRowBackLayerByLayer) {
  Put();
  session_ = Attach(R"({"mode": "full"})");
  uint64_t seen = 0;
  pfx_restore_options options = PFX_RESTORE_OPTIONS_INIT;
  options.begin = 3;
  options.buffer_bytes = 1;  // two runs, however short
  options.user = &seen;
  options.progress = [](void* user, uint64_t done, uint64_t, const char*) {
    *static_cast<uint64_t*>(user) = done;
    return 0;
  };
  pfx_restore* restore = nullptr;
  ASSERT_EQ(pfx_restore_begin(session_, &options, &restore), PFX_OK) << pfx_last_error();
  const auto row_bytes = [](uint32_t tokens) { return size_t{tokens} * kKvHeads * kDim * 4; };
  uint32_t layer = 0, at = options.begin;
  uint64_t bytes = 0;
  while (true) {
    pfx_restored_run run = PFX_RESTORED_RUN_INIT;
    ASSERT_EQ(pfx_restore_next(restore, &run), PFX_OK) << pfx_last_error();
    if (run.k == nullptr) break;
    ASSERT_EQ(run.layer, layer);
    ASSERT_EQ(run.begin, at);
    ASSERT_EQ(run.k_bytes, row_bytes(run.end - run.begin));
    ASSERT_EQ(run.v_bytes, run.k_bytes);
    EXPECT_EQ(std::memcmp(run.k, Row(k_, layer, at), run.k_bytes), 0);
    EXPECT_EQ(std::memcmp(run.v, Row(v_, layer, at), run.v_bytes), 0);
    bytes += run.k_bytes + run.v_bytes;
    EXPECT_EQ(seen, bytes);
    at = run.end;
    if (at == kTokens) ++layer, at = options.begin;
  }
  EXPECT_EQ(layer, uint32_t{kLayers});
  pfx_restore_cancel(restore);
  pfx_restored_run run = PFX_RESTORED_RUN_INIT;
  EXPECT_EQ(pfx_restore_next(restore, &run), PFX_CANCELLED);
  pfx_restore_free(restore);

  // The run is head-major and has one layer; it outlives the session's handle.
  options = PFX_RESTORE_OPTIONS_INIT;
  options.first_layer = 1;
  options.end_layer = 2;
  options.order = PFX_HEAD_MAJOR;
  ASSERT_EQ(pfx_restore_begin(session_, &options, &restore), PFX_OK) << pfx_last_error();
  ASSERT_EQ(pfx_restore_next(restore, &run), PFX_OK) << pfx_last_error();
  ASSERT_GT(run.end, 1u);
  const float* last = static_cast<const float*>(run.v) + (run.v_bytes / 4 - kDim);
  EXPECT_TRUE(std::equal(last, last + kDim, Row(v_, 1, run.end - 1) + (kKvHeads - 1) * kDim));
  pfx_restore_free(restore);

  options.order = static_cast<pfx_kv_order>(7);
  EXPECT_EQ(pfx_restore_begin(session_, &options, &restore), PFX_INVALID_ARGUMENT);
  options = PFX_RESTORE_OPTIONS_INIT;
  options.end = kTokens + 1;
  EXPECT_EQ(pfx_restore_begin(session_, &options, &restore), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_restore_begin(nullptr, nullptr, &restore), PFX_INVALID_ARGUMENT);
  options = PFX_RESTORE_OPTIONS_INIT;
  options.progress = [](void*, uint64_t, uint64_t, const char*) { return 1; };
  ASSERT_EQ(pfx_restore_begin(session_, &options, &restore), PFX_OK);
  EXPECT_EQ(pfx_restore_next(restore, &run), PFX_CANCELLED);
  pfx_restore_free(restore);
  pfx_restore_free(nullptr);
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

TEST(CApiValues, MergeStatesIsOneSoftmaxAndEmptySidesAreFine) {
  float y_a[2 * 3] = {1, 2, 3, 9, 9, 9}, lse_a[2] = {0.5f, -INFINITY};
  const float y_b[2 * 3] = {-1, 0, 5, 4, 5, 6}, lse_b[2] = {1.5f, 2};
  pfx_merge_states(y_a, lse_a, y_b, lse_b, 2, 3);
  const double a = std::exp(0.5), b = std::exp(1.5);
  EXPECT_NEAR(lse_a[0], std::log(a + b), 1e-6);
  EXPECT_NEAR(y_a[0], (a - b) / (a + b), 1e-6);
  EXPECT_NEAR(y_a[2], (3 * a + 5 * b) / (a + b), 1e-6);
  EXPECT_EQ(lse_a[1], 2);
  EXPECT_EQ(y_a[3], 4);
  EXPECT_STREQ(pfx_code_name(PFX_NOT_FOUND), "not_found");
  EXPECT_STREQ(pfx_code_name(PFX_OK), "ok");
  EXPECT_STREQ(pfx_code_name(static_cast<pfx_code>(99)), "unknown");
  pfx_store_close(nullptr);
  pfx_put_free(nullptr);
  pfx_session_free(nullptr);
  pfx_free(nullptr);
}

}  // namespace
}  // namespace prefixd
