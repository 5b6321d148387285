// Tests what operators do with prefixctl against the real daemon: explain, rewriting, backup and
// restore, and the doctor on this machine.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "prefixd/restore.h"
#include "tests/prefixctl/prefixctl_fixture.h"

namespace prefixd {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::Finished;
using testing::RunProgram;

class OperateTest : public testing::PrefixctlFixture {
 protected:
  OperateTest() : PrefixctlFixture(testing::MakePrompt(120, 6), "a label") {}

  std::string TokenFile(std::vector<uint32_t> tokens, bool as_json) {
    const fs::path path = dir_.path() / (as_json ? "tokens.json" : "tokens.txt");
    std::ofstream out(path);
    if (as_json) {
      out << json(tokens).dump();
    } else {
      for (const uint32_t t : tokens) out << t << "\n";
    }
    return path;
  }
  Finished ExplainFile(const std::string& file, const std::vector<std::string>& more = {}) {
    std::vector<std::string> args = {"explain", "--model",  "test-model", "--tokens",
                                     file,      "--tenant", "team-a"};
    args.insert(args.end(), more.begin(), more.end());
    return Run(args);
  }
};

TEST_F(OperateTest, TopShowsATenantItsOwnAndAnOperatorAll) {
  AttachSpec spec;
  spec.model = prompt_.model.name;
  spec.tokens = prompt_.tokens;
  spec.policy.k = 8;
  const auto session = client_->Attach(spec);
  ASSERT_TRUE(session.ok());
  const Finished own = Run({"top", "--once", "--tenant", "team-a"});
  EXPECT_EQ(own.code, 0) << own.err;
  EXPECT_NE(own.out.find("120 tokens by 1 attaches"), std::string::npos) << own.out;
  EXPECT_NE(own.out.find(prefix_.substr(0, 12)), std::string::npos) << own.out;
  EXPECT_EQ(own.out.find('\x1b'), std::string::npos);
  const Finished other = Run({"top", "--once", "--tenant", "team-b"});
  EXPECT_EQ(other.out.find("team-a"), std::string::npos) << other.out;
  EXPECT_EQ(other.out.find(prefix_.substr(0, 12)), std::string::npos) << other.out;
  const Finished all = Run({"top", "--once", "--json", "--all-tenants"});
  const json parsed = json::parse(all.out, nullptr, false);
  ASSERT_EQ(parsed["watch"]["sessions"].size(), 1u) << all.out;
  EXPECT_EQ(parsed["watch"]["sessions"][0]["tenant"], "team-a");
}

TEST_F(OperateTest, ExplainsWhyAPromptMisses) {
  std::vector<uint32_t> other = prompt_.tokens;
  other[70] += 1;
  for (const bool as_json : {true, false}) {
    const Finished text = ExplainFile(TokenFile(other, as_json));
    EXPECT_EQ(text.code, 0) << text.err;
    EXPECT_NE(text.out.find("70 of 120 tokens hit"), std::string::npos) << text.out;
    EXPECT_NE(text.out.find("diverges: "), std::string::npos) << text.out;
  }
  const Finished whole = ExplainFile(TokenFile(prompt_.tokens, true), {"--json"});
  const json all = json::parse(whole.out, nullptr, false);
  EXPECT_EQ(all["match"]["n_tokens"], 120);
  EXPECT_EQ(all["misses"].size(), 0u);
  std::ofstream(dir_.path() / "identity.json") << R"({"identity": {"weights": "another"}})";
  const Finished differs =
      ExplainFile(TokenFile(prompt_.tokens, true), {"--identity", dir_.path() / "identity.json"});
  EXPECT_NE(differs.out.find("model_differs: "), std::string::npos) << differs.out << differs.err;
  EXPECT_NE(differs.out.find("weights (another, stored: random)"), std::string::npos);
  // Nothing of it is told to others.
  const Finished foreign = Run({"explain", "--model", "test-model", "--tokens",
                                TokenFile(prompt_.tokens, true), "--tenant", "team-b"});
  EXPECT_NE(foreign.out.find("0 of 120 tokens hit\nnothing_stored: "), std::string::npos)
      << foreign.out;
  for (const char* wrong : {"1 2 three", "[1, -2]", "[1.5]", "[", "", "4294967296", "{}"}) {
    std::ofstream(dir_.path() / "wrong") << wrong;
    const Finished f = ExplainFile(dir_.path() / "wrong");
    EXPECT_EQ(f.code, 1) << wrong;
    EXPECT_NE(f.err.find("wrong"), std::string::npos) << f.err;
  }
  EXPECT_EQ(ExplainFile("/nonexistent").code, 1);  // 3 is for what the daemon does not have
  EXPECT_EQ(Run({"explain", "--model", "test-model"}).code, 2);
}

TEST_F(OperateTest, ExplainsWhatAPromptCosts) {
  const std::string file = TokenFile(prompt_.tokens, true);
  const Finished unknown = ExplainFile(file);
  EXPECT_NE(unknown.out.find("restore: unknown, "), std::string::npos) << unknown.out;
  EXPECT_NE(unknown.out.find("\nretrieve: unknown for each generated token\nrecompute: unknown\n"
                             "fastest: unknown\n"),
            std::string::npos)
      << unknown.out;
  // Read from the disk, and then from memory.
  for (int i = 0; i < 2; ++i) {
    AttachSpec spec;
    spec.model = prompt_.model.name;
    spec.tokens = prompt_.tokens;
    spec.policy.mode = StepMode::kFull;
    const auto session = client_->Attach(spec);
    ASSERT_TRUE(session.ok());
    auto restore = Restore::Begin(*session, {});
    ASSERT_TRUE(restore.ok());
    for (auto run = (*restore)->Next(); run.ok() && run->has_value();) run = (*restore)->Next();
  }
  const Finished slow = ExplainFile(file, {"--prefill-rate", "0.5"});
  EXPECT_NE(slow.out.find("s (measured), "), std::string::npos) << slow.out;
  EXPECT_NE(slow.out.find("recompute: 240 s (given) at 0.5 tokens/s\nfastest: restore\n"),
            std::string::npos)
      << slow.out;
  const Finished fast = ExplainFile(file, {"--prefill-rate", "1e15"});
  EXPECT_NE(fast.out.find("fastest: recompute\n"), std::string::npos) << fast.out;
}

TEST_F(OperateTest, RewritesAPrefix) {
  ASSERT_TRUE(client_->WaitReady(prefix_, {}).ok());
  const Finished compact = Run({"prefixes", "compact", prefix_, "--tenant", "team-a"});
  EXPECT_EQ(compact.code, 0) << compact.err;
  EXPECT_NE(compact.out.find("joined 0 segments"), std::string::npos) << compact.out;
  const Finished recluster =
      Run({"prefixes", "recluster", prefix_, "--tenant", "team-a", "--json"});
  EXPECT_EQ(recluster.code, 0) << recluster.err;
  EXPECT_EQ(json::parse(recluster.out, nullptr, false)["segments"], 1);
  EXPECT_EQ(Run({"prefixes", "recluster", prefix_}).code, 3);  // another tenant's
}

TEST_F(OperateTest, CompressesAPrefix) {
  ASSERT_TRUE(client_->WaitReady(prefix_, {}).ok());
  const std::vector<std::string> compress = {"prefixes", "compress", prefix_,  "--tenant", "team-a",
                                             "--policy", "window",   "--keep", "0.5"};
  std::vector<std::string> dry = compress;
  dry.insert(dry.end(), {"--dry-run", "--json"});
  const Finished measured = Run(dry);
  EXPECT_EQ(measured.code, 0) << measured.err;
  EXPECT_EQ(json::parse(measured.out, nullptr, false)["compressed"], false);
  const Finished done = Run(compress);
  EXPECT_EQ(done.code, 0) << done.err;
  EXPECT_NE(done.out.find("kept "), std::string::npos) << done.out;
  const Finished show = Run({"prefixes", "show", prefix_, "--tenant", "team-a"});
  EXPECT_NE(show.out.find(" saved"), std::string::npos) << show.out;
  EXPECT_EQ(Run(compress).code, 1);
  EXPECT_EQ(Run({"prefixes", "compress", prefix_, "--policy", "lru"}).code, 2);
}

TEST_F(OperateTest, MakesKeysAndEncryptsWithThem) {
  const std::string file = dir_.path() / "store.key";
  const Finished none = Run({"prefixes", "encrypt", "--tenant", "team-a"});
  EXPECT_EQ(none.code, 1);
  EXPECT_NE(none.err.find("store.encryption_key_file"), std::string::npos) << none.err;
  const Finished made = RunProgram(PREFIXCTL_BINARY, {"key", "new", file, "--json"});
  ASSERT_EQ(made.code, 0) << made.err;
  const std::string key = json::parse(made.out, nullptr, false)["key"];
  EXPECT_EQ(RunProgram(PREFIXCTL_BINARY, {"key", "new", file}).code, 1);
  EXPECT_EQ(RunProgram(PREFIXCTL_BINARY, {"key", "add", file}).code, 0);
  const Finished both = RunProgram(PREFIXCTL_BINARY, {"key", "check", file});
  EXPECT_NE(both.out.find("key " + key + "\n"), std::string::npos) << both.out;
  EXPECT_NE(both.out.find("  new files take it"), std::string::npos) << both.out;

  daemon_ = nullptr;
  daemon_ = std::make_unique<testing::DaemonProcess>(
      dir_.path(), std::vector<std::string>{"--encryption-key-file", file});
  ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  const Finished encrypted = Run({"prefixes", "encrypt", "--all-tenants"});
  ASSERT_EQ(encrypted.code, 0) << encrypted.err;
  EXPECT_NE(encrypted.out.find("1 prefix: encrypted 1 segment, "), std::string::npos)
      << encrypted.out;
  const Finished again = Run({"prefixes", "encrypt", "--all-tenants", "--json"});
  EXPECT_EQ(json::parse(again.out, nullptr, false)["rewritten"], 0) << again.out;
  const std::string backup = dir_.path() / "backup", restored = dir_.path() / "restored";
  ASSERT_EQ(Run({"backup", backup, "--key-file", file}).code, 0);
  const Finished without = RunProgram(PREFIXCTL_BINARY, {"restore", backup, "--dir", restored});
  EXPECT_EQ(without.code, 1);
  EXPECT_NE(without.err.find("encrypted under key "), std::string::npos) << without.err;
  fs::remove_all(restored);
  const Finished with =
      RunProgram(PREFIXCTL_BINARY, {"restore", backup, "--dir", restored, "--key-file", file});
  EXPECT_EQ(with.code, 0) << with.err;
  const auto recover = [&](const std::vector<std::string>& more) {
    std::vector<std::string> args = {"recover", "--dir", restored};
    args.insert(args.end(), more.begin(), more.end());
    return RunProgram(PREFIXCTL_BINARY, args).code;
  };
  EXPECT_EQ(recover({}), 1);
  EXPECT_EQ(recover({"--key-file", file}), 0);
}

TEST_F(OperateTest, BacksUpARunningDaemonAndRestores) {
  const std::string backup = dir_.path() / "backup", restored = dir_.path() / "restored" / "store";
  fs::create_directories(dir_.path() / "restored");
  const Finished first = Run({"backup", backup, "--json"});
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(json::parse(first.out, nullptr, false)["generation"], 1);
  const Finished second = Run({"backup", backup});
  ASSERT_EQ(second.code, 0) << second.err;
  EXPECT_NE(second.out.find("copied and verified"), std::string::npos);
  ASSERT_TRUE(client_->Remove(prefix_).ok());
  const Finished restore = RunProgram(PREFIXCTL_BINARY, {"restore", backup, "--dir", restored});
  ASSERT_EQ(restore.code, 0) << restore.err;
  EXPECT_NE(restore.out.find("has 1 prefixes"), std::string::npos) << restore.out;
  EXPECT_EQ(RunProgram(PREFIXCTL_BINARY, {"restore", backup, "--dir", restored}).code, 1);
  EXPECT_EQ(RunProgram(PREFIXCTL_BINARY, {"restore", restored, "--dir", backup + "x"}).code, 3);
  // Its directory is in use while the daemon runs on it.
  EXPECT_EQ(Run({"backup", backup, "--dir", dir_.path() / "store"}).code, 1);
  StartIn(dir_.path() / "restored");
  const Finished list = Run({"prefixes", "list", "--all-tenants"});
  EXPECT_NE(list.out.find(prefix_), std::string::npos) << list.out;
  const Finished verify = Run({"prefixes", "verify", "--all-tenants"});
  EXPECT_EQ(verify.code, 0) << verify.err;
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->Wait(), 0);
  const Finished offline = RunProgram(
      PREFIXCTL_BINARY, {"backup", dir_.path() / "offline", "--dir", restored, "--json"});
  ASSERT_EQ(offline.code, 0) << offline.err;
  EXPECT_EQ(json::parse(offline.out, nullptr, false)["damaged"].size(), 0u);
  EXPECT_EQ(RunProgram(PREFIXCTL_BINARY, {"backup", backup, "--dir", "/nonexistent"}).code, 3);
}

