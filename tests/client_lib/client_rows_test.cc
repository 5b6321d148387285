// Tests rows through every kind of client: stored as the put specifies, restored, read in place.
#include <cstring>

#include "prefixd/restore.h"
#include "tests/client_lib/client_scenario.h"

namespace prefixd::testing {
namespace {

using ClientRows = ClientScenario;

TEST_P(ClientRows, RowsAreStoredAsThePutAsks) {
  ASSERT_TRUE(client_->RegisterModel(prompt_.model).ok());
  PutSpec spec{prompt_.model.name, "", prompt_.tokens, ""};
  spec.encoding = RowEncoding::kInt8;
  auto put = client_->BeginPut(spec);
  ASSERT_TRUE(put.ok() && WriteRows(**put, prompt_).ok());
  EXPECT_EQ((*put)->progress().done, 2u * kTokens);
  EXPECT_EQ((*put)->progress().total, 2u * kTokens);
  const auto done = (*put)->Commit();
  ASSERT_TRUE(done.ok());
  EXPECT_EQ(done->encoding, RowEncoding::kInt8);
  EXPECT_GT(done->encoding_error.key_rms, 0.0f);
  const auto detail = client_->Prefix(done->prefix);
  ASSERT_TRUE(detail.ok());
  EXPECT_EQ(detail->summary.encoding, RowEncoding::kInt8);
  EXPECT_EQ(detail->summary.encoding_error, done->encoding_error);
  auto session = Attach(*client_);
  ASSERT_NE(session, nullptr);
  ASSERT_EQ(session->info().parts.size(), 1u);
  EXPECT_EQ(session->info().parts[0].encoding, RowEncoding::kInt8);
  EXPECT_EQ(session->info().parts[0].tokens, (TokenRange{0, kTokens}));
}

TEST_P(ClientRows, RestoresWhatWasPut) {
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
  // The session goes on. A restore after its detach returns an error.
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

TEST_P(ClientRows, RowsAreReadInPlace) {
  Put(*client_);
  auto session = Attach(*client_);
  ASSERT_TRUE(session);
  std::vector<uint32_t> ids;
  for (uint32_t t = 0; t < kTokens; t += 1 + t % 5) ids.push_back(t);
  const RowShape row = prompt_.model.geometry.row(0);
  std::vector<std::byte> copied(ids.size() * row.bytes());
  ASSERT_TRUE(session->ReadRows(1, 1, ids, copied).ok());
  auto rows = session->ReadInPlace(1, 1, ids);
  if (Remote()) {
    ASSERT_FALSE(rows.ok());
    EXPECT_EQ(rows.error().code, Code::kFailedPrecondition);
    EXPECT_NE(rows.error().message.find("use ReadRows"), std::string::npos);
    return;
  }
  ASSERT_TRUE(rows.ok()) << rows.error().message;
  const auto expect_rows = [&](const RowsInPlace& borrowed) {
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
  auto more = session->ReadInPlace(1, 1, ids);
  ASSERT_TRUE(more.ok());
  EXPECT_EQ(more->region.bytes.data(), rows->region.bytes.data());  // mapped once
  EXPECT_EQ(pinned(), 2 * once);
  *more = {};
  EXPECT_EQ(pinned(), once);
  const std::vector<uint32_t> beyond = {0, kTokens};
  EXPECT_FALSE(session->ReadInPlace(1, 1, beyond).ok());
  EXPECT_FALSE(session->ReadInPlace(2, 0, ids).ok());
  EXPECT_EQ(pinned(), once);
  auto none = session->ReadInPlace(0, 0, {});
  EXPECT_TRUE(none.ok() && none->rows.empty());
  ASSERT_TRUE(session->Detach().ok());
  EXPECT_FALSE(session->ReadInPlace(1, 1, ids).ok());
  expect_rows(*rows);  // rows stay valid after the session
  *rows = {};
  EXPECT_EQ(pinned(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Clients, ClientRows, EveryKind(), KindName);

}  // namespace
}  // namespace prefixd::testing
