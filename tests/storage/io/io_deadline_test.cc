// Tests operations whose end no caller awaits: deadlines, cancellation, an engine that is
// destroyed.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "tests/storage/io/io_engine_fixture.h"

namespace prefixd::storage {
namespace {

class IoDeadlineTest : public IoEngineTest {};

// A Request owns everything that one caller may leave behind.
struct Request {
  std::shared_ptr<Pipe> pipe = std::make_shared<Pipe>();
  std::vector<std::byte> memory = std::vector<std::byte>(4096);
  std::vector<IoOp> ops;
  IoBatch batch;
};

TEST_P(IoDeadlineTest, ADeadlineEndsTheWaitAndTheKernelKeepsWhatItHolds) {
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
  pipe->Write(4096);  // the reads that the kernel still holds end in memory that still exists
  engine_.reset();
  EXPECT_TRUE(left.expired());
}

TEST_P(IoDeadlineTest, ABatchWithoutAnOwnerIsWaitedFor) {
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

TEST_P(IoDeadlineTest, WhatWaitsPastItsDeadlineNeverReachesTheDisk) {
  // The kernel holds all operations that the engine may have in flight; the write waits behind
  // them.
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
  const auto soon = IoBatch::Clock::now() + kSoon;  // of both: what expires, expires together
  late.SetDeadline(soon);
  lazy.SetDeadline(soon);
  engine_->Submit({&awaited, 1}, late);
  engine_->Submit({&unawaited, 1}, lazy);
  EXPECT_TRUE(engine_->Finish(late));
  EXPECT_EQ(awaited.result, -ETIMEDOUT);
  EXPECT_CODE(CheckComplete(awaited, "write"), Code::kUnavailable);
  EXPECT_FALSE(blocked.WaitUntil(IoBatch::Clock::now()));
  // No caller waited for the other: the engine finds it expired when its turn comes.
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

TEST_P(IoDeadlineTest, ABatchCanBeCancelled) {
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
  // The batch and the engine's slots can be used again.
  ASSERT_OK(ReadFully(*engine_, fd_.get(), 0, zeros, IoPriority::kScrub, "read"));
  IoOp again = bystander;
  engine_->Submit({&again, 1}, batch);
  batch.Wait();
  ASSERT_OK(CheckComplete(again, "read"));
}

TEST_P(IoDeadlineTest, DestructionWaitsForTheKernelAndCancelsTheRest) {
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

TEST_P(IoDeadlineTest, RandomDeadlinesAndCancellationsLoseNothing) {
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

INSTANTIATE_TEST_SUITE_P(Backends, IoDeadlineTest,
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads), BackendName);

}  // namespace
}  // namespace prefixd::storage
