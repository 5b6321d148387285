// A store behind the C interface, embedded or in the real daemon. Its tests link libprefixd.so
// alone, so that a symbol that is not exported cannot be used in them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "prefixd/prefixd.h"
#include "tests/daemon/daemon_process.h"
#include "tests/support/seed.h"

namespace prefixd::testing {

inline constexpr uint32_t kLayers = 2, kQHeads = 4, kKvHeads = 2, kDim = 16, kTokens = 300;
inline constexpr size_t kQ = kQHeads * kDim;
inline constexpr const char* kModel =
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

}  // namespace prefixd::testing