// Whom the directory belongs to does it: as root the store would get files that its daemon cannot
// open, and a chown, as a refusal of the directory would suggest, keeps the daemon out.
TEST_F(OperateTest, RootIsToldWhoBacksUpADirectory) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give directories to others";
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->Wait(), 0);
  const fs::path store = dir_.path() / "store";
  ASSERT_EQ(::chown(store.c_str(), 12345, 12345), 0);
  const Finished refused =
      RunProgram(PREFIXCTL_BINARY, {"backup", dir_.path() / "backup", "--dir", store});
  EXPECT_EQ(refused.code, 1);
  EXPECT_NE(refused.err.find("do this as that user (setpriv --reuid 12345"), std::string::npos)
      << refused.err;
  EXPECT_EQ(refused.err.find("it must belong"), std::string::npos) << refused.err;
}

// The doctor's findings by name.
std::map<std::string, json> Findings(const Finished& doctor) {
  std::map<std::string, json> out;
  const json all = json::parse(doctor.out, nullptr, false);
  EXPECT_TRUE(all.is_object()) << doctor.out << doctor.err;
  if (!all.is_object()) return out;
  int worst = 0;
  for (const json& finding : all["findings"]) {
    out[finding["name"]] = finding;
    const int level = finding["level"] == "ok" ? 0 : finding["level"] == "warn" ? 1 : 2;
    worst = std::max(worst, level);
    EXPECT_EQ(finding["advice"].get<std::string>().empty(), level == 0) << finding;
    EXPECT_FALSE(finding["found"].get<std::string>().empty()) << finding;
  }
  EXPECT_EQ(doctor.code, worst);
  return out;
}

