// One story told by every kind of client: embedded, over a Unix socket with and without shared
// memory, over TCP. What steps return must agree with an embedded store that holds the same prompt.
#include <cmath>
#include <cstring>
#include <memory>

#include "client_lib/remote_client.h"
#include "runtime/restore.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::DaemonProcess;
using testing::MakePrompt;
using testing::Prompt;
using testing::TempDir;

enum class Kind { kEmbedded, kUnixShared, kUnixSmallRegion, kUnixInline, kTcp };

constexpr uint32_t kTokens = 400;
constexpr uint32_t kQHeads = 4, kDim = 16;

RuntimeOptions SmallStore(const std::filesystem::path& dir) {
  RuntimeOptions o;
  o.dir = dir;
  o.min_free_bytes = 0;
  o.host_tier_bytes = 64 << 20;
  o.threads = 2;
  return o;
}

class ClientScenario : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    prompt_ = MakePrompt(kTokens, testing::Seed("ClientScenario"));
    if (GetParam() == Kind::kEmbedded) {
      auto client = Client::OpenEmbedded(SmallStore(dir_.path() / "own"));
      ASSERT_TRUE(client.ok()) << client.error().message;
      client_ = *std::move(client);
    } else {
      std::vector<std::string> args = {"--listen", "127.0.0.1:0"};
      if (GetParam() == Kind::kUnixSmallRegion) {  // rows must be cut into several messages
        args.insert(args.end(), {"--shared-memory-mib", "1"});
      }
      daemon_ = std::make_unique<DaemonProcess>(dir_.path(), args);
      ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
      ConnectOptions options;
      options.shared_memory = GetParam() != Kind::kUnixInline;
      auto client = RemoteClient::Connect(
          GetParam() == Kind::kTcp ? daemon_->tcp_address() : daemon_->address(), options);
      ASSERT_TRUE(client.ok()) << client.error().message;
      EXPECT_EQ((*client)->shared_memory(),
                GetParam() == Kind::kUnixShared || GetParam() == Kind::kUnixSmallRegion);
      client_ = *std::move(client);
    }
    auto reference = Client::OpenEmbedded(SmallStore(dir_.path() / "reference"));
    ASSERT_TRUE(reference.ok()) << reference.error().message;
    reference_ = *std::move(reference);
    Put(*reference_);
  }

  void Put(Client& client) {
    auto result = testing::PutPrompt(client, prompt_, "scenario");
    ASSERT_TRUE(result.ok()) << result.error().message;
    EXPECT_EQ(result->n_tokens, kTokens);
    EXPECT_EQ(result->stored_tokens, kTokens);
    Status ready =
        client.WaitReady(result->prefix, [](uint64_t, uint64_t, std::string_view) { return true; });
    ASSERT_TRUE(ready.ok()) << ready.error().message;
    prefix_ = result->prefix;
  }

  // 2% of 400 tokens would not pay for the anchors: a fixed K by default.
  std::shared_ptr<Session> Attach(Client& client,
                                  StepPolicy policy = {.estimator = EstimatorKind::kMoment,
                                                       .k = 24}) {
    AttachSpec spec;
    spec.model = prompt_.model.name;
    spec.tokens = prompt_.tokens;
    spec.policy = policy;
    auto session = client.Attach(spec);
    EXPECT_TRUE(session.ok()) << (session.ok() ? "" : session.error().message);
    return session.ok() ? *session : nullptr;
  }

  std::vector<float> Queries(uint32_t n, uint64_t salt) const {
    std::mt19937_64 rng(salt);
    std::normal_distribution<float> normal;
    std::vector<float> q(size_t{n} * kQHeads * kDim);
    for (float& x : q) x = normal(rng);
    return q;
  }

  static void ExpectNear(std::span<const float> a, std::span<const float> b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_TRUE(std::isfinite(a[i]));
      ASSERT_NEAR(a[i], b[i], 1e-4) << i;
    }
  }

  TempDir dir_;
  Prompt prompt_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_, reference_;
  std::string prefix_;
};

