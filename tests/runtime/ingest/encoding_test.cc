// Tests prompts stored as int8 in the runtime: a put reports the encoding, and everything above the
// rows works within the reported error.
#include <cmath>
#include <cstring>

#include "attention/step/budget.h"
#include "prefixd/stored_part.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class EncodingTest : public RuntimeTest {
 protected:
  Result<PutResult> PutAs(const SyntheticPrompt& prompt, std::optional<RowEncoding> encoding) {
    PutSpec spec{spec_.name, "", prompt.tokens, "test"};
    spec.encoding = encoding;
    PREFIXD_ASSIGN(auto put, store_->BeginPut(spec));
    const TokenRange missing = put->missing();
    for (uint32_t l = 0; l < prompt.geometry.n_layers; ++l) {
      PREFIXD_TRY(put->Write(l, missing.begin, missing.size(),
                             prompt.K(l, missing.begin, missing.size()),
                             prompt.V(l, missing.begin, missing.size())));
      PREFIXD_TRY(put->WriteQueries(l, missing.begin, missing.size(),
                                    prompt.Q(l, missing.begin, missing.size())));
    }
    return put->Commit();
  }

  static void ExpectNear(std::span<const float> a, std::span<const float> b, float tolerance) {
    ASSERT_EQ(a.size(), b.size());
    float difference = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      difference = std::max(difference, std::abs(a[i] - b[i]));
      size = std::max(size, std::abs(b[i]));
    }
    EXPECT_LE(difference, tolerance * size);
  }
};

TEST_F(EncodingTest, StepsAgreeWithinTheErrorOfTheRows) {
  options_.recluster_min_tokens = 100;
  options_.recluster_chunk_tokens = 200;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 700, 5);
  const auto exact = PutAs(prompt, std::nullopt);
  ASSERT_OK(exact);
  EXPECT_EQ(exact->encoding, RowEncoding::kAsGiven);
  EXPECT_EQ(exact->encoding_error, EncodingError{});
  ASSERT_OK(store_->WaitReady(exact->prefix, nullptr));
  StepPolicy full, few;
  full.mode = StepMode::kFull;
  few.estimator = EstimatorKind::kMoment;
  few.k = 40;
  std::vector<Output> want;
  for (const StepPolicy& policy : {full, few}) {
    const auto session = Attach(prompt, policy);
    ASSERT_TRUE(session);
    want.push_back(Step(*session, 1, prompt.Q(1, 699, 1)));
  }
  ASSERT_OK(store_->Remove(exact->prefix));

  const auto put = PutAs(prompt, RowEncoding::kInt8);
  ASSERT_OK(put);
  EXPECT_EQ(put->encoding, RowEncoding::kInt8);
  EXPECT_LT(put->bytes, exact->bytes * 8 / 10);  // rows of 16 elements: scales weigh much
  for (const float rms : {put->encoding_error.key_rms, put->encoding_error.value_rms}) {
    EXPECT_GT(rms, 1e-3f);
    EXPECT_LT(rms, 2e-2f);
  }
  EXPECT_GE(put->encoding_error.key_max, put->encoding_error.key_rms);
  ASSERT_OK(store_->WaitReady(put->prefix, nullptr));
  for (const bool reclustered : {false, true}) {
    if (reclustered) ASSERT_OK(store_->WaitRewritten(nullptr));  // may be reclustered before, too
    const auto detail = store_->Prefix(put->prefix);
    ASSERT_OK(detail);
    EXPECT_EQ(detail->summary.encoding, RowEncoding::kInt8);
    EXPECT_EQ(detail->summary.encoding_error, put->encoding_error);
    for (size_t i = 0; i < 2; ++i) {
      const auto session = Attach(prompt, i == 0 ? full : few);
      ASSERT_TRUE(session);
      const Output got = Step(*session, 1, prompt.Q(1, 699, 1));
      // The second policy selects by scores that have moved a little, so it may take other rows
      // near the cut.
      ExpectNear(got.y, want[i].y, i == 0 ? 0.03f : 0.1f);
      ExpectNear(got.lse, want[i].lse, 0.02f);
      ASSERT_EQ(session->info().parts.size(), 1u);
      EXPECT_EQ(session->info().parts[0].encoding, RowEncoding::kInt8);
      EXPECT_TRUE(!reclustered || session->info().parts[0].chunk_tokens == 200);
      // Bytes are counted as stored: 16 bytes and a scale for a key, as much for a value, of two KV
      // heads.
      const uint64_t rows = i == 0 ? 700 : 60;
      EXPECT_EQ(got.info.ledger.logical_bytes, rows * 40 * 2);
      const std::vector<uint32_t> ids = {1, 5};
      EXPECT_CODE(session->ReadInPlace(0, 0, ids), Code::kFailedPrecondition);
    }
  }
}

TEST_F(EncodingTest, TheStoresOwnChoiceHoldsForPutsThatNameNone) {
  options_.encoding = "int8";
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 200, 6);
  const auto put = PutAs(prompt, std::nullopt);
  ASSERT_OK(put);
  EXPECT_EQ(put->encoding, RowEncoding::kInt8);
  // A put keeps the stored rows as they are, and reports their encoding.
  const auto again = PutAs(prompt, RowEncoding::kAsGiven);
  ASSERT_OK(again);
  EXPECT_EQ(again->stored_tokens, 0u);
  EXPECT_EQ(again->encoding, RowEncoding::kInt8);
  EXPECT_EQ(again->encoding_error, put->encoding_error);
  const auto longer = MakePrompt(spec_.geometry, 300, 6);
  ASSERT_TRUE(std::equal(prompt.tokens.begin(), prompt.tokens.end(), longer.tokens.begin()));
  ASSERT_OK(PutAs(longer, RowEncoding::kAsGiven));
  const auto session = Attach(longer, {.k = 10});
  ASSERT_TRUE(session);
  ASSERT_EQ(session->info().parts.size(), 2u);
  EXPECT_EQ(session->info().parts[1], (StoredPart{{200, 300}, RowEncoding::kAsGiven, 0}));
  std::vector<std::byte> row(spec_.geometry.row(0).bytes());
  const std::vector<uint32_t> last = {299};
  ASSERT_OK(session->ReadRows(0, 1, last, row));
  EXPECT_EQ(session->report()->total.logical_bytes % row.size(), 0u);
  options_.encoding = "int3";
  store_.reset();
  EXPECT_CODE(LocalStore::Open(options_), Code::kInvalidArgument);
}

