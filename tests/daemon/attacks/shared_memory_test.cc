// A client that changes its shared memory while the daemon reads it: what was checked is what is
// used, and nothing is written where the client has not said. docs/security.md lists the attacks.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "attention/rows/finite_check.h"
#include "protocol/shared_region.h"
#include "tests/daemon/calls/request_fixture.h"
#include "tests/support/expect_ok.h"

namespace prefixd::daemon {
namespace {

constexpr size_t kBytes = 1 << 20;

// The region as the daemon sees it, and as the client does.
class SharedMemoryAttacks : public RequestHandlerTest {
 protected:
  void SetUp() override {
    RequestHandlerTest::SetUp();
    auto made = SharedRegion::Create(kBytes);
    ASSERT_OK(made);
    daemons_ = *std::move(made);
    auto mapped = SharedRegion::Map(::dup(daemons_.fd()), kBytes);
    ASSERT_OK(mapped);
    clients_ = *std::move(mapped);
    handler_ = std::make_unique<RequestHandler>(*store_, Peer{"", false, false, true},
                                                daemons_.bytes(), HandlerLimits{1 << 20, 2},
                                                [] { return wire::ServerStats{}; });
  }
  // Calls `ask` so many times while another thread changes bytes [0, changing) of the region.
  template <typename Ask>
  void WhileItChanges(size_t changing, int times, const Ask& ask) {
    std::atomic<bool> stop{false};
    std::thread vandal([&] {
      std::mt19937_64 rng(prefixd::testing::Seed("SharedMemoryAttacks"));
      while (!stop) {
        const auto at = clients_.bytes().subspan(rng() % (changing / 8) * 8, 8);
        const uint64_t value = rng() & 0x3f3f3f3f3f3f3f3f;  // finite numbers
        for (size_t i = 0; i < at.size(); ++i) {
          *reinterpret_cast<volatile unsigned char*>(&at[i]) = uint8_t(value >> (8 * i));
        }
      }
    });
    for (int i = 0; i < times; ++i) ask();
    stop = true;
    vandal.join();
  }

