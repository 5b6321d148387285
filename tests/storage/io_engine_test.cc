// The same tests for every backend.
#include "storage/io_engine.h"

#include <fcntl.h>

#include <cerrno>
#include <thread>

#include "storage/file.h"
#include "tests/storage/store_fixture.h"

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

INSTANTIATE_TEST_SUITE_P(Backends, IoEngineTest,
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads),
                         [](const auto& param) {
                           return param.param == IoBackend::kUring ? "uring" : "threads";
                         });

}  // namespace
}  // namespace prefixd::storage
