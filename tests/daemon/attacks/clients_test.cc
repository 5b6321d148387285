// What a hostile client of the real daemon can try with names, numbers and connections.
// docs/security.md lists the attacks.
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/every_page.h"
#include "tests/daemon/connections/connect.h"
#include "tests/daemon/connections/raw_client.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/expect_ok.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

namespace fs = std::filesystem;
using testing::ConnectTo;
using testing::DaemonDir;
using testing::DaemonProcess;
using testing::Eventually;
using testing::RawClient;
using wire::Json;
using wire::MessageType;

std::set<std::string> FilesBelow(const fs::path& dir) {
  std::set<std::string> all;
  for (const auto& entry : fs::recursive_directory_iterator(dir)) {
    all.insert(fs::relative(entry.path(), dir).string());
  }
  return all;
}

// Names are data: no file is called by one, and an id that looks like a path is nobody's.
TEST(ClientAttacks, NamesAreNeverPaths) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path());
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  for (const char* name : {"../../escape", "/tmp/prefixd-escape", "..", "a/b", "%2e%2e%2f",
                           "catalog/../../x", "a\\b", ".", "-rf"}) {
    ConnectOptions options;
    options.tenant = name;
    const auto client = ConnectTo(daemon, options);
    ASSERT_TRUE(client);
    auto prompt = testing::MakePrompt(100, testing::Seed("ClientAttacks.Names"));
    prompt.model.name = name;
    const auto put = testing::PutPrompt(*client, prompt, name);
    ASSERT_OK(put);
    EXPECT_EQ(client->Match({.model = name, .tokens = prompt.tokens})->n_tokens, 100u);
    const std::string id = put->prefix;
    for (const std::string& path :
         {"../" + id, "segments/" + id, id + ".seg", id + std::string(1, '\0'), "/" + id,
          std::string("../../../../etc/passwd"), std::string(name)}) {
      EXPECT_EQ(client->Prefix(path).error().code, Code::kNotFound) << path;
      EXPECT_EQ(client->Remove(path).error().code, Code::kNotFound) << path;
      const auto attached = client->Attach({.model = name, .prefix = path});
      EXPECT_EQ(attached.error().code, Code::kNotFound) << path;
    }
  }
  // Only files that the daemon names lie there, and nothing outside.
  for (const auto& entry : fs::directory_iterator(dir.path() / "store" / "segments")) {
    const std::string file = entry.path().filename();
    const std::set<std::string> known = {".seg", ".blob", ".tmp"};  // .tmp: being written
    EXPECT_TRUE(known.contains(entry.path().extension())) << file;
    EXPECT_EQ(file.find_first_not_of("0123456789abcdef"), 32u) << file;
  }
  const std::set<std::string> beside = FilesBelow(dir.path());
  EXPECT_EQ(std::ranges::count_if(beside,
                                  [](const std::string& file) {
                                    return file.find("escape") != std::string::npos ||
                                           file.find("-rf") == 0;
                                  }),
            0);
  EXPECT_FALSE(fs::exists("/tmp/prefixd-escape"));
}

