// Tests rows of the daemon's host tier that clients read in place: a tenant sees only its own, and
// its pins end with its connection.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "client_lib/remote_session.h"
#include "client_lib/remote_store.h"
#include "tests/daemon/connections/connect.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::ConnectTo;
using testing::DaemonDir;
using testing::DaemonProcess;
using testing::MakePrompt;

// Makes a prompt in whose rows every byte is the same.
testing::Prompt PlainPrompt(uint32_t n_tokens, std::byte byte) {
  testing::Prompt prompt = MakePrompt(n_tokens, 1);
  for (auto* rows : {&prompt.k, &prompt.v}) {
    for (auto& layer : *rows) std::fill(layer.begin(), layer.end(), byte);
  }
  return prompt;
}

TEST(DaemonRowsInPlace, ATenantSeesItsOwnAndChangesNothing) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path(), {"--host-tier-mib", "4"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const std::array<std::byte, 2> bytes = {std::byte{0x11}, std::byte{0x22}};
  std::vector<std::unique_ptr<RemoteStore>> clients;
  std::vector<std::shared_ptr<Session>> sessions;
  constexpr uint32_t kLongPrompt = 9000;  // 2.2 MB for each tenant
  for (size_t t = 0; t < 2; ++t) {
    ConnectOptions options;
    options.tenant = "tenant-" + std::to_string(t);
    clients.push_back(ConnectTo(daemon, options));
    const auto prompt = PlainPrompt(kLongPrompt, bytes[t]);
    auto put = testing::PutPrompt(*clients[t], prompt);
    ASSERT_TRUE(put.ok()) << put.error().message;
    auto session = clients[t]->Attach(
        {.model = prompt.model.name, .tokens = prompt.tokens, .policy = {.mode = StepMode::kFull}});
    ASSERT_TRUE(session.ok()) << session.error().message;
    sessions.push_back(*session);
  }
  std::mt19937_64 rng(testing::Seed("DaemonRowsInPlace"));
  for (int round = 0; round < 40; ++round) {
    for (size_t t = 0; t < 2; ++t) {
      const auto begin = static_cast<uint32_t>(rng() % (kLongPrompt - 700));
      std::vector<uint32_t> ids;
      for (uint32_t i = 0; i < 700; ++i) ids.push_back(begin + i);
      auto rows = sessions[t]->ReadInPlace(rng() % 2, rng() % 2, ids);
      ASSERT_TRUE(rows.ok()) << rows.error().message;
      for (const RowRef& row : rows->rows) {
        ASSERT_EQ(row.key[0], bytes[t]);
        ASSERT_EQ(row.value[31], bytes[t]);
      }
      const auto whole = rows->region.bytes;
      ASSERT_EQ(std::find(whole.begin(), whole.end(), bytes[1 - t]), whole.end());
      void* page = const_cast<std::byte*>(whole.data());
      EXPECT_EQ(::mprotect(page, whole.size(), PROT_READ | PROT_WRITE), -1);
      EXPECT_EQ(errno, EACCES);
    }
  }
  ConnectOptions admin;
  admin.admin = true;
  auto stats = ConnectTo(daemon, admin)->Stats();
  ASSERT_TRUE(stats.ok());
  ASSERT_EQ(stats->host_tenants.size(), 2u);
  for (const auto& t : stats->host_tenants) {
    // Both have halves while both hold pages. Where the file that one of them read was just
    // rewritten, it holds none, and the other may have all.
    const auto holds = [&](const HostTierTenant& u) {
      return u.tenant == t.tenant || u.memory_bytes > 0;
    };
    EXPECT_EQ(t.share_bytes, (4u << 20) / std::ranges::count_if(stats->host_tenants, holds));
    // The exact bytes held are unknown, because pages of a file that was just rewritten are
    // dropped.
    EXPECT_LE(t.bytes, 4u << 20);
    EXPECT_GT(t.hits, 0u);
    EXPECT_EQ(t.pinned_bytes, 0u);
  }
  EXPECT_EQ(stats->checksum_failures, 0u);
}

