// A client that changes its shared memory while the daemon reads it: what was checked is what is
// used, and nothing is written where the client has not said. docs/security.md lists the attacks.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

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

}  // namespace
}  // namespace prefixd::daemon