TEST_P(ClientScenario, RowsAreStoredAsThePutAsks) {
  ASSERT_TRUE(client_->RegisterModel(prompt_.model).ok());
  PutSpec spec{prompt_.model.name, "", prompt_.tokens, ""};
  spec.encoding = storage::RowEncoding::kInt8;
  auto put = client_->BeginPut(spec);
  ASSERT_TRUE(put.ok() && testing::WriteRows(**put, prompt_).ok());
  EXPECT_EQ((*put)->progress().done, 2u * kTokens);
  EXPECT_EQ((*put)->progress().total, 2u * kTokens);
  const auto done = (*put)->Commit();
  ASSERT_TRUE(done.ok());
  EXPECT_EQ(done->encoding, storage::RowEncoding::kInt8);
  EXPECT_GT(done->encoding_error.key_rms, 0.0f);
  const auto detail = client_->Prefix(done->prefix);
  ASSERT_TRUE(detail.ok());
  EXPECT_EQ(detail->summary.encoding, storage::RowEncoding::kInt8);
  EXPECT_EQ(detail->summary.encoding_error, done->encoding_error);
  auto session = Attach(*client_);
  ASSERT_NE(session, nullptr);
  ASSERT_EQ(session->info().parts.size(), 1u);
  EXPECT_EQ(session->info().parts[0].encoding, storage::RowEncoding::kInt8);
  EXPECT_EQ(session->info().parts[0].tokens, (TokenRange{0, kTokens}));
}

TEST_P(ClientScenario, RestoresWhatWasPut) {
  Put(*client_);
  auto session = Attach(*client_);
  ASSERT_NE(session, nullptr);
  for (const KvOrder order : {KvOrder::kTokenMajor, KvOrder::kHeadMajor}) {
    RestoreOptions options;
    options.order = order;
    options.buffer_bytes = 20'000;  // several runs a layer
    auto restore = Restore::Begin(session, options);
    ASSERT_TRUE(restore.ok());
    uint32_t token = 0, layer = 0;
    for (auto run = (*restore)->Next(); true; run = (*restore)->Next()) {
      ASSERT_TRUE(run.ok()) << run.error().message;
      if (!run->has_value()) break;
      const auto [at, tokens, k, v] = **run;
      ASSERT_EQ(at, layer);
      ASSERT_EQ(tokens.begin, token);
      const size_t n = tokens.size(), row = kDim * 2;
      for (size_t t = 0; t < n; ++t) {
        for (size_t h = 0; h < 2; ++h) {
          const size_t from = (order == KvOrder::kTokenMajor ? t * 2 + h : h * n + t) * row;
          const size_t to = ((token + t) * 2 + h) * row;
          ASSERT_EQ(std::memcmp(&k[from], &prompt_.k[layer][to], row), 0);
          ASSERT_EQ(std::memcmp(&v[from], &prompt_.v[layer][to], row), 0);
        }
      }
      token = tokens.end;
      if (token == kTokens) token = 0, ++layer;
    }
    EXPECT_EQ(layer, 2u);
  }
  // The session goes on; and when it has gone, a restore says so.
  std::vector<std::byte> k(kTokens * 2 * kDim * 2), v(k.size());
  ASSERT_TRUE(session->ReadLayer({1, {0, kTokens}, 0, 0, KvOrder::kTokenMajor}, k, v).ok());
  EXPECT_EQ(k, prompt_.k[1]);
  EXPECT_EQ(v, prompt_.v[1]);
  EXPECT_EQ(session->ReadLayer({1, {0, kTokens}, 1, 2, {}}, k, v).error().code,
            Code::kInvalidArgument);
  ASSERT_TRUE(session->Detach().ok());
  auto late = Restore::Begin(session, {});
  ASSERT_TRUE(late.ok());
  EXPECT_EQ((*late)->Next().error().code, Code::kFailedPrecondition);
}

