// Runs the same tests for every backend.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "tests/storage/io/io_engine_fixture.h"

namespace prefixd::storage {
namespace {

TEST_P(IoEngineTest, ManyScatteredWritesAndReads) {
  constexpr size_t kOps = 500;
  std::vector<std::byte> data(kOps * 8192), back(data.size());
  FillRow(3, 1, 1, data);
  std::vector<IoOp> writes, reads;
  for (size_t i = 0; i < kOps; ++i) {
    // Each operation has two vectors, with swapped halves: order within an operation matters.
    std::byte* p = data.data() + i * 8192;
    writes.push_back({IoKind::kWrite,
                      IoPriority::kWrite,
                      fd_.get(),
                      (kOps - 1 - i) * 8192,
                      {{p + 4096, 4096}, {p, 4096}},
                      0});
    std::byte* q = back.data() + i * 8192;
    reads.push_back({IoKind::kRead,
                     IoPriority::kStepRead,
                     fd_.get(),
                     (kOps - 1 - i) * 8192,
                     {{q + 4096, 4096}, {q, 4096}},
                     0});
  }
  engine_->Run(writes);
  for (const IoOp& op : writes) ASSERT_OK(CheckComplete(op, "write"));
  ASSERT_OK(DataSync(*engine_, fd_.get(), "sync"));
  engine_->Run(reads);
  for (const IoOp& op : reads) ASSERT_OK(CheckComplete(op, "read"));
  EXPECT_EQ(data, back);
}

TEST_P(IoEngineTest, ShortAndFailedTransfersAreReported) {
  std::vector<std::byte> buffer(8192);
  IoOp past_end{IoKind::kRead,    IoPriority::kStepRead,   fd_.get(),
                (8 << 20) - 4096, {{buffer.data(), 8192}}, 0};
  engine_->Run({&past_end, 1});
  EXPECT_EQ(past_end.result, 4096);
  EXPECT_CODE(CheckComplete(past_end, "read"), Code::kIo);
  IoOp bad_fd{IoKind::kRead, IoPriority::kStepRead, -1, 0, {{buffer.data(), 8192}}, 0};
  engine_->Run({&bad_fd, 1});
  EXPECT_EQ(bad_fd.result, -EBADF);
  EXPECT_CODE(CheckComplete(bad_fd, "read"), Code::kIo);
}

TEST_P(IoEngineTest, OperationsLargerThanTheByteCapStillRun) {
  std::vector<std::byte> big(4 << 20), back(big.size());
  FillRow(9, 0, 0, big);
  IoOp write{IoKind::kWrite, IoPriority::kWrite, fd_.get(), 0, {{big.data(), big.size()}}, 0};
  engine_->Run({&write, 1});
  ASSERT_OK(CheckComplete(write, "write"));
  ASSERT_OK(ReadFully(*engine_, fd_.get(), 0, back, IoPriority::kScrub, "read"));
  EXPECT_EQ(big, back);
}

TEST_P(IoEngineTest, ManyThreadsShareIt) {
  std::vector<std::byte> data(1 << 20);
  FillRow(5, 0, 0, data);
  ASSERT_OK(WriteFully(*engine_, fd_.get(), 0, data, IoPriority::kWrite, "write"));
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 rng(static_cast<uint64_t>(t));
      std::vector<std::byte> page(4096 * 16);
      for (int i = 0; i < 50; ++i) {
        std::vector<IoOp> ops;
        std::vector<uint64_t> at;
        for (size_t k = 0; k < 16; ++k) {
          at.push_back(rng() % 256 * 4096);
          ops.push_back({IoKind::kRead,
                         static_cast<IoPriority>(k % 4),
                         fd_.get(),
                         at.back(),
                         {{page.data() + k * 4096, 4096}},
                         0});
        }
        engine_->Run(ops);
        for (size_t k = 0; k < 16; ++k) {
          wrong += !CheckComplete(ops[k], "").ok() ||
                   std::memcmp(page.data() + k * 4096, data.data() + at[k], 4096) != 0;
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(IoEngineTest, OperationsOutliveTheThreadThatSubmittedThem) {
  Pipe pipe;
  std::vector<std::byte> memory(4096);
  IoOp op = pipe.Read(memory);
  IoBatch batch;
  std::thread([&] { engine_->Submit({&op, 1}, batch); }).join();
  pipe.Write(4096);
  batch.Wait();
  EXPECT_EQ(op.result, 4096);
}

TEST_P(IoEngineTest, AgainIsTriedAgainButNotForEver) {
  if (GetParam() == IoBackend::kUring) {
    GTEST_SKIP() << "io_uring waits for a pipe by itself; io_queue_test has the rule";
  }
  Pipe pipe(O_NONBLOCK);
  std::vector<std::byte> memory(512);
  IoOp op = pipe.Read(memory);
  engine_->Run({&op, 1});
  EXPECT_EQ(op.result, -EAGAIN);
  EXPECT_CODE(CheckComplete(op, "read"), Code::kIo);
}

std::atomic<int> signals_seen{0};

TEST_P(IoEngineTest, SignalsDoNotEndOperations) {
  // Only the engine's threads take the signal: they inherit this thread's mask before it changes.
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = [](int) { ++signals_seen; };  // no SA_RESTART: calls are interrupted
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);
  engine_.reset();
  auto engine = NewEngine(GetParam(), {1 << 20, 1}, fd_.get());
  ASSERT_OK(engine);
  sigset_t mask, old_mask;
  sigemptyset(&mask);
  sigaddset(&mask, SIGUSR1);
  ASSERT_EQ(::pthread_sigmask(SIG_BLOCK, &mask, &old_mask), 0);
  {
    Pipe pipe;
    std::vector<std::byte> memory(4096);
    IoOp op = pipe.Read(memory);
    IoBatch batch;
    (*engine)->Submit({&op, 1}, batch);
    for (int i = 1; i <= 5; ++i) {
      signals_seen = 0;
      // The signal is sent again if no thread took it: the thread sanitizer keeps a signal for the
      // next call that it knows, and one that comes just before the thread begins to read waits as
      // long as the read.
      while (signals_seen == 0) {
        ASSERT_EQ(::kill(::getpid(), SIGUSR1), 0);
        const auto again = IoBatch::Clock::now() + std::chrono::milliseconds(100);
        while (signals_seen == 0 && IoBatch::Clock::now() < again) std::this_thread::yield();
      }
    }
    EXPECT_FALSE(batch.WaitUntil(IoBatch::Clock::now() + kSoon));
    pipe.Write(4096);
    batch.Wait();
    EXPECT_EQ(op.result, 4096);
  }
  engine->reset();
  ::pthread_sigmask(SIG_SETMASK, &old_mask, nullptr);
  ::sigaction(SIGUSR1, &before, nullptr);
}

INSTANTIATE_TEST_SUITE_P(Backends, IoEngineTest,
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads), BackendName);

}  // namespace
}  // namespace prefixd::storage
