// Tests writes and reads that take several messages, of which several are on their way at once.
#include <cstring>
#include <fstream>

#include "tests/client_lib/client_scenario.h"
#include "tests/support/expect_ok.h"

namespace prefixd::testing {
namespace {

constexpr uint32_t kLong = 40'000;      // several messages a layer
constexpr size_t kTokenBytes = 2 * 32;  // of keys, and of values: two heads of 16 elements

class Pieces : public ClientScenario {
 protected:
  void SetUp() override {
    ClientScenario::SetUp();
    if (HasFatalFailure()) return;
    long_ = MakePrompt(kLong, Seed("Pieces"));
    ASSERT_OK(client_->RegisterModel(long_.model));
  }
  // Rows stay in the order of the put, and each read is one of the disk.
  void Limit(RuntimeOptions& options, std::vector<std::string>& args) const override {
    options.recluster = false;
    options.host_tier_bytes = 0;
    args.insert(args.end(), {"--recluster=false", "--host-tier-mib", "0"});
  }
  std::unique_ptr<PutStream> Begin() {
    auto put = client_->BeginPut({long_.model.name, "", long_.tokens, ""});
    EXPECT_OK(put);
    return put.ok() ? *std::move(put) : nullptr;
  }
  static Status Write(PutStream& put, uint32_t layer, TokenRange tokens, const Prompt& of) {
    const auto part = [&](const std::vector<std::byte>& rows) {
      return std::span(rows).subspan(tokens.begin * kTokenBytes, tokens.size() * kTokenBytes);
    };
    return put.Write(layer, tokens.begin, tokens.size(), part(of.k[layer]), part(of.v[layer]));
  }
  std::shared_ptr<Session> AttachLong() {
    auto session = client_->Attach(
        {.model = long_.model.name, .tokens = long_.tokens, .policy = {.mode = StepMode::kFull}});
    EXPECT_OK(session);
    return session.ok() ? *session : nullptr;
  }
  void ExpectRows(Session& session) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      std::vector<std::byte> k(kLong * kTokenBytes), v(k.size());
      ASSERT_OK(session.ReadLayer({.layer = layer, .tokens = {0, kLong}}, k, v));
      EXPECT_TRUE(k == long_.k[layer] && v == long_.v[layer]) << layer;
    }
  }

  Prompt long_;
};

TEST_P(Pieces, LayersAndRunsComeInAnyOrder) {
  const auto put = Begin();
  ASSERT_TRUE(put);
  for (const uint32_t layer : {1u, 0u}) {
    // The last one does not begin where a page does.
    for (const TokenRange run :
         {TokenRange{30'011, kLong}, TokenRange{0, 5}, TokenRange{5, 30'011}}) {
      ASSERT_OK(Write(*put, layer, run, long_));
    }
  }
  EXPECT_EQ(put->progress().done, 2u * kLong);
  ASSERT_OK(put->Commit());
  const auto session = AttachLong();
  ASSERT_TRUE(session);
  ExpectRows(*session);
  // Heads that lie one after another, and a run in the middle.
  constexpr TokenRange kRun{1'234, 38'765};
  std::vector<std::byte> k(kRun.size() * kTokenBytes), v(k.size());
  ASSERT_OK(session->ReadLayer({.layer = 1, .tokens = kRun, .order = KvOrder::kHeadMajor}, k, v));
  for (size_t head = 0; head < 2; ++head) {
    for (uint32_t t = 0; t < kRun.size(); ++t) {
      const size_t mine = (head * kRun.size() + t) * 32;
      const size_t put_at = (size_t{kRun.begin + t} * 2 + head) * 32;
      ASSERT_EQ(std::memcmp(&k[mine], &long_.k[1][put_at], 32), 0) << head << " " << t;
      ASSERT_EQ(std::memcmp(&v[mine], &long_.v[1][put_at], 32), 0) << head << " " << t;
    }
  }
}

// Several reads in one call, some of nothing: announced one after the other, each with its rows.
TEST_P(Pieces, ManyReadsComeInTheirOrder) {
  const auto put = Begin();
  ASSERT_TRUE(put);
  for (const uint32_t layer : {0u, 1u}) ASSERT_OK(Write(*put, layer, {0, kLong}, long_));
  ASSERT_OK(put->Commit());
  const auto session = AttachLong();
  ASSERT_TRUE(session);
  // More than go together.
  struct Wanted {
    uint32_t layer;
    TokenRange tokens;
    std::vector<std::byte> k, v;
  };
  std::vector<Wanted> wanted;
  for (int turn = 0; turn < 10; ++turn) {
    wanted.push_back({0, {7, 7}, {}, {}});
    wanted.push_back({1, {3, kLong}, {}, {}});
    wanted.push_back({0, {0, kLong - 10}, {}, {}});
    wanted.push_back({1, {100, 101}, {}, {}});
    wanted.push_back({0, {0, 0}, {}, {}});
  }
  std::vector<LayerRead> reads;
  for (Wanted& one : wanted) {
    one.k.resize(one.tokens.size() * kTokenBytes);
    one.v.resize(one.k.size());
    reads.push_back({{.layer = one.layer, .tokens = one.tokens, .heads = {}}, one.k, one.v});
  }
  const auto expect_rows = [&](const Wanted& one) {
    if (one.k.empty()) return;
    const size_t at = one.tokens.begin * kTokenBytes;
    EXPECT_EQ(std::memcmp(one.k.data(), &long_.k[one.layer][at], one.k.size()), 0);
    EXPECT_EQ(std::memcmp(one.v.data(), &long_.v[one.layer][at], one.v.size()), 0);
  };
  size_t next = 0;
  ASSERT_OK(session->ReadLayers(reads, [&](size_t i) {
    EXPECT_EQ(i, next++);
    expect_rows(wanted[i]);
    return true;
  }));
  EXPECT_EQ(next, wanted.size());

  for (const size_t last : {0u, 1u, 22u, 49u}) {
    SCOPED_TRACE(last);
    next = 0;
    const Status ended = session->ReadLayers(reads, [&](size_t i) { return next++, i < last; });
    EXPECT_CODE(ended, Code::kCancelled);
    EXPECT_EQ(next, last + 1);
  }
  // One of them is no slice: nothing is read.
  next = 0;
  reads.back().slice.layer = 2;
  EXPECT_CODE(session->ReadLayers(reads, [&](size_t) { return next++, true; }),
              Code::kInvalidArgument);
  EXPECT_EQ(next, 0u);
  ExpectRows(*session);
  ASSERT_OK(session->Detach());
  EXPECT_FALSE(session->ReadLayers({}, nullptr).ok());
}