TEST_P(ClientScenario, RetentionTravelsWithThePutAndAfterIt) {
  ASSERT_TRUE(client_->RegisterModel(prompt_.model).ok());
  auto put = client_->BeginPut({prompt_.model.name, "", prompt_.tokens, "", true, 1000});
  ASSERT_TRUE(put.ok() && testing::WriteRows(**put, prompt_).ok());
  const auto done = (*put)->Commit();
  ASSERT_TRUE(done.ok());
  auto detail = client_->Prefix(done->prefix);
  ASSERT_TRUE(detail.ok());
  EXPECT_TRUE(detail->summary.pinned);
  EXPECT_GT(detail->summary.expires_unix_ms, detail->summary.created_unix_ms);
  ASSERT_TRUE(client_->SetRetention(done->prefix, {false, {}}).ok());
  ASSERT_TRUE(client_->SetRetention(done->prefix, {{}, 0}).ok());
  detail = client_->Prefix(done->prefix);
  ASSERT_TRUE(detail.ok());
  EXPECT_FALSE(detail->summary.pinned);
  EXPECT_EQ(detail->summary.expires_unix_ms, 0);
  EXPECT_EQ(client_->SetRetention(std::string(32, '0'), {true, {}}).error().code, Code::kNotFound);
  const auto stats = client_->Stats();
  ASSERT_TRUE(stats.ok());
  ASSERT_EQ(stats->tenants.size(), 1u);
  EXPECT_GT(stats->tenants[0].bytes, 0u);
}

TEST_P(ClientScenario, PutMatchAttachStepDetach) {
  Put(*client_);
  auto models = client_->Models();
  ASSERT_TRUE(models.ok());
  ASSERT_EQ(models->size(), 1u);
  EXPECT_EQ((*models)[0].geometry, prompt_.model.geometry);

  std::vector<uint32_t> longer = prompt_.tokens;
  longer.insert(longer.end(), {1, 2, 3});
  auto match = client_->Match(prompt_.model.name, "", longer);
  ASSERT_TRUE(match.ok()) << match.error().message;
  EXPECT_EQ(match->n_tokens, kTokens);
  EXPECT_EQ(match->prefix, prefix_);

  for (StepPolicy policy :
       {StepPolicy{.mode = StepMode::kFull}, StepPolicy{.mode = StepMode::kAnchors},
        StepPolicy{.estimator = EstimatorKind::kMoment, .k = 24},
        StepPolicy{.estimator = EstimatorKind::kNone, .k = 24}}) {
    auto session = Attach(*client_, policy);
    auto reference = Attach(*reference_, policy);
    ASSERT_TRUE(session && reference);
    EXPECT_EQ(session->info().n_tokens, kTokens);
    EXPECT_EQ(session->policy(), policy);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const auto q = Queries(1, layer + 10);
      std::vector<float> y(kQHeads * kDim), lse(kQHeads), y2(y), lse2(lse);
      StepInfo info, info2;
      Status s = session->Step(layer, q, y, lse, &info);
      ASSERT_TRUE(s.ok()) << s.error().message;
      ASSERT_TRUE(reference->Step(layer, q, y2, lse2, &info2).ok());
      ExpectNear(y, y2);
      ExpectNear(lse, lse2);
      EXPECT_EQ(info.k, info2.k);
      EXPECT_EQ(info.ledger.retrieved_tokens, info2.ledger.retrieved_tokens);
      EXPECT_EQ(info.ledger.anchor_tokens, info2.ledger.anchor_tokens);
    }
    EXPECT_EQ(session->report().total.steps, reference->report().total.steps);
    auto report = session->Detach();
    ASSERT_TRUE(report.ok()) << report.error().message;
    EXPECT_EQ(report->total.steps, reference->report().total.steps);
    EXPECT_EQ(report->per_head.size(), 4u);
    EXPECT_FALSE(session->Detach().ok());
    std::vector<float> y(kQHeads * kDim), lse(kQHeads);
    Status after = session->Step(0, Queries(1, 1), y, lse, nullptr);
    ASSERT_FALSE(after.ok());
    EXPECT_EQ(after.error().code, Code::kFailedPrecondition);
  }
}

