// The runtime's small parts: pool, packed blobs, query reservoir.
#include <atomic>
#include <cstring>
#include <new>
#include <set>
#include <stdexcept>
#include <thread>

#include "runtime/blob_pack.h"
#include "runtime/query_samples.h"
#include "runtime/summaries.h"
#include "runtime/thread_pool.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

TEST(ThreadPool, RunsEveryItemOnceFromManyCallers) {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int> total{0}, errors{0};
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&, c] {
      for (size_t n : {0, 1, 2, 100}) {
        std::vector<std::atomic<int>> seen(n);
        const Status status = pool.ParallelFor(
            n,
            [&](size_t i) -> Status {
              ++seen[i];
              ++total;
              return {};
            },
            c % 2 ? WorkPriority::kStep : WorkPriority::kBackground);
        errors += !status.ok();
        for (const auto& count : seen) errors += count != 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 4 * 103);
  EXPECT_EQ(errors, 0);
}

TEST(ThreadPool, ReturnsAnErrorAndSkipsTheRest) {
  ThreadPool pool(2);
  std::atomic<int> ran{0};
  const Status status = pool.ParallelFor(10000, [&](size_t i) -> Status {
    ++ran;
    if (i == 3) return InvalidArgument("three");
    return {};
  });
  EXPECT_CODE(status, Code::kInvalidArgument);
  EXPECT_EQ(status.error().message, "three");
  EXPECT_LT(ran, 10000);
}

TEST(ThreadPool, WhatABodyThrowsIsAnErrorAndNobodyWaitsForIt) {
  ThreadPool pool(3);
  for (const size_t n : {1, 2, 1000}) {
    const Status memory = pool.ParallelFor(n, [](size_t i) -> Status {
      if (i == 0) throw std::bad_alloc();
      return {};
    });
    EXPECT_CODE(memory, Code::kResourceExhausted);
    const Status other = pool.ParallelFor(n, [](size_t i) -> Status {
      if (i % 7 == 0) throw std::length_error("too long");
      return {};
    });
    EXPECT_CODE(other, Code::kInternal);
    EXPECT_NE(other.error().message.find("too long"), std::string::npos);
    std::atomic<size_t> ran{0};
    EXPECT_TRUE(pool.ParallelFor(n,
                                 [&](size_t) -> Status {
                                   ++ran;
                                   return {};
                                 })
                    .ok());
    EXPECT_EQ(ran, n);
  }
}

TEST(BlobPack, RoundTripAndEveryTruncation) {
  const auto bytes = [](const char* text) {
    const auto view = std::as_bytes(std::span(text, std::strlen(text)));
    return std::vector<std::byte>(view.begin(), view.end());
  };
  const std::vector<std::vector<std::byte>> entries = {bytes("abc"), {}, bytes("defgh")};
  const auto blob = PackBlob(entries);
  auto unpacked = UnpackBlob(blob, 3);
  ASSERT_OK(unpacked);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(std::equal((*unpacked)[i].begin(), (*unpacked)[i].end(), entries[i].begin(),
                           entries[i].end()));
  }
  EXPECT_CODE(UnpackBlob(blob, 2), Code::kCorrupt);
  for (size_t n = 0; n < blob.size(); ++n) {
    EXPECT_CODE(UnpackBlob(std::span(blob).first(n), 3), Code::kCorrupt);
  }
  for (size_t i = 0; i < 16 + 3 * 8; ++i) {  // flips in the header are refused or harmless
    auto damaged = blob;
    damaged[i] ^= std::byte{0x80};
    const auto again = UnpackBlob(damaged, 3);
    EXPECT_TRUE(!again.ok() || (i >= 12 && i < 16)) << i;
  }
}

TEST(QueryReservoir, KeepsAUniformSampleOfTheLastQuarter) {
  const KvGeometry geometry = SmallGeometry(1, 2, 1, 4);
  for (uint32_t n = 400; n < 600; ++n) {  // other prompts, other samples of the same rule
    QueryReservoir reservoir(geometry, n, 10);
    std::vector<float> q(8);
    for (uint32_t t = 0; t < n; ++t) {
      q[0] = static_cast<float>(t);
      reservoir.Add(0, t, 1, q);
    }
    const QuerySamples samples = reservoir.Take();
    ASSERT_EQ(samples.layers[0].positions.size(), 10u);
    std::set<uint32_t> distinct;
    for (size_t i = 0; i < 10; ++i) {
      const uint32_t position = samples.layers[0].positions[i];
      EXPECT_GE(position, LastQuarterBegin(n));
      EXPECT_LT(position, n);
      EXPECT_EQ(samples.layers[0].q[i * 8], static_cast<float>(position));
      distinct.insert(position);
    }
    EXPECT_EQ(distinct.size(), 10u);
  }
}

TEST(QueryReservoir, DoesNotDependOnTheOrderAndSurvivesSerialization) {
  const uint64_t seed = Seed("QueryReservoirOrder");
  const auto prompt = MakePrompt(SmallGeometry(2, 4, 2, 8), 200, seed);
  QueryReservoir forward(prompt.geometry, 200, 16), backward(prompt.geometry, 200, 16);
  for (uint32_t l = 0; l < 2; ++l) forward.Add(l, 0, 200, prompt.Q(l, 0, 200));
  for (uint32_t t = 200; t > 0; t -= 10) {
    for (uint32_t l = 0; l < 2; ++l) backward.Add(l, t - 10, 10, prompt.Q(l, t - 10, 10));
  }
  const auto bytes = forward.Take().Serialize();
  EXPECT_EQ(bytes, backward.Take().Serialize());
  auto read = QuerySamples::Deserialize(bytes, prompt.geometry);
  ASSERT_OK(read);
  EXPECT_EQ(read->layers[0].positions, read->layers[1].positions);
  EXPECT_EQ(read->Serialize(), bytes);
  EXPECT_CODE(QuerySamples::Deserialize(bytes, SmallGeometry(2, 4, 2, 16)), Code::kCorrupt);
  for (size_t n = 0; n < bytes.size(); n += 7) {
    EXPECT_CODE(QuerySamples::Deserialize(std::span(bytes).first(n), prompt.geometry),
                Code::kCorrupt);
  }
}

TEST(Checkpoints, LieWhereMidRegionsEnd) {
  const Anchors anchors{4, 16};
  EXPECT_EQ(CheckpointPositions({0, 300}, anchors, 128),
            (std::vector<uint32_t>{128, 256, 284, 300}));
  EXPECT_EQ(CheckpointPositions({200, 210}, anchors, 128), (std::vector<uint32_t>{210}));
  EXPECT_EQ(CheckpointPositions({0, 3}, anchors, 128), std::vector<uint32_t>{});
  EXPECT_EQ(CheckpointPositions({0, 20}, anchors, 128), (std::vector<uint32_t>{20}));
  EXPECT_EQ(CheckpointPositions({100, 356}, anchors, 128), (std::vector<uint32_t>{228, 340, 356}));
}

}  // namespace
}  // namespace prefixd::testing