TEST_F(OperateTest, TheDoctorTriesWhatTheStoreNeeds) {
  const std::string store = dir_.path() / "store";
  auto found = Findings(Run({"doctor", "--dir", store, "--json"}));
  for (const char* name : {"kernel", "processor", "GPU", "clock", "open files", "locked memory",
                           "huge pages", "shared memory", "control group", "io_uring", "O_DIRECT",
                           "file system", "disk space", "directory", "socket"}) {
    EXPECT_TRUE(found.contains(name)) << name;
  }
  EXPECT_EQ(found["directory"]["level"], "ok") << found["directory"];
  EXPECT_EQ(found["socket"]["level"], "ok") << found["socket"];
  EXPECT_EQ(found["shared memory"]["level"], "ok");
  // The daemon on this machine and the doctor see the same.
  const bool uring = client_->Stats()->io_backend == "io_uring";
  EXPECT_EQ(found["io_uring"]["level"] == "ok", uring) << found["io_uring"];
  // Nothing stays behind.
  for (const auto& entry : fs::directory_iterator(store)) {
    EXPECT_EQ(entry.path().string().find("doctor"), std::string::npos) << entry.path();
  }
  EXPECT_NE(Run({"doctor", "--dir", store}).out.find("O_DIRECT"), std::string::npos);
}

