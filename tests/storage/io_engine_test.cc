// The same tests for every backend.
#include "storage/io_engine.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "storage/file.h"
#include "tests/storage/store_backends.h"

namespace prefixd::storage {
namespace {

class IoEngineTest : public ::testing::TestWithParam<IoBackend> {
 protected:
  void SetUp() override {
    path_ = dir_.path() / "file";
    auto fd = OpenFile(path_, O_RDWR | O_CREAT);
    ASSERT_OK(fd);
    fd_ = std::move(*fd);
    ASSERT_OK(Preallocate(fd_.get(), 8 << 20, path_));
    auto engine = NewEngine(GetParam(), limits_, fd_.get());
    if (GetParam() == IoBackend::kUring && !engine.ok()) {
      GTEST_SKIP() << engine.error().ToString();
    }
    ASSERT_OK(engine);
    engine_ = std::move(*engine);
  }

  TempDir dir_;
  std::filesystem::path path_;
  UniqueFd fd_;
  IoLimits limits_{2 << 20, 8};
  std::unique_ptr<IoEngine> engine_;
};

TEST_P(IoEngineTest, ManyScatteredWritesAndReads) {
  constexpr size_t kOps = 500;
  std::vector<std::byte> data(kOps * 8192), back(data.size());
  FillRow(3, 1, 1, data);
  std::vector<IoOp> writes, reads;
  for (size_t i = 0; i < kOps; ++i) {
    // Two vectors each, swapped halves: order within an operation matters.
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

// A read that the kernel holds until the test writes: the read end of a pipe.
class Pipe {
 public:
  explicit Pipe(int flags = 0) {
    int fds[2];
    if (::pipe2(fds, O_CLOEXEC | flags) != 0) std::abort();
    read_ = UniqueFd(fds[0]);
    write_ = UniqueFd(fds[1]);
  }
  IoOp Read(std::span<std::byte> out) const {
    return {IoKind::kRead, IoPriority::kStepRead,      read_.get(),
            kNoOffset,     {{out.data(), out.size()}}, 0};
  }
  void Write(size_t n) const {
    const std::vector<std::byte> bytes(n, std::byte{7});
    ASSERT_EQ(::write(write_.get(), bytes.data(), n), static_cast<ssize_t>(n));
  }
  void CloseWriteEnd() { write_.Close(); }

 private:
  UniqueFd read_, write_;
};

// Everything one caller may leave behind.
struct Request {
  std::shared_ptr<Pipe> pipe = std::make_shared<Pipe>();
  std::vector<std::byte> memory = std::vector<std::byte>(4096);
  std::vector<IoOp> ops;
  IoBatch batch;
};

constexpr auto kSoon = std::chrono::milliseconds(20);

TEST_P(IoEngineTest, ADeadlineEndsTheWaitAndTheKernelKeepsWhatItHolds) {
  std::weak_ptr<Request> left;
  std::shared_ptr<Pipe> pipe;
  {
    auto request = std::make_shared<Request>();
    left = request;
    pipe = request->pipe;
    request->ops.push_back(request->pipe->Read(request->memory));
    request->batch.SetDeadline(IoBatch::Clock::now() + kSoon);
    engine_->SubmitOwned(request->ops, request->batch, request);
    if (engine_->Finish(request->batch)) {  // the kernel cancelled it at once
      EXPECT_EQ(request->ops[0].result, -ETIMEDOUT);
      EXPECT_CODE(CheckComplete(request->ops[0], "read"), Code::kUnavailable);
    }
  }
  pipe->Write(4096);  // what the kernel still holds ends, into memory that is still there
  engine_.reset();
  EXPECT_TRUE(left.expired());
}

TEST_P(IoEngineTest, ABatchWithoutAnOwnerIsWaitedFor) {
  std::vector<std::byte> memory(4096);
  Pipe pipe;
  IoOp op = pipe.Read(memory);
  IoBatch batch;
  batch.SetDeadline(IoBatch::Clock::now() + kSoon);
  engine_->Submit({&op, 1}, batch);
  std::thread writer([&] {
    std::this_thread::sleep_for(3 * kSoon);
    pipe.Write(4096);
  });
  EXPECT_TRUE(engine_->Finish(batch));
  EXPECT_TRUE(op.result == 4096 || op.result == -ETIMEDOUT) << op.result;
  writer.join();
}

TEST_P(IoEngineTest, WhatWaitsPastItsDeadlineNeverReachesTheDisk) {
  // The kernel holds all the engine may have in flight; the write waits behind it.
  Pipe pipe;
  std::vector<std::byte> memory(8 * 512), ones(4096, std::byte{1}), back(4096);
  std::vector<IoOp> blockers;
  for (size_t i = 0; i < 8; ++i) {
    blockers.push_back(pipe.Read(std::span(memory).subspan(i * 512, 512)));
  }
  IoBatch blocked, late, lazy;
  engine_->Submit(blockers, blocked);
  const auto write_at = [&](uint64_t offset) {
    return IoOp{IoKind::kWrite, IoPriority::kCommit, fd_.get(), offset, {{ones.data(), 4096}}, 0};
  };
  IoOp awaited = write_at(0), unawaited = write_at(4096);
  late.SetDeadline(IoBatch::Clock::now() + kSoon);
  lazy.SetDeadline(IoBatch::Clock::now() + kSoon);
  engine_->Submit({&awaited, 1}, late);
  engine_->Submit({&unawaited, 1}, lazy);
  EXPECT_TRUE(engine_->Finish(late));
  EXPECT_EQ(awaited.result, -ETIMEDOUT);
  EXPECT_CODE(CheckComplete(awaited, "write"), Code::kUnavailable);
  EXPECT_FALSE(blocked.WaitUntil(IoBatch::Clock::now()));
  // Nobody waited for the other: it is found too late when its turn comes.
  pipe.Write(memory.size());
  blocked.Wait();
  for (const IoOp& op : blockers) EXPECT_EQ(op.result, 512);
  lazy.Wait();
  EXPECT_EQ(unawaited.result, -ETIMEDOUT);
  for (const uint64_t at : {0, 4096}) {
    ASSERT_OK(ReadFully(*engine_, fd_.get(), at, back, IoPriority::kStepRead, "read"));
    EXPECT_EQ(back, std::vector<std::byte>(4096));
  }
}

TEST_P(IoEngineTest, ABatchCanBeCancelled) {
  Pipe pipe;
  std::vector<std::byte> memory(12 * 512), zeros(4096);
  std::vector<IoOp> ops;
  for (size_t i = 0; i < 12; ++i) {  // 8 in flight, 4 waiting
    ops.push_back(pipe.Read(std::span(memory).subspan(i * 512, 512)));
  }
  IoBatch batch, other;
  engine_->Submit(ops, batch);
  IoOp bystander{IoKind::kRead, IoPriority::kScrub, fd_.get(), 0, {{zeros.data(), 4096}}, 0};
  engine_->Submit({&bystander, 1}, other);
  engine_->Cancel(batch, ECANCELED);
  pipe.CloseWriteEnd();  // ends the reads that the kernel does not give back
  batch.Wait();
  other.Wait();
  ASSERT_OK(CheckComplete(bystander, "read"));
  size_t cancelled = 0;
  for (const IoOp& op : ops) {
    if (op.result == 0) continue;
    EXPECT_EQ(op.result, -ECANCELED);
    EXPECT_CODE(CheckComplete(op, "read"), Code::kCancelled);
    ++cancelled;
  }
  EXPECT_GE(cancelled, 4u);
  // The batch and its slots are as good as new.
  ASSERT_OK(ReadFully(*engine_, fd_.get(), 0, zeros, IoPriority::kScrub, "read"));
  IoOp again = bystander;
  engine_->Submit({&again, 1}, batch);
  batch.Wait();
  ASSERT_OK(CheckComplete(again, "read"));
}

TEST_P(IoEngineTest, DestructionWaitsForTheKernelAndCancelsTheRest) {
  std::vector<std::weak_ptr<Request>> left;
  auto pipe = std::make_shared<Pipe>();
  for (int i = 0; i < 12; ++i) {
    auto request = std::make_shared<Request>();
    request->pipe = pipe;
    request->ops.push_back(pipe->Read(std::span(request->memory).first(512)));
    left.push_back(request);
    engine_->SubmitOwned(request->ops, request->batch, request);
  }
  std::thread closer([&] {
    std::this_thread::sleep_for(kSoon);
    pipe->CloseWriteEnd();
  });
  engine_.reset();
  for (const auto& request : left) EXPECT_TRUE(request.expired());
  closer.join();
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
      // Again where nobody took it: the thread sanitizer keeps a signal for the next call that it
      // knows, and one that comes just before the thread begins to read waits as long as the read.
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

TEST_P(IoEngineTest, RandomDeadlinesAndCancellationsLoseNothing) {
  const uint64_t seed = Seed("io_engine");
  std::vector<std::byte> data(1 << 20);
  FillRow(5, 0, 0, data);
  ASSERT_OK(WriteFully(*engine_, fd_.get(), 0, data, IoPriority::kWrite, "write"));
  std::atomic<int> wrong{0}, alive{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 rng(seed + t);
      for (int i = 0; i < 200; ++i) {
        struct Reads {
          explicit Reads(std::atomic<int>& counter) : count(counter) { ++count; }
          ~Reads() { --count; }
          std::atomic<int>& count;
          std::vector<std::byte> memory = std::vector<std::byte>(32 * 4096);
          std::vector<IoOp> ops;
          IoBatch batch;
        };
        auto reads = std::make_shared<Reads>(alive);
        for (size_t k = 0; k < 1 + rng() % 32; ++k) {
          reads->ops.push_back({IoKind::kRead,
                                static_cast<IoPriority>(rng() % kIoPriorities),
                                fd_.get(),
                                rng() % 256 * 4096,
                                {{reads->memory.data() + k * 4096, 4096}},
                                0});
        }
        if (rng() % 2) {
          reads->batch.SetDeadline(IoBatch::Clock::now() + std::chrono::microseconds(rng() % 300));
        }
        engine_->SubmitOwned(reads->ops, reads->batch, reads);
        if (rng() % 4 == 0) engine_->Cancel(reads->batch, ECANCELED);
        if (rng() % 8 == 0 || !engine_->Finish(reads->batch)) continue;
        for (size_t k = 0; k < reads->ops.size(); ++k) {
          const IoOp& op = reads->ops[k];
          const bool right = op.result == 4096 ? std::memcmp(reads->memory.data() + k * 4096,
                                                             data.data() + op.offset, 4096) == 0
                                               : op.result == -ETIMEDOUT || op.result == -ECANCELED;
          wrong += !right;
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
  engine_.reset();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(alive, 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, IoEngineTest,
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads), BackendName);

}  // namespace
}  // namespace prefixd::storage