uint64_t ResidentBytes(pid_t pid) {
  uint64_t pages = 0;
  std::ifstream statm("/proc/" + std::to_string(pid) + "/statm");
  statm >> pages >> pages;
  return pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// Lengths cost nothing until the bytes come, and what is too long is refused before it is read.
TEST(ClientAttacks, AnnouncedLengthsTakeNoMemory) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path(), {"--max-frame-mib", "256", "--frame-timeout", "60"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const auto client = ConnectTo(daemon);
  ASSERT_TRUE(client);
  ASSERT_OK(testing::PutPrompt(*client, testing::MakePrompt(100, 1)));
  const uint64_t before = ResidentBytes(daemon.pid());
  std::vector<std::unique_ptr<RawClient>> bombs;
  for (int i = 0; i < 24; ++i) {
    auto bomb = std::make_unique<RawClient>(daemon.address());
    ASSERT_OK(bomb->Call(MessageType::kHello, {{"tenant", "bomber"}, {"shared_memory", false}}));
    // A frame of 256 MiB, of which 64 bytes come.
    const std::vector<std::byte> few(64);
    ASSERT_OK(bomb->SendBytes(MessageType::kMatch, wire::PackControl({{"match", {{"model", "m"}}}}),
                              few, 256ull << 20));
    bombs.push_back(std::move(bomb));
  }
  EXPECT_OK(client->Stats());
  EXPECT_LT(ResidentBytes(daemon.pid()), before + (256ull << 20));
  // Containers that say they hold 2^32 - 1 elements.
  for (const unsigned char kind : {0xdd, 0xdf, 0xdb, 0xc6}) {
    RawClient raw(daemon.address());
    ASSERT_OK(raw.Call(MessageType::kHello, {{"tenant", "bomber"}, {"shared_memory", false}}));
    const std::vector<std::byte> control = {std::byte{0x81}, std::byte{0xa1}, std::byte{'x'},
                                            std::byte{kind}, std::byte{0xff}, std::byte{0xff},
                                            std::byte{0xff}, std::byte{0xff}};
    ASSERT_OK(raw.SendBytes(MessageType::kMatch, control, {}, 0));
    const auto answer = raw.Receive();
    ASSERT_FALSE(answer.ok());
    EXPECT_EQ(answer.error().code, Code::kInvalidArgument) << answer.error().message;
  }
  EXPECT_LT(ResidentBytes(daemon.pid()), before + (256ull << 20));
  EXPECT_OK(testing::PutPrompt(*client, testing::MakePrompt(100, 2)));
}

// The daemon has no descriptor left: whoever is connected is answered, and it goes on as before
// when there are some again.
TEST(ClientAttacks, WithoutDescriptorsTheDaemonGoesOn) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path(), {"--listen", "127.0.0.1:0", "--max-connections", "128"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const auto client = ConnectTo(daemon);
  ASSERT_TRUE(client);
  const auto first = testing::MakePrompt(100, 1);
  ASSERT_OK(testing::PutPrompt(*client, first));
  const fs::path open_files = "/proc/" + std::to_string(daemon.pid()) + "/fd";
  const auto open = [&] {
    return static_cast<rlim_t>(std::distance(fs::directory_iterator(open_files), {}));
  };
  // As if the system had given out all that it has.
  const rlimit tight{open() + 12, open() + 12};
  ASSERT_EQ(::prlimit(daemon.pid(), RLIMIT_NOFILE, &tight, nullptr), 0);
  std::vector<Socket> flood;
  for (int i = 0; i < 64; ++i) {
    auto socket = Socket::Connect(*Address::Parse(daemon.tcp_address()),
                                  Socket::Clock::now() + std::chrono::seconds(20));
    ASSERT_OK(socket);
    flood.push_back(*std::move(socket));
  }
  ASSERT_TRUE(Eventually([&] { return open() >= tight.rlim_cur - 1; }));
  EXPECT_OK(client->Stats());
  const auto matched = [&]() -> Result<uint32_t> {
    const auto match = client->Match({.model = first.model.name, .tokens = first.tokens});
    if (!match.ok()) return match.error();
    return match->n_tokens;
  };
  // What needs a file to be opened says what is missing.
  auto found = matched();
  if (found.ok()) {
    EXPECT_EQ(*found, 100u);
  } else {
    EXPECT_EQ(found.error().code, Code::kResourceExhausted) << found.error().message;
  }
  const auto put = testing::PutPrompt(*client, testing::MakePrompt(100, 2));
  if (!put.ok()) {
    EXPECT_EQ(put.error().code, Code::kResourceExhausted) << put.error().message;
  }
  flood.clear();
  ASSERT_TRUE(Eventually([&] {
    const auto another = RemoteStore::Connect(daemon.address(), {});
    return another.ok() && testing::PutPrompt(**another, testing::MakePrompt(100, 3)).ok();
  }));
  found = matched();
  ASSERT_OK(found);
  EXPECT_EQ(*found, 100u);
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.Stderr();
}

}  // namespace
}  // namespace prefixd