TEST_P(ClientScenario, BatchesOfStepsKeepTheirOwnOutcomes) {
  Put(*client_);
  auto a = Attach(*client_, {.mode = StepMode::kFull});
  auto b = Attach(*client_, {.estimator = EstimatorKind::kMoment, .k = 16});
  auto reference = Attach(*reference_, {.mode = StepMode::kFull});
  ASSERT_TRUE(a && b && reference);
  const auto q0 = Queries(1, 3), q1 = Queries(1, 4);
  std::vector<std::vector<float>> y(4, std::vector<float>(kQHeads * kDim));
  std::vector<std::vector<float>> lse(4, std::vector<float>(kQHeads));
  std::vector<StepRequest> batch = {{a.get(), 0, q0, y[0], lse[0], nullptr, {}},
                                    {a.get(), 99, q0, y[1], lse[1], nullptr, {}},
                                    {b.get(), 1, q1, y[2], lse[2], nullptr, {}},
                                    {a.get(), 1, q1, y[3], lse[3], nullptr, {}}};
  client_->StepBatch(batch);
  EXPECT_TRUE(batch[0].status.ok());
  EXPECT_FALSE(batch[1].status.ok());
  EXPECT_TRUE(batch[2].status.ok());
  EXPECT_TRUE(batch[3].status.ok());
  std::vector<float> y2(kQHeads * kDim), lse2(kQHeads);
  ASSERT_TRUE(reference->Step(0, q0, y2, lse2, nullptr).ok());
  ExpectNear(y[0], y2);
  ASSERT_TRUE(reference->Step(1, q1, y2, lse2, nullptr).ok());
  ExpectNear(y[3], y2);
}

TEST_P(ClientScenario, ExactAttentionRowsSelectionAndSummaries) {
  Put(*client_);
  auto session = Attach(*client_), reference = Attach(*reference_);
  ASSERT_TRUE(session && reference);
  constexpr uint32_t kN = 5;
  const auto q = Queries(kN, 7);
  std::vector<float> y(kN * kQHeads * kDim), lse(kN * kQHeads), y2(y), lse2(lse);
  ASSERT_TRUE(session->AttendExact(1, kN, q, y, lse).ok());
  ASSERT_TRUE(reference->AttendExact(1, kN, q, y2, lse2).ok());
  ExpectNear(y, y2);
  ExpectNear(lse, lse2);

  // Rows are the bytes that were put: key, then value, of each token.
  const size_t row = prompt_.model.geometry.row().bytes(), half = row / 2;
  const auto expected = [&](uint32_t layer, uint32_t head, uint32_t token) {
    const size_t at = (size_t{token} * 2 + head) * half;
    std::vector<std::byte> bytes(prompt_.k[layer].begin() + at,
                                 prompt_.k[layer].begin() + at + half);
    bytes.insert(bytes.end(), prompt_.v[layer].begin() + at, prompt_.v[layer].begin() + at + half);
    return bytes;
  };
  const std::vector<uint32_t> ids = {0, 17, 200, kTokens - 1};
  std::vector<std::byte> rows(ids.size() * row), range(kTokens * row);
  ASSERT_TRUE(session->ReadRows(1, 0, ids, rows).ok());
  ASSERT_TRUE(session->ReadRange(0, 1, {0, kTokens}, range).ok());
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto want = expected(1, 0, ids[i]);
    EXPECT_TRUE(std::equal(want.begin(), want.end(), rows.begin() + i * row)) << ids[i];
  }
  for (uint32_t t = 0; t < kTokens; ++t) {
    const auto want = expected(0, 1, t);
    ASSERT_TRUE(std::equal(want.begin(), want.end(), range.begin() + t * row)) << t;
  }
  const std::vector<uint32_t> beyond = {kTokens};
  rows.resize(row);
  EXPECT_FALSE(session->ReadRows(0, 0, beyond, rows).ok());
  EXPECT_FALSE(session->ReadRows(0, 0, ids, rows).ok());  // output too small

  const auto group = std::span(q).first(2 * kDim);
  auto mine = session->Select(0, 1, group, 12), theirs = reference->Select(0, 1, group, 12);
  ASSERT_TRUE(mine.ok() && theirs.ok());
  EXPECT_EQ(mine->ids, theirs->ids);
  EXPECT_EQ(mine->ids.size(), 12u);
  ASSERT_EQ(mine->cuts.size(), 2u);
  EXPECT_EQ(mine->cuts[0].kind, theirs->cuts[0].kind);

  auto moment = session->MomentBytes(1, 1), moment2 = reference->MomentBytes(1, 1);
  ASSERT_TRUE(moment.ok() && moment2.ok());
  EXPECT_EQ(*moment, *moment2);
  auto phi = session->PhiCacheBytes(0, 0);
  ASSERT_FALSE(phi.ok());  // no feature maps were registered
  EXPECT_EQ(phi.error().code, Code::kNotFound);
}