  SharedRegion daemons_, clients_;
  std::unique_ptr<RequestHandler> handler_;
};

// Queries become other numbers in the middle of a step; answers lie where they should, and the rest
// of the region is as it was.
TEST_F(SharedMemoryAttacks, QueriesThatChangeHarmNothingElse) {
  Put("");
  const Response attached = Ask(*handler_, MessageType::kAttach, AttachControl(""), Tokens());
  ASSERT_FALSE(attached.error) << attached.error->message;
  const Json step = {{"steps", {{{"session", attached.control["session"]}, {"layer", 0}}}},
                     {"in", {{0, 256}}},
                     {"out", {{1024, 256}, {2048, 16}}}};
  std::ranges::fill(clients_.bytes(), std::byte{0x5a});
  WhileItChanges(256, 2000, [&] {
    const Response r = Ask(*handler_, MessageType::kStep, step, {}, /*shared=*/true);
    ASSERT_FALSE(r.error) << r.error->message;
    EXPECT_FALSE(r.control["steps"][0].contains("error")) << r.control.dump();
  });
  const auto untouched = [&](size_t begin, size_t end) {
    return std::ranges::all_of(clients_.bytes().subspan(begin, end - begin),
                               [](std::byte b) { return b == std::byte{0x5a}; });
  };
  EXPECT_TRUE(untouched(256, 1024) && untouched(1280, 2048) && untouched(2064, kBytes));
}

// Rows that change while they are stored are read once: what is stored verifies, and is the same
// each time it is read.
TEST_F(SharedMemoryAttacks, WhatIsStoredIsOneReadingOfIt) {
  const auto& p = prompt_;
  const size_t bytes = p.k[0].size();
  std::memcpy(clients_.bytes().data() + 2 * bytes, p.tokens.data(), 400);
  const Response begun =
      Ask(*handler_, MessageType::kBeginPut,
          {{"put", {{"model", p.model.name}}}, {"in", {{2 * bytes, 400}}}}, {}, /*shared=*/true);
  ASSERT_FALSE(begun.error) << begun.error->message;
  const Json put = begun.control["put"];
  WhileItChanges(2 * bytes, 1, [&] {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const Json write = {{"put", put},
                          {"layer", layer},
                          {"first", 0},
                          {"n", 100},
                          {"in", {{0, bytes}, {bytes, bytes}}}};
      const Response written = Ask(*handler_, MessageType::kPutWrite, write, {}, /*shared=*/true);
      ASSERT_FALSE(written.error) << written.error->message;
    }
  });
  const Response committed = Ask(*handler_, MessageType::kPutCommit, {{"put", put}});
  ASSERT_FALSE(committed.error) << committed.error->message;
  const auto session = store_->Attach(
      {.model = p.model.name, .tokens = p.tokens, .policy = {.mode = StepMode::kFull}});
  ASSERT_OK(session);
  std::vector<std::byte> k(bytes), v(bytes), again(bytes);
  ASSERT_OK((*session)->ReadLayer({.layer = 0, .tokens = {0, 100}}, k, v));
  ASSERT_OK((*session)->ReadLayer({.layer = 0, .tokens = {0, 100}}, again, v));
  EXPECT_EQ(k, again);
  EXPECT_OK(store_->Verify("", {}));
}

// Numbers become NaN and finite again while they are stored: a write is refused, or all that it
// stores is finite.
TEST_F(SharedMemoryAttacks, NothingIsStoredThatWasNotChecked) {
  const auto& p = prompt_;
  const size_t bytes = p.k[0].size();
  const std::span<std::byte> rows = clients_.bytes().first(2 * bytes);
  std::atomic<bool> stop{false};
  std::thread vandal([&] {
    std::mt19937_64 rng(prefixd::testing::Seed("SharedMemoryAttacks.NaN"));
    for (bool nan = true; !stop; nan = !nan) {
      auto* const at = reinterpret_cast<volatile unsigned char*>(&rows[rng() % (bytes / 2) * 2]);
      at[0] = 0xff;
      at[1] = 0x7f;
      if (nan) continue;
      for (size_t i = 1; i < rows.size(); i += 2) {
        *reinterpret_cast<volatile unsigned char*>(&rows[i]) = 0x3f;
      }
    }
  });
  uint32_t stored = 0, refused = 0;
  for (uint32_t i = 0; i < 2000 && (i < 200 || stored == 0 || refused == 0); ++i) {
    std::vector<uint32_t> tokens = p.tokens;
    tokens[0] = 60'000 + i;
    auto ids = std::as_bytes(std::span(tokens));
    const Response begun = Ask(*handler_, MessageType::kBeginPut,
                               {{"put", {{"model", p.model.name}}}, {"in", {{0, ids.size()}}}},
                               {ids.begin(), ids.end()});
    ASSERT_FALSE(begun.error) << begun.error->message;
    const Json put = begun.control["put"];
    bool whole = true;
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const Response written = Ask(*handler_, MessageType::kPutWrite,
                                   {{"put", put},
                                    {"layer", layer},
                                    {"first", 0},
                                    {"n", 100},
                                    {"in", {{0, bytes}, {bytes, bytes}}}},
                                   {}, /*shared=*/true);
      whole = whole && !written.error;
      if (written.error) {
        ASSERT_EQ(written.error->code, Code::kInvalidArgument);
      }
    }
    if (!whole) {
      ++refused;
      ASSERT_FALSE(Ask(*handler_, MessageType::kPutAbort, {{"put", put}}).error);
      continue;
    }
    ++stored;
    const Response committed = Ask(*handler_, MessageType::kPutCommit, {{"put", put}});
    ASSERT_FALSE(committed.error) << committed.error->message;
    const auto session = store_->Attach(
        {.model = p.model.name, .tokens = tokens, .policy = {.mode = StepMode::kFull}});
    ASSERT_OK(session);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      std::vector<std::byte> k(bytes), v(bytes);
      ASSERT_OK((*session)->ReadLayer({.layer = layer, .tokens = {0, 100}}, k, v));
      ASSERT_TRUE(AllFinite(DType::kBf16, k.data(), bytes / 2));
      ASSERT_TRUE(AllFinite(DType::kBf16, v.data(), bytes / 2));
    }
  }
  stop = true;
  vandal.join();
  EXPECT_GT(refused, 0u);
}

}  // namespace
}  // namespace prefixd::daemon
