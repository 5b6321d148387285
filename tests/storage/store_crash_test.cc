// kill -9 at random moments. A worker process puts prompts in a loop and reports each step over a
// pipe; whatever it had acknowledged must be there afterwards, byte for byte, and nothing else but
// the one put that may have been committing.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <map>
#include <semaphore>
#include <set>
#include <thread>

#include "storage/store_dir.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

using Tokens = std::vector<uint32_t>;

StoreOptions CrashOptions(const std::filesystem::path& dir) {
  StoreOptions o = TestOptions(dir);
  o.host_tier_bytes = 0;
  return o;
}

// One report: 'B' a put begins, 'A' it is acknowledged, 'D' a removal begins.
void Report(int fd, char what, const Tokens& tokens) {
  std::vector<uint32_t> message{static_cast<uint32_t>(what), static_cast<uint32_t>(tokens.size())};
  message.insert(message.end(), tokens.begin(), tokens.end());
  const auto* p = reinterpret_cast<const char*>(message.data());
  for (size_t left = message.size() * 4; left > 0;) {
    const ssize_t n = ::write(fd, p, left);
    if (n <= 0) _exit(3);
    p += n;
    left -= static_cast<size_t>(n);
  }
}

int Worker(const char* dir, uint64_t seed) {
  constexpr int kPipe = 3;
  auto store = PrefixStore::Open(CrashOptions(dir));
  if (!store.ok()) {
    std::fprintf(stderr, "%s\n", store.error().ToString().c_str());
    return 2;
  }
  const ModelRecord model = TestModel();
  if (!(*store)->PutModel(model).ok()) return 2;
  std::mt19937_64 rng(seed);
  std::map<SegmentId, Tokens> mine;
  while (true) {
    Tokens tokens;
    if (!mine.empty() && rng() % 2 == 0) {
      tokens = std::next(mine.begin(), static_cast<ptrdiff_t>(rng() % mine.size()))->second;
      tokens.resize(1 + rng() % tokens.size());
    }
    const Tokens more = RandomTokens(rng, 1 + rng() % 600, 1000);
    tokens.insert(tokens.end(), more.begin(), more.end());
    Report(kPipe, 'B', tokens);
    const auto id = Put(**store, model, tokens, "t", static_cast<uint32_t>(1 + rng() % 200));
    if (!id.ok()) return 2;
    Report(kPipe, 'A', tokens);
    mine[*id] = tokens;
    const std::vector<std::byte> blob(rng() % 9000, std::byte{1});
    if (!(*store)->PutBlob(*id, "b", "p", blob).ok()) return 2;
    if (mine.size() > 4) {
      const auto victim = std::next(mine.begin(), static_cast<ptrdiff_t>(rng() % mine.size()));
      if ((*store)->GetPrefix(victim->first)->children == 0) {
        Report(kPipe, 'D', victim->second);
        if (!(*store)->Remove(victim->first).ok()) return 2;
        mine.erase(victim);
      }
    }
  }
}