TEST_P(ClientScenario, RowsAreReadInPlace) {
  Put(*client_);
  auto session = Attach(*client_);
  ASSERT_TRUE(session);
  std::vector<uint32_t> ids;
  for (uint32_t t = 0; t < kTokens; t += 1 + t % 5) ids.push_back(t);
  const RowShape row = prompt_.model.geometry.row();
  std::vector<std::byte> copied(ids.size() * row.bytes());
  ASSERT_TRUE(session->ReadRows(1, 1, ids, copied).ok());
  auto rows = session->BorrowRows(1, 1, ids);
  if (GetParam() == Kind::kTcp) {
    ASSERT_FALSE(rows.ok());
    EXPECT_EQ(rows.error().code, Code::kFailedPrecondition);
    EXPECT_NE(rows.error().message.find("use ReadRows"), std::string::npos);
    return;
  }
  ASSERT_TRUE(rows.ok()) << rows.error().message;
  const auto expect_rows = [&](const BorrowedRows& borrowed) {
    ASSERT_EQ(borrowed.rows.size(), ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      const std::byte* want = copied.data() + i * row.bytes();
      EXPECT_TRUE(std::equal(want, want + row.key_bytes(), borrowed.rows[i].key)) << ids[i];
      EXPECT_TRUE(std::equal(want + row.key_bytes(), want + row.bytes(), borrowed.rows[i].value));
      EXPECT_GE(borrowed.rows[i].key, borrowed.region.bytes.data());
      EXPECT_LT(borrowed.rows[i].value,
                borrowed.region.bytes.data() + borrowed.region.bytes.size());
    }
  };
  expect_rows(*rows);
  const auto pinned = [&] { return client_->Stats()->host_tier_pinned; };
  const uint64_t once = pinned();
  EXPECT_GT(once, 0u);
  auto more = session->BorrowRows(1, 1, ids);
  ASSERT_TRUE(more.ok());
  EXPECT_EQ(more->region.bytes.data(), rows->region.bytes.data());  // mapped once
  EXPECT_EQ(pinned(), 2 * once);
  *more = {};
  EXPECT_EQ(pinned(), once);
  const std::vector<uint32_t> beyond = {0, kTokens};
  EXPECT_FALSE(session->BorrowRows(1, 1, beyond).ok());
  EXPECT_FALSE(session->BorrowRows(2, 0, ids).ok());
  EXPECT_EQ(pinned(), once);
  auto none = session->BorrowRows(0, 0, {});
  EXPECT_TRUE(none.ok() && none->rows.empty());
  ASSERT_TRUE(session->Detach().ok());
  EXPECT_FALSE(session->BorrowRows(1, 1, ids).ok());
  expect_rows(*rows);  // also after the session
  *rows = {};
  EXPECT_EQ(pinned(), 0u);
}

