// Tests the runtime's small parts: pool, packed blobs, query reservoir.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "runtime/derived/blob_pack.h"
#include "runtime/derived/query_samples.h"
#include "runtime/summaries/summaries.h"
#include "runtime/work/thread_pool.h"
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

cpu_set_t MaskOf(pthread_t thread) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  EXPECT_EQ(pthread_getaffinity_np(thread, sizeof mask, &mask), 0);
  return mask;
}
cpu_set_t Only(size_t core) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(core, &mask);
  return mask;
}

void AllThreadsTo(const cpu_set_t& mask) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    const pid_t thread = std::stoi(entry.path().filename().string());
    static_cast<void>(sched_setaffinity(thread, sizeof mask, &mask));  // the thread may have ended
  }
}

// Two items that wait for each other run on two threads; the worker's thread keeps off the caller's
// core, and within the cores that others allow it.
TEST(ThreadPool, WorkersKeepOffTheirCallersCore) {
  cpu_set_t all;
  if (pthread_getaffinity_np(pthread_self(), sizeof all, &all) != 0 ||
      sched_setaffinity(0, sizeof all, &all) != 0) {
    GTEST_SKIP() << "cores may not be chosen here";
  }
  std::vector<size_t> cores;
  for (size_t core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &all)) cores.push_back(core);
  }
  if (cores.size() < 2) GTEST_SKIP() << "one core";
  struct Restore {
    const cpu_set_t& all;
    ~Restore() { AllThreadsTo(all); }
  } restore{all};
  ThreadPool pool(2);
  const auto caller = std::this_thread::get_id();
  pthread_t worker{};
  const auto meet = [&](int* worker_core) {
    std::atomic<int> there{0};
    ASSERT_OK(pool.ParallelFor(2, [&](size_t) -> Status {
      ++there;
      while (there < 2) std::this_thread::yield();
      if (std::this_thread::get_id() != caller) {
        worker = pthread_self();
        *worker_core = sched_getcpu();
      }
      return {};
    }));
  };
  for (const size_t core : {cores[0], cores[1], cores[0]}) {
    const cpu_set_t here = Only(core);
    ASSERT_EQ(sched_setaffinity(0, sizeof here, &here), 0);
    for (int i = 0; i < 20; ++i) {
      int worker_core = -1;
      meet(&worker_core);
      EXPECT_NE(worker_core, static_cast<int>(core));
    }
    const cpu_set_t mask = MaskOf(worker);
    EXPECT_EQ(CPU_COUNT(&mask), static_cast<int>(cores.size()) - 1);
  }
  // Another process restricts the whole process to one core, as `taskset -a` does: all threads stay
  // there.
  for (const size_t core : {cores[0], cores[1]}) {
    AllThreadsTo(Only(core));
    for (int i = 0; i < 5; ++i) {
      int worker_core = -1;
      meet(&worker_core);
      EXPECT_EQ(worker_core, static_cast<int>(core));
    }
  }
}

TEST(ThreadPool, ReturnsAnErrorAndSkipsTheRest) {
  ThreadPool pool(2);
  std::atomic<int> ran{0};
  const Status status = pool.ParallelFor(10000, [&](size_t i) -> Status {
    ++ran;
    if (i == 3) return InvalidArgument("three");
    if (i > 3) std::this_thread::sleep_for(std::chrono::microseconds(50));  // half a second in all
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
  for (uint32_t n = 400; n < 600; ++n) {  // other prompts sample by the same rule
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
