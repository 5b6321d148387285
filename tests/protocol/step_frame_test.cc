// Tests what lies in the slots of a ring, and the ring itself between two sides.
#include "protocol/step_frame.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "protocol/frame.h"
#include "protocol/step_ring.h"
#include "tests/support/expect_ok.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::wire {
namespace {

TEST(StepFrame, ARowThatIsAppendedLiesBehindTheQueries) {
  StepLayout layout(1);
  const auto places = layout.Add({7, 3, false, 20, 10, 2, 100, {2, 1}, true, 40, 20});
  EXPECT_EQ(places.q, 128u);
  EXPECT_EQ(places.k, 256u);
  EXPECT_EQ(places.v, 320u);
  EXPECT_EQ(layout.request_bytes(), 384u);
  EXPECT_EQ(layout.answer_bytes(), 320u);
}

// The worked example of docs/protocol.md.
TEST(StepFrame, LiesAsDescribed) {
  const StepEntry entry{7, 3, true, 20, 10, 2, 100, {2, 1}};
  StepLayout layout(1);
  const auto places = layout.Add(entry);
  EXPECT_EQ(places.q, 128u);
  EXPECT_EQ(layout.request_bytes(), 128u + 128u);
  EXPECT_EQ(places.y, 64u);  // behind 32 + 16 bytes
  EXPECT_EQ(places.lse, 128u);
  EXPECT_EQ(places.tail, 192u);
  EXPECT_EQ(layout.answer_bytes(), 320u);
  std::array<std::byte, 80> bytes{};
  EncodeStepHeader({1, 256, 1000, 50}, std::span(bytes).first<kStepHeaderBytes>());
  EncodeStepEntry(entry, std::span(bytes).last<kStepEntryBytes>());
  const std::array<uint32_t, 20> want = {4, 0, 1,  256, 1000, 50,  0, 0, 7, 0,
                                         3, 1, 20, 10,  2,    100, 2, 1, 0, 0};
  EXPECT_EQ(std::memcmp(bytes.data(), want.data(), sizeof(want)), 0);
}

TEST(StepFrame, DamageIsRefusedOrHarmless) {
  std::mt19937_64 rng(testing::Seed("StepFrame.Damage"));
  for (int round = 0; round < 20000; ++round) {
    const auto n = static_cast<uint32_t>(1 + rng() % 3);
    StepLayout layout(n);
    std::vector<StepEntry> entries;
    for (uint32_t i = 0; i < n; ++i) {
      entries.push_back({rng(), uint32_t(rng()), rng() % 2 == 0, uint32_t(rng() % 50),
                         uint32_t(rng() % 50), uint32_t(rng() % 9), uint32_t(rng() % 99),
                         HeadRange{uint32_t(rng()), uint32_t(rng())}});
      if (rng() % 2 == 0) {
        entries.back().append = true;
        entries.back().k_bytes = uint32_t(rng() % 200),
        entries.back().v_bytes = uint32_t(rng() % 200);
      }
      layout.Add(entries.back());
    }
    std::vector<std::byte> slot(std::max(layout.request_bytes(), layout.answer_bytes()));
    const std::span bytes(slot);
    EncodeStepHeader({n, uint32_t(layout.request_bytes()), 0, 0}, bytes.first<kStepHeaderBytes>());
    for (uint32_t i = 0; i < n; ++i) {
      EncodeStepEntry(
          entries[i],
          bytes.subspan(kStepHeaderBytes + i * kStepEntryBytes).first<kStepEntryBytes>());
    }
    const auto decode = [&]() -> Result<std::vector<StepEntry>> {
      PREFIXD_ASSIGN(const StepHeader header,
                     DecodeStepHeader(bytes.first<kStepHeaderBytes>(), slot.size()));
      std::vector<StepEntry> decoded(header.n_steps);
      PREFIXD_TRY(DecodeStepEntries(bytes.first(header.bytes), header, slot.size(), decoded));
      return decoded;
    };
    const auto whole = decode();
    ASSERT_OK(whole);
    ASSERT_EQ(*whole, entries);
    slot[rng() % (kStepHeaderBytes + n * kStepEntryBytes)] ^= std::byte(1 + rng() % 255);
    const auto damaged = decode();
    if (!damaged.ok()) continue;
    StepLayout other(static_cast<uint32_t>(damaged->size()));
    for (const StepEntry& entry : *damaged) {
      const auto places = other.Add(entry);
      ASSERT_LE(places.q + 4ull * entry.q_size, slot.size());
      ASSERT_LE(places.v + uint64_t{entry.v_bytes}, slot.size());
      ASSERT_LE(places.tail + entry.tail_bytes, slot.size());
    }
  }
}

TEST(StepFrame, ErrorsOfEveryCodeArrive) {
  for (uint32_t code = 0; code <= static_cast<uint32_t>(Code::kInternal); ++code) {
    const Error error{static_cast<Code>(code), "why " + std::to_string(code), code * 10};
    std::array<std::byte, 5> room{};
    const StepOutcome outcome = EncodeError(error, room);
    std::array<std::byte, kStepHeaderBytes> bytes;
    EncodeAnswer(3, outcome, bytes);
    const auto back = DecodeAnswer(bytes, 3);
    ASSERT_OK(back);
    const Error arrived = DecodeError(*back, room);
    EXPECT_EQ(arrived.code, error.code);
    EXPECT_EQ(arrived.message, error.message.substr(0, 5));
    EXPECT_EQ(arrived.retry_after_ms, error.retry_after_ms);
  }
  std::array<std::byte, kStepHeaderBytes> bytes;
  EncodeAnswer(3, {}, bytes);
  EXPECT_OK(DecodeAnswer(bytes, 3));
  EXPECT_CODE(DecodeAnswer(bytes, 4), Code::kUnavailable);
  EncodeAnswer(3, {99, 0, 0}, bytes);
  EXPECT_CODE(DecodeAnswer(bytes, 3), Code::kUnavailable);
}

TEST(StepFrame, ReportsArriveWhole) {
  StepInfo info{5, {}, {5, 4}, {0.5f, 0.25f, 0.75f}, {{0.1, true}, {0.2, false}}};
  info.ledger.steps = 11;
  info.ledger.compute_ns = 13;
  info.ledger.summary_bytes.back() = 17;
  info.ledger.physical_bytes = {1, 2, 3};
  info.ledger.rho_z_sum = 1.5;
  std::vector<std::byte> room(StepInfoRoom(2, 3));
  const auto written = EncodeStepInfo(info, room);
  ASSERT_OK(written);
  StepInfo back;
  ASSERT_OK(DecodeStepInfo(std::span(room).first(*written), &back));
  EXPECT_EQ(back.k, 5u);
  EXPECT_EQ(back.k_per_head, info.k_per_head);
  EXPECT_EQ(back.rho_z, info.rho_z);
  ASSERT_EQ(back.missing.size(), 2u);
  EXPECT_EQ(back.missing[0].delta, 0.1);
  EXPECT_TRUE(back.missing[0].certified);
  EXPECT_FALSE(back.missing[1].certified);
  EXPECT_EQ(back.ledger.steps, 11u);
  EXPECT_EQ(back.ledger.compute_ns, 13u);
  EXPECT_EQ(back.ledger.summary_bytes.back(), 17u);
  EXPECT_EQ(back.ledger.physical_bytes, info.ledger.physical_bytes);
  EXPECT_EQ(back.ledger.rho_z_sum, 1.5);
  EXPECT_CODE(DecodeStepInfo(std::span(room).first(*written - 1), &back), Code::kUnavailable);
  EXPECT_CODE(EncodeStepInfo(info, std::span(room).first(*written - 1)), Code::kInternal);
}

TEST(StepRing, ShapesAreChecked) {
  EXPECT_OK((RingShape{kMostRingSlots, 4096}).Check());
  for (const RingShape& shape :
       {RingShape{0, 4096}, RingShape{kMostRingSlots + 1, 4096}, RingShape{1, 0},
        RingShape{1, 4097}, RingShape{2, uint64_t{1} << 60}}) {
    EXPECT_CODE(shape.Check(), Code::kInvalidArgument);
    EXPECT_CODE(StepRing::Create(shape), Code::kInvalidArgument);
  }
}

// Nobody is left asleep, whether the other side polls or waits.
TEST(StepRing, EveryCallIsAnswered) {
  auto made = StepRing::Create({2, 4096});
  ASSERT_OK(made);
  const StepRing& daemon = *made;
  auto mapped = StepRing::Map(::dup(daemon.memory_fd()), ::dup(daemon.bell_fd()), {2, 4096});
  ASSERT_OK(mapped);
  const StepRing& client = *mapped;
  constexpr int kCalls = 3000;
  std::thread server([&] {
    for (int i = 0; i < kCalls; ++i) {
      const bool polls = i % 3 == 0;
      daemon.SetPolling(polls);
      for (uint32_t round = 0; polls && !daemon.asked(1) && round < 2000;) PollPause(round++);
      daemon.SetPolling(false);
      while (!daemon.asked(1)) {
        pollfd bell{daemon.bell_fd(), POLLIN, 0};
        ::poll(&bell, 1, -1);
        uint64_t rung;
        if (!daemon.asked(1)) (void)!::read(daemon.bell_fd(), &rung, sizeof(rung));
      }
      daemon.slot(1)[7] = daemon.slot(1)[6];
      daemon.Answer(1);
      daemon.Wake(1);
    }
  });
  for (int i = 0; i < kCalls; ++i) {
    client.slot(1)[6] = std::byte(i);
    client.Ask(1);
    while (!client.answered(1)) client.Sleep(1, std::chrono::hours(1));
    ASSERT_EQ(client.slot(1)[7], std::byte(i));
  }
  server.join();
}

}  // namespace
}  // namespace prefixd::wire