class CrashTest : public ::testing::Test {
 protected:
  // Runs the worker and kills it after `delay`, counted from its start or, with `when_working`,
  // from its first report; takes note of all reports.
  void RunAndKill(uint64_t seed, std::chrono::microseconds delay, bool when_working) {
    int pipe_fds[2];
    ASSERT_EQ(::pipe(pipe_fds), 0);
    const std::string path = dir_.path().string(), seed_text = std::to_string(seed);
    const char* args[] = {"crash-worker", "--worker", path.c_str(), seed_text.c_str(), nullptr};
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      ::dup2(pipe_fds[1], 3);
      ::execv("/proc/self/exe", const_cast<char* const*>(args));
      _exit(4);
    }
    ::close(pipe_fds[1]);
    std::vector<uint32_t> heard;
    std::binary_semaphore working(0);
    std::thread reader([&] {
      std::vector<char> bytes;
      char buffer[1 << 16];
      for (ssize_t n; (n = ::read(pipe_fds[0], buffer, sizeof(buffer))) > 0;) {
        if (bytes.empty()) working.release();
        bytes.insert(bytes.end(), buffer, buffer + n);
      }
      heard.resize(bytes.size() / 4);
      std::memcpy(heard.data(), bytes.data(), heard.size() * 4);
    });
    if (when_working) (void)working.try_acquire_for(std::chrono::seconds(20));
    std::this_thread::sleep_for(delay);
    ::kill(pid, SIGKILL);
    int status = 0;
    ::waitpid(pid, &status, 0);
    reader.join();
    ::close(pipe_fds[0]);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the worker gave up: " << WEXITSTATUS(status);
    Absorb(heard);
  }

  void Absorb(const std::vector<uint32_t>& heard) {
    for (size_t at = 0; at + 2 <= heard.size();) {
      const uint32_t what = heard[at], n = heard[at + 1];
      if (at + 2 + n > heard.size()) break;  // cut off by the kill
      Tokens tokens(heard.begin() + static_cast<ptrdiff_t>(at) + 2,
                    heard.begin() + static_cast<ptrdiff_t>(at) + 2 + n);
      at += 2 + n;
      if (what == 'A') {
        acknowledged_.insert(tokens);
        ++acknowledged_count_;
      }
      if (what == 'D') acknowledged_.erase(tokens);
      allowed_.insert(std::move(tokens));  // begun, so it may be there; removed, so it may linger
    }
  }

  // What is wrong with the store as it lies on the disk; empty if nothing.
  std::vector<std::string> Violations() {
    std::vector<std::string> out;
    auto opened = PrefixStore::Open(CrashOptions(dir_.path()));
    if (!opened.ok()) return {"does not open: " + opened.error().ToString()};
    PrefixStore& store = **opened;
    std::set<Tokens> visible;
    size_t files = 0;
    for (const PrefixInfo& info : store.ListPrefixes()) {
      files += 1 + store.ListBlobs(info.id).size();
      const auto prefix = store.OpenPrefix(info.id, 0);
      if (!prefix.ok()) {
        out.push_back("does not open: " + prefix.error().ToString());
        continue;
      }
      const Tokens tokens((*prefix)->tokens().begin(), (*prefix)->tokens().end());
      const auto difference = Compare(**prefix, tokens);
      if (!difference.ok()) out.push_back("does not read: " + difference.error().ToString());
      if (difference.ok() && !difference->empty()) out.push_back("wrong bytes: " + *difference);
      if (!allowed_.contains(tokens)) out.push_back("visible but never put");
      visible.insert(tokens);
    }
    for (const Tokens& tokens : acknowledged_) {
      const auto match = store.LongestMatch("m", "t", tokens);
      if (!match.ok() || match->n_tokens != tokens.size()) out.push_back("acknowledged, but lost");
    }
    if (FilesIn(CrashOptions(dir_.path()).dir / "segments") != files) out.push_back("leaked files");
    acknowledged_visible_ = visible;
    return out;
  }

  TempDir dir_;
  std::set<Tokens> acknowledged_, allowed_, acknowledged_visible_;
  size_t acknowledged_count_ = 0;
};

TEST_F(CrashTest, NothingAcknowledgedIsLostAndNothingElseAppears) {
  std::mt19937_64 rng(Seed("CrashTest"));
  for (int cycle = 0; cycle < 30; ++cycle) {
    // Some die while they open and recover, most while they put and remove.
    RunAndKill(rng(), std::chrono::microseconds(rng() % 80'000), cycle % 5 != 0);
    ASSERT_FALSE(HasFatalFailure());
    ASSERT_EQ(Violations(), std::vector<std::string>{}) << "cycle " << cycle;
    allowed_.insert(acknowledged_visible_.begin(), acknowledged_visible_.end());
  }
  std::printf("[ INFO     ] %zu puts were acknowledged\n", acknowledged_count_);
  ASSERT_GT(acknowledged_count_, 10u);

  // Negative control: the same check sees one damaged page, one lost file, one stray file.
  const auto segments = CrashOptions(dir_.path()).dir / "segments";
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(segments)) {
    if (entry.path().extension() == ".seg") files.push_back(entry.path());
  }
  ASSERT_GE(files.size(), 1u);
  FlipByte(files[0], 4096 + 100);
  EXPECT_FALSE(Violations().empty());
  FlipByte(files[0], 4096 + 100);
  EXPECT_FALSE(Violations().empty()) << "quarantined until it is verified";
  {
    auto store = PrefixStore::Open(CrashOptions(dir_.path()));
    ASSERT_OK(store);
    ASSERT_OK((*store)->Verify(nullptr, nullptr));
  }
  EXPECT_EQ(Violations(), std::vector<std::string>{});
  std::filesystem::remove(files[0]);
  EXPECT_FALSE(Violations().empty());
}

}  // namespace
}  // namespace prefixd::storage

int main(int argc, char** argv) {
  if (argc == 4 && std::string_view(argv[1]) == "--worker") {
    return prefixd::storage::Worker(argv[2], std::strtoull(argv[3], nullptr, 10));
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