TEST_F(EncodingTest, NotFiniteRowsAreRefusedByName) {
  Open();
  auto prompt = MakePrompt(spec_.geometry, 64, 7);
  const uint16_t nan = 0x7fc0;
  std::memcpy(prompt.k[1].data() + prompt.k[1].size() / 2, &nan, sizeof(nan));
  const auto put = PutAs(prompt, RowEncoding::kInt8);
  EXPECT_CODE(put, Code::kInvalidArgument);
  EXPECT_NE(put.error().message.find("key of layer 1, token 32"), std::string::npos)
      << put.error().message;
}

// A run is written in pieces internally; no piece of a refused run may be written.
TEST_F(EncodingTest, ARefusedRunIsNotWrittenInPart) {
  Open();
  const uint32_t n = 6000;
  const auto prompt = MakePrompt(spec_.geometry, n, 8);
  for (const RowEncoding encoding : {RowEncoding::kAsGiven, RowEncoding::kInt8}) {
    PutSpec spec{spec_.name, RowEncodingName(encoding) == "int8" ? "a" : "b", prompt.tokens, ""};
    spec.encoding = encoding;
    auto put = store_->BeginPut(spec);
    ASSERT_OK(put);
    const auto write = [&](uint32_t layer, uint32_t first, uint32_t count) {
      return (*put)->Write(layer, first, count, prompt.K(layer, first, count),
                           prompt.V(layer, first, count));
    };
    EXPECT_EQ((*put)->progress().done, 0u);
    EXPECT_EQ((*put)->progress().total, 2u * n);
    ASSERT_OK(write(0, 5000, 100));
    EXPECT_CODE(write(0, 0, n), Code::kInvalidArgument);  // rows from 5000 on were written
    EXPECT_EQ((*put)->progress().done, 100u);
    EXPECT_CODE((*put)->Commit(), Code::kFailedPrecondition);
    ASSERT_OK(write(0, 0, 5000));
    ASSERT_OK(write(0, 5100, n - 5100));
    ASSERT_OK(write(1, 0, n));
    EXPECT_EQ((*put)->progress().done, 2u * n);
    ASSERT_OK((*put)->Commit());
  }
  EXPECT_EQ(store_->Stats().value().puts, 2u);
}

TEST_F(EncodingTest, ARefusedPutCanStillBeAborted) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 300, 9);
  auto put = store_->BeginPut({spec_.name, "", prompt.tokens, ""});
  ASSERT_OK(put);
  ASSERT_OK((*put)->Write(0, 0, 100, prompt.K(0, 0, 100), prompt.V(0, 0, 100)));
  EXPECT_CODE((*put)->Write(0, 50, 100, prompt.K(0, 50, 100), prompt.V(0, 50, 100)),
              Code::kInvalidArgument);
  (*put)->Abort();
  EXPECT_CODE((*put)->Write(1, 0, 100, prompt.K(1, 0, 100), prompt.V(1, 0, 100)),
              Code::kFailedPrecondition);
  EXPECT_EQ(store_->Stats().value().puts_aborted, 1u);
  const auto segments = options_.dir / "segments";
  EXPECT_TRUE(std::filesystem::is_empty(segments));
  EXPECT_EQ(store_->Stats().value().bytes_on_disk, 0u);
}

// A budget is a share of the stored bytes: the same summary costs more tokens beside smaller rows.
TEST_F(EncodingTest, ASummaryCostsMoreTokensBesideSmallerRows) {
  Open();
  const RowShape row = spec_.geometry.row(0);
  const double moment = MomentTokens(row, 0, 4);
  StepPolicy policy;
  policy.estimator = EstimatorKind::kMoment;
  policy.budget = 0.1;
  std::vector<uint64_t> summary_bytes;
  uint64_t seed = 11;
  for (const auto encoding : {RowEncoding::kAsGiven, RowEncoding::kInt8}) {
    const auto prompt = MakePrompt(spec_.geometry, 1000, seed++);
    const auto put = PutAs(prompt, encoding);
    ASSERT_OK(put);
    ASSERT_OK(store_->WaitReady(put->prefix, nullptr));
    const auto session = Attach(prompt, policy);
    ASSERT_TRUE(session);
    const double row_bytes = encoding == RowEncoding::kInt8 ? 40 : 64;
    const double tokens = moment * double(row.bytes()) / row_bytes;
    const Output out = Step(*session, 0, prompt.Q(0, 999, 1));
    EXPECT_EQ(out.info.k, 100 - 20 - static_cast<uint32_t>(std::ceil(tokens)));
    const auto report = session->Detach();
    ASSERT_OK(report);
    EXPECT_NEAR(report->per_head[0].summary_tokens, tokens, 1e-9);
    summary_bytes.push_back(report->total.summary_bytes[size_t(EstimatorKind::kMoment)]);
  }
  EXPECT_EQ(summary_bytes[0], summary_bytes[1]);
}

}  // namespace
}  // namespace prefixd::testing