// What follows a piece that is refused is not written, so that the same write can be repeated.
TEST_P(Pieces, ARefusedPieceLeavesNoGap) {
  for (const uint32_t bad : {0u, 5'000u, 20'000u, kLong - 1}) {
    SCOPED_TRACE(bad);
    Prompt wrong = long_;
    const uint16_t nan = 0x7fc0;
    std::memcpy(&wrong.v[0][bad * kTokenBytes + 34], &nan, 2);
    const auto put = Begin();
    ASSERT_TRUE(put);
    for (int again = 0; again < 2; ++again) {
      const Status refused = Write(*put, 0, {0, kLong}, wrong);
      EXPECT_CODE(refused, Code::kInvalidArgument);
      ASSERT_FALSE(refused.ok());
      EXPECT_NE(refused.error().message.find("value of layer 0, token " + std::to_string(bad)),
                std::string::npos)
          << refused.error().message;
    }
    ASSERT_OK(Write(*put, 0, {0, kLong}, long_));
    ASSERT_OK(Write(*put, 1, {0, kLong}, long_));
    EXPECT_EQ(put->progress().done, 2u * kLong);
    const auto stored = put->Commit();
    ASSERT_OK(stored);
    const auto session = AttachLong();
    ASSERT_TRUE(session);
    ExpectRows(*session);
    ASSERT_OK(session->Detach());
    ASSERT_OK(client_->Remove(stored->prefix));
  }
}

// Returns the largest file of a directory: the segment of the long prompt.
std::filesystem::path Largest(const std::filesystem::path& dir) {
  std::filesystem::path largest;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir)) {
    if (entry.is_regular_file() &&
        (largest.empty() || entry.file_size() > std::filesystem::file_size(largest))) {
      largest = entry.path();
    }
  }
  return largest;
}

// A damaged page ends the read with its error. What was read before is right, and the connection
// goes on.
TEST_P(Pieces, DamageEndsARead) {
  const auto put = Begin();
  ASSERT_TRUE(put);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    ASSERT_OK(Write(*put, layer, {0, kLong}, long_));
  }
  const auto stored = put->Commit();
  ASSERT_OK(stored);
  ASSERT_OK(client_->WaitReady(stored->prefix, {}));
  const auto session = AttachLong();
  ASSERT_TRUE(session);
  // A key of layer 1 in the middle of its run. The store reads its pages around the system's cache.
  const auto file = Largest(dir_.path() / (daemon_ ? "store" : "own") / "segments");
  {
    std::ifstream in(file, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(in)), {});
    const size_t at = bytes.find(std::string(
        reinterpret_cast<const char*>(&long_.k[1][kLong / 2 * kTokenBytes]), kTokenBytes / 2));
    ASSERT_NE(at, std::string::npos);
    std::fstream out(file, std::ios::binary | std::ios::in | std::ios::out);
    out.seekp(static_cast<std::streamoff>(at));
    out.put(static_cast<char>(bytes[at] ^ 0x10));
  }
  std::vector<std::byte> k(kLong * kTokenBytes, std::byte{0xee}), v(k);
  const std::vector<std::byte> untouched(kTokenBytes / 2, std::byte{0xee});
  const Status read = session->ReadLayer({.layer = 1, .tokens = {0, kLong}}, k, v);
  EXPECT_CODE(read, Code::kCorrupt);
  ASSERT_FALSE(read.ok());
  EXPECT_NE(read.error().message.find("does not verify"), std::string::npos)
      << read.error().message;
  if (GetParam() != Kind::kEmbedded) {  // an embedded read writes to where its caller says
    for (size_t at = 0; at < k.size(); at += untouched.size()) {
      const auto is = [&](const std::vector<std::byte>& rows) {
        return std::memcmp(&k[at], &rows[at], untouched.size()) == 0;
      };
      ASSERT_TRUE(is(long_.k[1]) || std::memcmp(&k[at], untouched.data(), untouched.size()) == 0);
    }
  }
  EXPECT_OK(client_->Stats());
  EXPECT_EQ(client_->Stats()->sessions, 1u);
}

INSTANTIATE_TEST_SUITE_P(Clients, Pieces, EveryKind(), KindName);

}  // namespace
}  // namespace prefixd::testing