TEST_F(OperateTest, TheDoctorSaysWhatIsAmiss) {
  const fs::path store = dir_.path() / "open";
  fs::create_directory(store);
  const auto directory = [&](mode_t mode) {
    ::chmod(store.c_str(), mode);
    return Findings(Run({"doctor", "--dir", store, "--json"}))["directory"]["level"];
  };
  EXPECT_EQ(directory(0777), "fail");
  EXPECT_EQ(directory(0755), "warn");
  EXPECT_EQ(directory(0700), "ok");
  fs::create_directory_symlink(store, dir_.path() / "link");
  // A store's directory may be linked as a whole, which the daemon advises.
  const auto linked = [&](const char* name) {
    return Findings(Run({"doctor", "--dir", dir_.path() / name, "--json"}))["directory"]["level"];
  };
  EXPECT_EQ(linked("link"), "ok");
  fs::create_directory_symlink(dir_.path() / "nowhere", dir_.path() / "dangling");
  EXPECT_EQ(linked("dangling"), "fail");
  EXPECT_EQ(Findings(Run({"doctor", "--dir", dir_.path() / "new", "--json"}))["directory"]["level"],
            "ok");
  const Finished unwritten = RunProgram(
      "/bin/sh",
      {"-c", "exec " PREFIXCTL_BINARY " doctor --dir " + store.string() + " > /dev/full"});
  EXPECT_GE(unwritten.code, 1);
  EXPECT_NE(unwritten.err.find("cannot write the output"), std::string::npos) << unwritten.err;
  // Low limits, in a child.
  const auto limited = [&](const std::string& limit) {
    return Findings(RunProgram(
        "/bin/sh",
        {"-c", limit + " && exec " PREFIXCTL_BINARY " doctor --json --dir " + store.string()}));
  };
  EXPECT_EQ(limited("ulimit -n 64")["open files"]["level"], "fail");
  // What the doctor lets pass, the daemon takes.
  EXPECT_EQ(limited("ulimit -n 319")["open files"]["level"], "fail");
  EXPECT_EQ(limited("ulimit -n 320")["open files"]["level"], "warn");
  for (const int files : {319, 320}) {
    const std::string dir = dir_.path() / std::to_string(files);
    const Finished started = RunProgram(
        "/bin/sh", {"-c", "ulimit -n " + std::to_string(files) + " && timeout -k 5 2 " +
                              PREFIXD_BINARY " --min-free-mib 0 --host-tier-mib 16 --dir " + dir +
                              " --socket " + dir + ".sock"});
    EXPECT_EQ(started.out.starts_with("prefixd ready"), files == 320) << started.err;
  }
  EXPECT_EQ(limited("ulimit -n 1024")["open files"]["level"], "warn");
  EXPECT_EQ(limited("ulimit -l 64")["locked memory"]["level"], "warn");
  std::ofstream(dir_.path() / "plain") << "x";
  const auto plain = Findings(RunProgram(
      PREFIXCTL_BINARY, {"doctor", "--json", "--dir", store, "--socket", dir_.path() / "plain"}));
  EXPECT_EQ(plain.at("socket")["level"], "fail");
  daemon_->Signal(SIGKILL);
  daemon_->Wait();
  EXPECT_EQ(Findings(Run({"doctor", "--json", "--dir", store}))["socket"]["level"], "warn");
}

}  // namespace
}  // namespace prefixd