// Reads random slices in either order, and compares every byte.
void ExpectSlices(Session& session, const testing::Prompt& prompt, int rounds,
                  std::mt19937_64& rng) {
  const auto n = static_cast<uint32_t>(prompt.tokens.size());
  const RowShape row = prompt.model.geometry.row(0);
  const size_t part = row.key_bytes();
  for (int round = 0; round < rounds; ++round) {
    std::vector<LayerSlice> slices(1 + rng() % 3);
    std::vector<std::vector<std::byte>> k, v;
    std::vector<LayerRead> reads;
    for (LayerSlice& slice : slices) {
      slice.layer = static_cast<uint32_t>(rng() % 2);
      slice.tokens.begin = static_cast<uint32_t>(rng() % n);
      slice.tokens.end =
          slice.tokens.begin + 1 + static_cast<uint32_t>(rng() % (n - slice.tokens.begin));
      slice.order = rng() % 2 == 0 ? KvOrder::kHeadMajor : KvOrder::kTokenMajor;
      slice.heads = rng() % 3 == 0 ? HeadRange{static_cast<uint32_t>(rng() % 2), 1} : HeadRange{};
      const size_t bytes = slice.tokens.size() * (slice.heads.n == 1 ? 1 : 2) * part;
      k.emplace_back(bytes), v.emplace_back(bytes);
    }
    for (size_t i = 0; i < slices.size(); ++i) reads.push_back({slices[i], k[i], v[i]});
    const Status read = session.ReadLayers(reads, nullptr);
    ASSERT_TRUE(read.ok()) << read.error().message;
    for (size_t i = 0; i < slices.size(); ++i) {
      const LayerSlice& slice = slices[i];
      const uint32_t heads = slice.heads.n == 1 ? 1 : 2, tokens = slice.tokens.size();
      for (uint32_t t = 0; t < tokens; ++t) {
        for (uint32_t h = 0; h < heads; ++h) {
          const size_t at =
              slice.order == KvOrder::kHeadMajor ? size_t{h} * tokens + t : size_t{t} * heads + h;
          const size_t put = (size_t{slice.tokens.begin} + t) * 2 + slice.heads.first + h;
          ASSERT_EQ(std::memcmp(&k[i][at * part], &prompt.k[slice.layer][put * part], part), 0);
          ASSERT_EQ(std::memcmp(&v[i][at * part], &prompt.v[slice.layer][put * part], part), 0);
        }
      }
    }
  }
}

