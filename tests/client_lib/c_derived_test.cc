// Tests derived rows through the C interface; client_derived_test.cc shows that a connection makes
// no difference.
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "prefixd/prefixd.h"
#include "tests/support/files.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using Json = nlohmann::json;

constexpr uint32_t kTokens = 60, kRow = 16;  // one layer, one KV head
constexpr const char* kModel =
    R"({"name": "m", "identity": [["weights", "random"]], "geometry": {"n_layers": 1,
        "n_q_heads": 1, "n_kv_heads": 1, "key_dim": 16, "value_dim": 16, "dtype": "f32",
        "layers": [{"scale": 0.25}]}})";

class CDerived : public ::testing::Test {
 protected:
  void SetUp() override {
    pfx_open_options options = PFX_OPEN_OPTIONS_INIT;
    const std::string dir = dir_.path() / "store";
    options.dir = dir.c_str();
    options.options_json = R"({"host_tier_bytes": 16777216, "min_free_bytes": 0, "threads": 1})";
    ASSERT_EQ(pfx_open(&options, &client_), PFX_OK) << pfx_last_error();
    ASSERT_EQ(pfx_register_model(client_, kModel), PFX_OK) << pfx_last_error();
    std::mt19937_64 rng(testing::Seed("CDerived"));
    for (uint32_t& t : tokens_) t = uint32_t(rng() % 50000);
    for (float& x : rows_) x = std::normal_distribution<float>()(rng);
  }
  void TearDown() override {
    pfx_session_free(session_);
    pfx_store_close(client_);
  }

  pfx_put_result Put(int derived, const char* lineage) {
    pfx_put_options options = PFX_PUT_OPTIONS_INIT;
    options.model = "m", options.tokens = tokens_.data(), options.n_tokens = kTokens;
    options.derived = derived, options.lineage = lineage;
    pfx_put* put = nullptr;
    EXPECT_EQ(pfx_begin_put(client_, &options, &put), PFX_OK) << pfx_last_error();
    const size_t bytes = rows_.size() * sizeof(float);
    EXPECT_EQ(pfx_put_write(put, 0, 0, kTokens, rows_.data(), bytes, rows_.data(), bytes), PFX_OK);
    pfx_put_result done = PFX_PUT_RESULT_INIT;
    EXPECT_EQ(pfx_put_commit(put, &done), PFX_OK) << pfx_last_error();
    pfx_put_free(put);
    return done;
  }

  testing::TempDir dir_;
  pfx_store* client_ = nullptr;
  pfx_session* session_ = nullptr;
  std::vector<uint32_t> tokens_ = std::vector<uint32_t>(kTokens);
  std::vector<float> rows_ = std::vector<float>(kTokens * kRow);
};

TEST_F(CDerived, RowsServeWhoAsks) {
  const pfx_put_result done = Put(1, nullptr);
  EXPECT_EQ(done.exact_tokens, 0u);
  ASSERT_EQ(std::string(done.lineage).size(), 32u);

  pfx_match_options match = PFX_MATCH_OPTIONS_INIT;
  match.model = "m", match.tokens = tokens_.data(), match.n_tokens = kTokens;
  pfx_match_result found = PFX_MATCH_RESULT_INIT;
  ASSERT_EQ(pfx_match(client_, &match, &found), PFX_OK);
  EXPECT_EQ(found.n_tokens, 0u);
  match.lineage = done.lineage;
  ASSERT_EQ(pfx_match(client_, &match, &found), PFX_OK);
  EXPECT_EQ(found.n_tokens, kTokens);
  EXPECT_EQ(found.exact_tokens, 0u);
  match.lineage = "no lineage";
  EXPECT_EQ(pfx_match(client_, &match, &found), PFX_INVALID_ARGUMENT);

  pfx_attach_options attach = PFX_ATTACH_OPTIONS_INIT;
  attach.prefix = done.prefix, attach.policy_json = R"({"mode": "full"})";
  EXPECT_EQ(pfx_attach(client_, &attach, &session_), PFX_FAILED_PRECONDITION);
  attach.accept_approximate = 1;
  ASSERT_EQ(pfx_attach(client_, &attach, &session_), PFX_OK) << pfx_last_error();
  pfx_session_shape shape = PFX_SESSION_SHAPE_INIT;
  ASSERT_EQ(pfx_session_get_shape(session_, &shape), PFX_OK);
  EXPECT_EQ(shape.n_tokens, kTokens);
  EXPECT_EQ(shape.exact_tokens, 0u);
  char* json = nullptr;
  ASSERT_EQ(pfx_verify_tenant(client_, nullptr, nullptr, nullptr, &json), PFX_OK);
  EXPECT_EQ(Json::parse(json)["covered"], Json::array({done.prefix}));
  pfx_free(json);
}

TEST_F(CDerived, AnExactPutIsStoredBesideThem) {
  const pfx_put_result derived = Put(1, nullptr), exact = Put(0, nullptr);
  EXPECT_EQ(exact.stored_tokens, kTokens);
  EXPECT_EQ(exact.exact_tokens, kTokens);
  EXPECT_STREQ(exact.lineage, "");
  EXPECT_STRNE(exact.prefix, derived.prefix);
  EXPECT_EQ(Put(1, derived.lineage).stored_tokens, 0u);
}

}  // namespace
}  // namespace prefixd
