// Tests a daemon whose disk is full or read-only: steps, reads and matches go on, puts are refused,
// and are taken again when the disk can be written.
#include <sys/mount.h>

#include <cstdlib>
#include <fstream>

#include "tests/client_lib/client_scenario.h"

namespace prefixd::testing {
namespace {

class UnwritableDisk : public ::testing::Test {
 protected:
  void TearDown() override {
    session_.reset();
    client_.reset();
    daemon_.reset();
    if (mounted_) {
      EXPECT_EQ(::umount(dir_.path().c_str()), 0);
    }
  }

  void Start(const std::vector<std::string>& args) {
    daemon_ = std::make_unique<DaemonProcess>(dir_.path(), args);
    ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
    auto client = Connect(daemon_->address());
    ASSERT_TRUE(client.ok()) << client.error().message;
    client_ = *std::move(client);
    const auto stored = PutPrompt(*client_, prompt_);
    ASSERT_TRUE(stored.ok()) << stored.error().message;
    ASSERT_TRUE(client_->WaitReady(stored->prefix, {}).ok());
    auto session = client_->Attach({.model = prompt_.model.name,
                                    .tokens = prompt_.tokens,
                                    .policy = {.estimator = EstimatorKind::kMoment, .k = 24}});
    ASSERT_TRUE(session.ok()) << session.error().message;
    session_ = *session;
    want_ = Serve();
    ASSERT_FALSE(want_.empty());
  }

  // Everything that reads: the same bytes each time, empty after a failure.
  std::vector<float> Serve() {
    std::vector<float> y(kQHeads * kDim), lse(kQHeads), q(kQHeads * kDim, 0.3f);
    std::vector<std::byte> rows(kTokens * prompt_.model.geometry.row(0).bytes());
    const auto fail = [](const char* what, const auto& status) {
      ADD_FAILURE() << what << ": " << status.error().message;
      return std::vector<float>();
    };
    if (const Status s = session_->Step(1, q, y, lse, nullptr); !s.ok()) return fail("step", s);
    if (const Status s = session_->ReadRange(0, 1, {0, kTokens}, rows); !s.ok()) {
      return fail("rows", s);
    }
    const auto match = client_->Match({.model = prompt_.model.name, .tokens = prompt_.tokens});
    if (!match.ok()) return fail("match", match);
    EXPECT_EQ(match->n_tokens, kTokens);
    const auto fresh = client_->Attach({.model = prompt_.model.name,
                                        .tokens = prompt_.tokens,
                                        .policy = {.mode = StepMode::kFull}});
    if (!fresh.ok()) return fail("attach", fresh);
    const auto verified = client_->Verify(match->prefix, {});
    if (!verified.ok()) return fail("verify", verified);
    EXPECT_TRUE(verified->damaged.empty());
    y.insert(y.end(), lse.begin(), lse.end());
    return y;
  }

  // Puts another prompt each time.
  Result<PutResult> PutAnother() {
    return PutPrompt(*client_, MakePrompt(kTokens, Seed("UnwritableDisk") + ++puts_));
  }

  void ExpectServedAndPutsRefused(Code code, const std::string& why) {
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(Serve(), want_);
      const auto put = PutAnother();
      ASSERT_FALSE(put.ok());
      EXPECT_EQ(put.error().code, code) << put.error().message;
      EXPECT_NE(put.error().message.find(why), std::string::npos) << put.error().message;
    }
  }

  DaemonDir dir_;
  bool mounted_ = false;
  Prompt prompt_ = MakePrompt(kTokens, Seed("UnwritableDisk"));
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Store> client_;
  std::shared_ptr<Session> session_;
  std::vector<float> want_;
  uint64_t puts_ = 0;
};

TEST_F(UnwritableDisk, FullAndWithRoomAgain) {
  mounted_ = ::mount("tmpfs", dir_.path().c_str(), "tmpfs", 0, "size=64m") == 0;
  if (!mounted_) GTEST_SKIP() << "a full disk needs a file system of its own: run as root";
  ASSERT_NO_FATAL_FAILURE(Start({"--evict", "never"}));
  const auto filler = dir_.path() / "filler";
  {
    std::ofstream out(filler, std::ios::binary);
    const std::string block(4096, 'x');
    while (out.write(block.data(), 4096).flush()) continue;
  }
  ExpectServedAndPutsRefused(Code::kResourceExhausted, "disk is");
  std::filesystem::remove(filler);
  const auto put = PutAnother();
  EXPECT_TRUE(put.ok()) << put.error().message;
  EXPECT_EQ(Serve(), want_);
}

TEST_F(UnwritableDisk, QuotaUsedUpAndRaisedByARemoval) {
  ASSERT_NO_FATAL_FAILURE(Start({"--evict", "never", "--quota-mib", "2"}));
  std::string last;
  for (int i = 0; i < 100; ++i) {
    const auto put = PutAnother();
    if (!put.ok()) break;
    last = put->prefix;
    ASSERT_TRUE(client_->WaitReady(last, {}).ok());
  }
  ExpectServedAndPutsRefused(Code::kResourceExhausted, "quota of 2097152 bytes is used up");
  ASSERT_TRUE(client_->Remove(last).ok());
  const auto put = PutAnother();
  EXPECT_TRUE(put.ok()) << put.error().message;
  EXPECT_EQ(Serve(), want_);
}

#ifdef PREFIXD_READ_ONLY_PRELOAD
TEST_F(UnwritableDisk, ReadOnlyAndWritableAgain) {
  const auto flag = dir_.path() / "read-only";
  ::setenv("PREFIXD_READ_ONLY_FLAG", flag.c_str(), 1);
  ::setenv("PREFIXD_READ_ONLY_DIR", (dir_.path() / "store").c_str(), 1);
  ::setenv("LD_PRELOAD", PREFIXD_READ_ONLY_PRELOAD, 1);
  Start({"--io", "threads"});  // the ring's writes do not pass the library
  ::unsetenv("LD_PRELOAD");
  if (HasFatalFailure()) return;
  for (int round = 0; round < 2; ++round) {
    std::ofstream(flag) << "now";
    ExpectServedAndPutsRefused(Code::kIo, "is read-only");
    const auto match = client_->Match({.model = prompt_.model.name, .tokens = prompt_.tokens});
    ASSERT_TRUE(match.ok());
    const Status kept = client_->SetLifetime(match->prefix, {true, {}});
    ASSERT_FALSE(kept.ok());
    EXPECT_EQ(kept.error().code, Code::kIo) << kept.error().message;
    std::filesystem::remove(flag);
    const auto put = PutAnother();
    EXPECT_TRUE(put.ok()) << put.error().message;
    EXPECT_EQ(Serve(), want_);
  }
}
#endif

}  // namespace
}  // namespace prefixd::testing