TEST(DaemonRowsInPlace, ClientsCopyLayersFromMemoryThemselves) {
  std::mt19937_64 rng(testing::Seed("DaemonRowsInPlace.Layers"));
  for (const char* recluster : {"--recluster=false", "--recluster-min-tokens=1000"}) {
    DaemonDir dir;
    DaemonProcess daemon(dir.path(), {recluster});
    ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
    const auto client = ConnectTo(daemon);
    ASSERT_TRUE(client);
    const auto prompt = MakePrompt(30'000, rng());
    ASSERT_TRUE(testing::PutPrompt(*client, prompt).ok());
    const auto session = client->Attach(
        {.model = prompt.model.name, .tokens = prompt.tokens, .policy = {.mode = StepMode::kFull}});
    ASSERT_TRUE(session.ok()) << session.error().message;
    // The first reads find some of it on the disk, and rows may be reclustered meanwhile.
    ExpectSlices(**session, prompt, 30, rng);
    const auto place = static_cast<RemoteSession&>(**session).Find();
    ASSERT_TRUE(place.ok());
    EXPECT_EQ(place->connection->TierRegionIds().size(), 1u);
    const auto again = client->Attach(
        {.model = prompt.model.name, .tokens = prompt.tokens, .policy = {.mode = StepMode::kFull}});
    ASSERT_TRUE(again.ok()) << again.error().message;
    ExpectSlices(**again, prompt, 10, rng);
    // What was read is released behind it, without an answer that anybody waits for.
    uint64_t pinned = 1;
    for (int i = 0; i < 2000 && pinned > 0; ++i) {
      pinned = client->Stats()->host_tier_pinned;
      if (pinned > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_EQ(pinned, 0u);
    const auto stats = client->Stats();
    ASSERT_TRUE(stats.ok());
    EXPECT_EQ(stats->checksum_failures, 0u);
  }
}

// Rows that were being copied when the daemon let go of them are read again, never taken.
TEST(DaemonRowsInPlace, RestoresSurviveRestarts) {
  std::mt19937_64 rng(testing::Seed("DaemonRowsInPlace.Restarts"));
  DaemonDir dir;
  auto daemon = std::make_unique<DaemonProcess>(dir.path());
  ASSERT_TRUE(daemon->ready()) << daemon->Stderr();
  const auto client = ConnectTo(*daemon);
  ASSERT_TRUE(client);
  const auto prompt = MakePrompt(30'000, rng());
  ASSERT_TRUE(testing::PutPrompt(*client, prompt).ok());
  const auto session = client->Attach(
      {.model = prompt.model.name, .tokens = prompt.tokens, .policy = {.mode = StepMode::kFull}});
  ASSERT_TRUE(session.ok()) << session.error().message;
  const size_t bytes = prompt.k[0].size();
  std::vector<std::byte> k(bytes), v(bytes);
  std::atomic<bool> ended{false};
  std::thread killer([&] {
    for (int i = 0; i < 4; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300 + rng() % 100));
      daemon.reset();
      daemon = std::make_unique<DaemonProcess>(dir.path());
    }
    ended = true;
  });
  int good = 0;
  while (!ended || good == 0) {
    std::ranges::fill(k, std::byte{0});
    std::ranges::fill(v, std::byte{0});
    const Status read = (*session)->ReadLayer({.layer = 1, .tokens = {0, 30'000}}, k, v);
    if (!read.ok()) {
      EXPECT_EQ(read.error().code, Code::kUnavailable) << read.error().message;
      continue;
    }
    ++good;
    EXPECT_TRUE(k == prompt.k[1] && v == prompt.v[1]);
  }
  killer.join();
}

TEST(DaemonRowsInPlace, AKilledClientLetsGoOfThem) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path());
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const auto prompt = MakePrompt(300, testing::Seed("DaemonRowsInPlace.Killed"));
  auto client = ConnectTo(daemon);
  ASSERT_TRUE(client && testing::PutPrompt(*client, prompt).ok());
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {  // holds rows until it is killed
    auto own = RemoteStore::Connect(daemon.address(), {});
    if (!own.ok()) ::_exit(2);
    auto session = (*own)->Attach(
        {.model = prompt.model.name, .tokens = prompt.tokens, .policy = {.mode = StepMode::kFull}});
    if (!session.ok()) ::_exit(3);
    const std::vector<uint32_t> ids = {1, 100, 299};
    const auto rows = (*session)->ReadInPlace(0, 0, ids);
    const char good = rows.ok() ? 'y' : 'n';
    if (::write(pipe[1], &good, 1) != 1) ::_exit(4);
    while (true) ::pause();
  }
  char good = 0;
  EXPECT_EQ(::read(pipe[0], &good, 1), 1);
  EXPECT_EQ(good, 'y');
  EXPECT_GT(client->Stats()->host_tier_pinned, 0u);
  EXPECT_EQ(client->Stats()->sessions, 1u);
  ::kill(child, SIGKILL);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  uint64_t pinned = 1, sessions = 1;
  for (int i = 0; i < 2000 && pinned + sessions > 0; ++i) {
    const auto stats = client->Stats();
    pinned = stats->host_tier_pinned, sessions = stats->sessions;
    if (pinned + sessions > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(pinned, 0u);
  EXPECT_EQ(sessions, 0u);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

}  // namespace
}  // namespace prefixd
