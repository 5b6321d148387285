// Tests steps through the C interface.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "prefixd/prefixd.h"
#include "tests/client_lib/c_api_fixture.h"
#include "tests/support/test.h"

namespace prefixd::testing {
namespace {

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
                   0,
                   nullptr,
                   0,
                   nullptr,
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

// The rows of the prompt's first tokens are appended again: the answer is that of a softmax in
// which they count twice.
TEST_P(CApi, SessionsTakeOwnTokens) {
  Put();
  session_ = Attach(R"({"mode": "full"})");
  const size_t row = kQHeads / 2 * kDim, bytes = row * sizeof(float);  // 2 KV heads
  const float* k = &k_[0];
  const float* v = &v_[0];
  float prefix[kQ], prefix_lse[kQHeads], y[kQ], lse[kQHeads], other[kQ], other_lse[kQHeads];
  ASSERT_EQ(pfx_step(session_, 0, q_.data(), kQ, prefix, kQ, prefix_lse, kQHeads), PFX_OK);
  ASSERT_EQ(pfx_session_append(session_, 0, 0, 0, 3, k, 3 * bytes, v, 3 * bytes), PFX_OK)
      << pfx_last_error();
  ASSERT_EQ(pfx_step_append(session_, 0, 0, 0, q_.data(), kQ, k + 3 * row, bytes, v + 3 * row,
                            bytes, y, kQ, lse, kQHeads),
            PFX_OK)
      << pfx_last_error();
  for (size_t h = 0; h < kQHeads; ++h) EXPECT_GT(lse[h], prefix_lse[h]);
  pfx_session* fork = nullptr;
  ASSERT_EQ(pfx_session_fork(session_, &fork), PFX_OK) << pfx_last_error();
  ASSERT_EQ(pfx_session_truncate(fork, 3), PFX_OK) << pfx_last_error();
  ASSERT_EQ(pfx_step_append(fork, 0, 0, 0, q_.data(), kQ, k + 3 * row, bytes, v + 3 * row, bytes,
                            other, kQ, other_lse, kQHeads),
            PFX_OK)
      << pfx_last_error();
  for (size_t i = 0; i < kQ; ++i) EXPECT_FLOAT_EQ(other[i], y[i]);
  // One head alone, and from the first token on: its rows lie apart from the other head's.
  ASSERT_EQ(pfx_session_truncate(fork, 0), PFX_OK);
  std::vector<float> one_k(k + kDim, k + 2 * kDim), one_v(v + kDim, v + 2 * kDim);
  ASSERT_EQ(pfx_step_append(fork, 0, 1, 1, q_.data() + kQ / 2, kQ / 2, one_k.data(), bytes / 2,
                            one_v.data(), bytes / 2, other, kQ / 2, other_lse, kQHeads / 2),
            PFX_OK)
      << pfx_last_error();
  EXPECT_GT(other_lse[0], prefix_lse[kQHeads / 2]);
  EXPECT_EQ(pfx_session_append(session_, 0, 0, 0, 2, k, bytes, v, bytes), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_session_append(session_, 0, 0, 0, 1, nullptr, bytes, v, bytes),
            PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_session_truncate(session_, 5), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_session_fork(session_, nullptr), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_session_fork(nullptr, &fork), PFX_INVALID_ARGUMENT);
  pfx_session_free(fork);
}

TEST_P(CApi, StepsOfABatchAppend) {
  Put();
  session_ = Attach(R"({"mode": "full"})");
  pfx_session* other = Attach(R"({"k": 20, "estimator": "none"})");
  const size_t row = kQHeads / 2 * kDim, bytes = row * sizeof(float);
  float y[2][kQ], lse[2][kQHeads], alone[kQ], alone_lse[kQHeads];
  pfx_step_request requests[2] = {};
  for (int i = 0; i < 2; ++i) {
    pfx_step_request& r = requests[i];
    r.session = i == 0 ? session_ : other;
    r.q = q_.data(), r.q_count = kQ;
    r.y = y[i], r.y_count = kQ;
    r.lse = lse[i], r.lse_count = kQHeads;
    r.k = &k_[0], r.k_bytes = bytes;
    r.v = &v_[row], r.v_bytes = bytes;
  }
  for (int token = 0; token < 2; ++token) {
    ASSERT_EQ(pfx_step_batch(client_, requests, 2, sizeof(pfx_step_request)), PFX_OK)
        << pfx_last_error();
  }
  pfx_session* again = Attach(R"({"mode": "full"})");
  for (int token = 0; token < 2; ++token) {
    ASSERT_EQ(pfx_step_append(again, 0, 0, 0, q_.data(), kQ, &k_[0], bytes, &v_[row], bytes, alone,
                              kQ, alone_lse, kQHeads),
              PFX_OK);
  }
  for (size_t i = 0; i < kQ; ++i) EXPECT_NEAR(y[0][i], alone[i], 1e-6);
  requests[1].v = nullptr;
  EXPECT_EQ(pfx_step_batch(client_, requests, 2, sizeof(pfx_step_request)), PFX_INVALID_ARGUMENT);
  requests[1].v = &v_[row], requests[1].k_bytes = bytes - 4;
  EXPECT_EQ(pfx_step_batch(client_, requests, 2, sizeof(pfx_step_request)), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(requests[0].code, PFX_OK);
  EXPECT_EQ(pfx_session_truncate(session_, 3), PFX_OK);
  EXPECT_EQ(pfx_session_truncate(other, 3), PFX_INVALID_ARGUMENT);  // it has two
  pfx_session_free(again);
  pfx_session_free(other);
}

// The rows of the prompt's first tokens, which lie in both layers, follow it once more.
// The prompt's rows are appended five times over: once they have moved, steps answer as before.
TEST_P(CApi, SessionsMoveOwnTokens) {
  Put();
  pfx_attach_options attach = PFX_ATTACH_OPTIONS_INIT;
  attach.model = "m", attach.tokens = tokens_.data(), attach.n_tokens = kTokens;
  attach.policy_json = R"({"mode": "full"})";
  attach.own_memory_tokens = 100;
  EXPECT_EQ(pfx_attach(client_, &attach, &session_), PFX_INVALID_ARGUMENT);
  pfx_session* whole = Attach(R"({"mode": "full"})");
  attach.own_memory_tokens = 256;
  ASSERT_EQ(pfx_attach(client_, &attach, &session_), PFX_OK) << pfx_last_error();
  const size_t row = kKvHeads * kDim, bytes = row * sizeof(float);
  const auto moved = [&] {
    char* json = nullptr;
    EXPECT_EQ(pfx_session_report(session_, &json), PFX_OK) << pfx_last_error();
    const bool any = std::string(json).find("\"own_moved\":0") == std::string::npos;
    pfx_free(json);
    return any;
  };
  for (int i = 0; i < 5; ++i) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (pfx_session* s : {session_, whole}) {
        ASSERT_EQ(pfx_session_append(s, layer, 0, 0, kTokens, Row(k_, layer, 0), kTokens * bytes,
                                     Row(v_, layer, 0), kTokens * bytes),
                  PFX_OK)
            << pfx_last_error();
      }
    }
  }
  for (int i = 0; i < 10000 && !moved(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(moved());
  float y[2][kQ], lse[2][kQHeads];
  for (int s = 0; s < 2; ++s) {
    ASSERT_EQ(pfx_step_append(s == 0 ? session_ : whole, 1, 0, 0, q_.data(), kQ, Row(k_, 1, 3),
                              bytes, Row(v_, 1, 3), bytes, y[s], kQ, lse[s], kQHeads),
              PFX_OK)
        << pfx_last_error();
  }
  for (size_t i = 0; i < kQ; ++i) EXPECT_NEAR(y[0][i], y[1][i], 1e-5);
  for (size_t i = 0; i < kQHeads; ++i) EXPECT_NEAR(lse[0][i], lse[1][i], 1e-5);
  EXPECT_EQ(pfx_step(session_, 0, q_.data(), kQ, y[0], kQ, lse[0], kQHeads),
            PFX_FAILED_PRECONDITION);
  ASSERT_EQ(pfx_session_truncate(session_, 1), PFX_OK) << pfx_last_error();
  pfx_session_free(whole);
}

TEST_P(CApi, SessionsPersistOwnTokens) {
  Put();
  session_ = Attach(R"({"mode": "full"})");
  const size_t row = kQHeads / 2 * kDim, bytes = row * sizeof(float);  // 2 KV heads
  pfx_session_shape shape = PFX_SESSION_SHAPE_INIT;
  ASSERT_EQ(pfx_session_get_shape(session_, &shape), PFX_OK);
  const uint32_t prompt = shape.n_tokens;
  for (uint32_t layer = 0; layer < shape.n_layers; ++layer) {
    ASSERT_EQ(pfx_session_append(session_, layer, 0, 0, 5, &k_[0], 5 * bytes, &v_[0], 5 * bytes),
              PFX_OK)
        << pfx_last_error();
  }
  const uint32_t ids[] = {90001, 90002, 90003, 90004, 90005, 90006};
  pfx_persist_options options = PFX_PERSIST_OPTIONS_INIT;
  options.tokens = ids;
  options.n_tokens = 6;
  EXPECT_EQ(pfx_session_persist(session_, &options, nullptr), PFX_INVALID_ARGUMENT);
  options.tokens = nullptr;
  EXPECT_EQ(pfx_session_persist(session_, &options, nullptr), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_session_persist(nullptr, &options, nullptr), PFX_INVALID_ARGUMENT);
  options.tokens = ids;
  options.n_tokens = 5;
  options.encoding = "none such";
  EXPECT_EQ(pfx_session_persist(session_, &options, nullptr), PFX_INVALID_ARGUMENT);
  options.encoding = nullptr;
  options.label = "answer";
  pfx_session* next = nullptr;
  EXPECT_EQ(pfx_session_fork_persisted(session_, 0, &next), PFX_FAILED_PRECONDITION);
  pfx_put_result result = PFX_PUT_RESULT_INIT;
  ASSERT_EQ(pfx_session_persist(session_, &options, &result), PFX_OK) << pfx_last_error();
  EXPECT_EQ(result.n_tokens, prompt + 5);
  EXPECT_EQ(result.stored_tokens, 5u);
  EXPECT_EQ(result.exact_tokens, prompt + 5);
  EXPECT_STREQ(result.lineage, "");
  EXPECT_EQ(pfx_session_fork_persisted(session_, 0, nullptr), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_session_fork_persisted(nullptr, 0, &next), PFX_INVALID_ARGUMENT);
  ASSERT_EQ(pfx_session_fork_persisted(session_, 2, &next), PFX_OK) << pfx_last_error();
  ASSERT_EQ(pfx_session_get_shape(next, &shape), PFX_OK);
  EXPECT_EQ(shape.n_tokens, prompt + 3);
  float y[kQ], lse[kQHeads], other[kQ], other_lse[kQHeads];
  const float* k = &k_[0];
  const float* v = &v_[0];
  for (auto [session, to, to_lse] :
       {std::tuple{session_, y, lse}, std::tuple{next, other, other_lse}}) {
    ASSERT_EQ(pfx_step_append(session, 1, 0, 0, q_.data(), kQ, k + 7 * row, bytes, v + 7 * row,
                              bytes, to, kQ, to_lse, kQHeads),
              PFX_OK)
        << pfx_last_error();
  }
  for (size_t i = 0; i < kQ; ++i) EXPECT_NEAR(other[i], y[i], 1e-5);
  for (size_t h = 0; h < kQHeads; ++h) EXPECT_NEAR(other_lse[h], lse[h], 1e-5);
  options.derived = 1;
  const uint32_t others[] = {90011, 90012, 90013, 90014, 90015};
  options.tokens = others;
  ASSERT_EQ(pfx_session_persist(session_, &options, &result), PFX_OK) << pfx_last_error();
  EXPECT_EQ(result.exact_tokens, prompt);
  EXPECT_EQ(std::string(result.lineage).size(), 32u);
  pfx_session_free(next);
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
}  // namespace prefixd::testing