TEST_P(ClientScenario, RefusalsAreTheSameEverywhere) {
  Put(*client_);
  auto session = Attach(*client_);
  ASSERT_TRUE(session);
  std::vector<float> y(kQHeads * kDim), lse(kQHeads);
  auto q = Queries(1, 1);
  q[3] = std::nanf("");
  Status nan = session->Step(0, q, y, lse, nullptr);
  ASSERT_FALSE(nan.ok());
  EXPECT_EQ(nan.error().code, Code::kInvalidArgument);
  EXPECT_FALSE(session->Step(0, std::span(q).first(8), y, lse, nullptr).ok());

  Status infeasible = session->SetPolicy({.budget = 1e-4});
  ASSERT_FALSE(infeasible.ok());
  EXPECT_EQ(infeasible.error().code, Code::kInfeasible);

  auto unknown = client_->Attach({.model = "nobody", .tokens = prompt_.tokens});
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().code, Code::kNotFound);
  EXPECT_EQ(client_->Prefix(std::string(32, '0')).error().code, Code::kNotFound);

  auto put = client_->BeginPut({prompt_.model.name, "", {9, 8, 7, 6}, ""});
  ASSERT_TRUE(put.ok()) << put.error().message;
  EXPECT_FALSE((*put)->Write(0, 0, 4, {}, {}).ok());
  EXPECT_FALSE((*put)->Commit().ok());  // rows are missing
  auto match = client_->Match(prompt_.model.name, "", std::vector<uint32_t>{9, 8, 7, 6});
  ASSERT_TRUE(match.ok());
  EXPECT_EQ(match->n_tokens, 0u);
}

TEST_P(ClientScenario, PrefixesVerifyRemoveStats) {
  Put(*client_);
  auto list = client_->Prefixes();
  ASSERT_TRUE(list.ok());
  ASSERT_EQ(list->size(), 1u);
  EXPECT_EQ((*list)[0].label, "scenario");
  EXPECT_EQ((*list)[0].ingest, IngestState::kReady);
  auto detail = client_->Prefix(prefix_);
  ASSERT_TRUE(detail.ok());
  EXPECT_EQ(detail->chain, std::vector<std::string>{prefix_});
  bool called = false;
  auto verify =
      client_->Verify("", [&](uint64_t, uint64_t, std::string_view) { return called = true; });
  ASSERT_TRUE(verify.ok()) << verify.error().message;
  EXPECT_TRUE(called);
  EXPECT_EQ(verify->segments, 1u);
  EXPECT_TRUE(verify->damaged.empty());
  auto stats = client_->Stats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->prefixes, 1u);
  EXPECT_EQ(stats->puts, 1u);
  Status removed = client_->Remove(prefix_);
  ASSERT_TRUE(removed.ok()) << removed.error().message;
  EXPECT_TRUE(client_->Prefixes()->empty());
}

std::string KindName(const ::testing::TestParamInfo<Kind>& param) {
  constexpr const char* kNames[] = {"Embedded", "UnixShared", "UnixSmallRegion", "UnixInline",
                                    "Tcp"};
  return kNames[size_t(param.param)];
}

INSTANTIATE_TEST_SUITE_P(Clients, ClientScenario,
                         ::testing::Values(Kind::kEmbedded, Kind::kUnixShared,
                                           Kind::kUnixSmallRegion, Kind::kUnixInline, Kind::kTcp),
                         KindName);

}  // namespace
}  // namespace prefixd
