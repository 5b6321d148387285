// Runs `prefixctl bench` as a user does, small, and checks what it writes: figures that agree with
// each other, a page, and nothing left behind.
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "measure/map/trade_off.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// A running prefixctl whose output goes to files; RunProgram's 20 seconds are too short for it.
class BenchProcess {
 public:
  BenchProcess(const fs::path& dir, std::vector<std::string> args, const std::string& path = "")
      : out_(dir / "out"), err_(dir / "err") {
    args.insert(args.begin(), {"prefixctl", "bench"});
    pid_ = ::fork();
    if (pid_ != 0) return;
    for (const auto& [file, fd] : {std::pair{out_, 1}, {err_, 2}}) {
      ::dup2(::open(file.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0644), fd);
    }
    if (!path.empty()) ::setenv("PATH", path.c_str(), 1);
    std::vector<char*> argv;
    for (std::string& a : args) argv.push_back(a.data());
    argv.push_back(nullptr);
    ::execv(PREFIXCTL_BINARY, argv.data());
    ::_exit(127);
  }
  ~BenchProcess() {
    if (code_ < 0) Signal(SIGTERM), Wait();
  }

  void Signal(int signal) const { ::kill(pid_, signal); }
  int Wait() {
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    return code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::string Out() const { return testing::ReadFile(out_); }
  std::string Err() const { return testing::ReadFile(err_); }
  // Waits until `ready` or for a minute.
  template <typename Ready>
  static bool Await(Ready ready) {
    for (int i = 0; i < 6000 && !ready(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return ready();
  }

 private:
  fs::path out_, err_;
  pid_t pid_ = -1;
  int code_ = -1;
};

class PrefixctlBenchTest : public ::testing::Test {
 protected:
  PrefixctlBenchTest() { fs::create_directory(disk_); }

  bool NothingLeft() const { return fs::is_empty(disk_); }
  int Run(std::vector<std::string> args, const std::string& path = "") {
    BenchProcess process(dir_.path(), std::move(args), path);
    const int code = process.Wait();
    out_ = process.Out();
    err_ = process.Err();
    return code;
  }
  json Figures() const {
    return json::parse(testing::ReadFile(dir_ / "figures.json"), nullptr, false);
  }
  std::string Page() const { return testing::ReadFile(dir_ / "page.html"); }
  // The arguments that all runs take: where, small, with both files.
  std::vector<std::string> Small(const std::string& name,
                                 std::vector<std::string> more = {}) const {
    std::vector<std::string> args = {name,           "--quick",         "--dir",
                                     disk_.string(), "--json",          dir_ / "figures.json",
                                     "--html",       dir_ / "page.html"};
    args.insert(args.end(), more.begin(), more.end());
    return args;
  }
  static bool Has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }

  testing::TempDir dir_;
  const fs::path disk_ = dir_ / "disk";
  std::string out_, err_;
};

// The map that the times in the figures give.
bench::TradeOff MapIn(const json& length, const json& tier) {
  std::vector<bench::SweepPoint> sweep;
  const auto median = [](const json& times, const char* what) {
    return times[what]["median"].get<double>();
  };
  for (const json& p : tier["topk"]) {
    sweep.push_back({p["k"].get<double>(),
                     {median(p["times"], "select_ms"), median(p["times"], "load_ms"),
                      median(p["times"], "compute_ms")}});
  }
  return {sweep, length["k_phi"].get<double>()};
}

TEST_F(PrefixctlBenchTest, BreakEvenIsMeasuredAndAgreesWithItself) {
  ASSERT_EQ(Run(Small("break-even",
                      {"--model", "SmolLM2-135M", "--lengths", "2048", "--prefill-rate", "1000"})),
            0)
      << err_;
  EXPECT_TRUE(NothingLeft());
  EXPECT_TRUE(Has(out_, "It takes about")) << out_;
  EXPECT_TRUE(Has(out_, "Verdict:")) << out_;
  const json figures = Figures();
  ASSERT_EQ(figures["lengths"].size(), 1u) << figures.dump().substr(0, 500);
  const json& length = figures["lengths"][0];
  EXPECT_EQ(length["tokens"], 2048);
  EXPECT_EQ(length["k_phi"], 21);
  EXPECT_NEAR(length["prefill_seconds"].get<double>(), 2.048, 1e-9);
  ASSERT_GE(length["tiers"].size(), 2u);
  EXPECT_EQ(length["tiers"][0]["name"], "rows in host memory");
  EXPECT_EQ(length["tiers"][1]["name"], "rows on the SSD");
  EXPECT_GT(length["tiers"][1]["amplification"].get<double>(), 0);
  EXPECT_EQ(length["tiers"][0]["amplification"], 0);
  EXPECT_DOUBLE_EQ(length["tiers"][0]["xi"].get<double>(), 1);
  for (const json& tier : length["tiers"]) {
    EXPECT_EQ(tier["topk"].size(), 6u);
    EXPECT_EQ(tier["topk"].back()["k"], 210);
    const bench::TradeOff map = MapIn(length, tier);
    for (const char* name : {"moment", "phi recomputed"}) {
      ASSERT_TRUE(tier["completion"].contains(name)) << name;
      const json& completion = tier["completion"][name];
      const json& times = completion["times"];
      const bench::CompletedTimes done = {
          {times["select_ms"]["median"], times["load_ms"]["median"],
           tier["topk"][0]["times"]["compute_ms"]["median"]},
          std::max(0.0, completion["estimate_ms"]["median"].get<double>())};
      for (const json& contour : completion["contours"]) {
        for (const json& point : contour["points"]) {
          const auto gamma =
              map.BreakEvenGamma(done, point["xi"], contour["c"], contour["with_selection"]);
          ASSERT_EQ(gamma.has_value(), !point["gamma"].is_null());
          if (gamma) {
            EXPECT_NEAR(*gamma, point["gamma"].get<double>(), 1e-9);
          }
        }
      }
    }
  }
  const std::string page = Page();
  for (const char* part : {"<svg", "SmolLM2-135M", "2,048 tokens", "prefers-color-scheme",
                           "rows on the SSD", "Machine"}) {
    EXPECT_TRUE(Has(page, part)) << part;
  }
  EXPECT_FALSE(Has(page, "nan"));
  const json& even = length["tiers"][0]["completion"]["moment"]["break_even"][0];
  EXPECT_EQ(even["xi"], 1);
  EXPECT_EQ(figures["ratios"]["break_even_gamma_at_xi1_moment"], even["gamma_with_selection"]);
  // What the page and the terminal conclude is what the figures hold.
  for (const json& sentence : figures["verdict"]) {
    EXPECT_GT(sentence.get<std::string>().size(), 20u);
  }
}

// The floors are measured where fio is installed; without it the rest runs and says so.
TEST_F(PrefixctlBenchTest, IoIsMeasuredWithAndWithoutFio) {
  const bool has_fio = fs::exists("/usr/bin/fio");
  for (const bool with_fio : {true, false}) {
    if (with_fio && !has_fio) continue;
    ASSERT_EQ(Run(Small("io", {"--model", "SmolLM2-135M", "--layers", "2"}),
                  with_fio ? "" : "/nonexistent"),
              0)
        << err_;
    EXPECT_TRUE(NothingLeft());
    EXPECT_TRUE(Has(out_, "Verdict:")) << out_;
    const json figures = Figures();
    EXPECT_EQ(figures["tokens"], 2048);
    EXPECT_EQ(figures["row_bytes"], 2 * 3 * 2 * 64 * 2 * 2048);
    EXPECT_EQ(figures["fio"].is_null(), !with_fio);
    EXPECT_EQ(figures["ratios"].contains("put_vs_fio"), with_fio);
    EXPECT_EQ(figures["ratios"].contains("restore_vs_fio"), with_fio);
    EXPECT_EQ(figures["ratios"].contains("reclustered_row_iops_vs_fio"), with_fio);
    EXPECT_EQ(figures["skipped"].size(), with_fio ? 0u : 1u) << figures["skipped"].dump();
    EXPECT_TRUE(figures["ratios"].contains("host_vs_memcpy"));
    EXPECT_EQ(Has(out_, "install it"), !with_fio) << out_;
    ASSERT_EQ(figures["speed"].size(), 8u);
    for (const json& line : figures["speed"]) {
      EXPECT_GT(line["ours_per_second"]["median"].get<double>(), 0) << line.dump();
      if (line["floor"].is_null()) continue;
      // The ratio is between those that the rates of two pairs allow.
      const double ratio = line["ratio"]["median"];
      const auto end = [&line](const char* side, const char* quartile) {
        const json& spread = line[side];
        return 2 * spread[quartile].get<double>() - spread["median"].get<double>();
      };
      const double low = end("ours_per_second", "p25") / end("floor_per_second", "p75");
      const double high = end("ours_per_second", "p75") / end("floor_per_second", "p25");
      EXPECT_GE(ratio, low * 0.999) << line.dump();
      EXPECT_LE(ratio, high * 1.001) << line.dump();
    }
    EXPECT_GE(figures["amplification"]["stored"].get<double>(), 1);
    // Ratios that nothing is held to are said as well.
    EXPECT_TRUE(Has(figures["verdict"].dump(), "restore of reclustered rows from host memory ("))
        << figures["verdict"].dump();
    EXPECT_TRUE(Has(Page(), "restore from host memory"));
  }
}

TEST_F(PrefixctlBenchTest, CapacityIsComputedForALogAndWithoutOne) {
  testing::WriteFile(
      dir_ / "log.jsonl",
      R"({"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": [1, 2]}
{"timestamp": 1000, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 3]}
{"timestamp": 2000, "input_length": 600, "output_length": 9, "hash_ids": [4, 5]}
)");
  ASSERT_EQ(
      Run(Small("capacity", {"--model", "SmolLM2-135M", "--log", dir_ / "log.jsonl",
                             "--prefill-rate", "500", "--disk-gb", "10", "--memory-gb", "1"})),
      0)
      << err_;
  EXPECT_TRUE(NothingLeft());
  json figures = Figures();
  const json& replay = figures["replay"];
  EXPECT_EQ(replay["endless"]["input_tokens"], 2724);
  EXPECT_EQ(replay["endless"]["hit_tokens"], 1024);
  EXPECT_EQ(replay["disk"], replay["endless"]);  // 10 GB hold them all
  EXPECT_EQ(figures["ratios"]["hit_rate_vs_ideal"], 1);
  // The third request's beginning is new: 1100 and 600 tokens are stored, not five whole blocks.
  EXPECT_EQ(replay["endless"]["distinct_tokens"], 1700);
  const double row_bytes = figures["row_bytes_per_token"];
  EXPECT_EQ(row_bytes, 30 * 3 * 64 * 2 * 2);
  // The default store writes rows of at least 2,048 tokens again, in another order.
  const double written = figures["written_per_row_byte"];
  EXPECT_GT(written, 0.9 + figures["stored_per_row_byte"].get<double>());
  EXPECT_NEAR(replay["written_bytes"].get<double>(), 1700 * row_bytes * written, 1);
  const double on_disk = row_bytes * figures["stored_per_row_byte"].get<double>();
  for (const json& length : figures["lengths"]) {
    const double n = length["tokens"];
    EXPECT_EQ(length["disk_holds"], std::floor(10e9 / (n * on_disk)));
    EXPECT_NEAR(length["prefill_seconds"].get<double>(), n / 500, 1e-6);
    const double saved =
        length["prefill_seconds"].get<double>() - length["restore_ssd_seconds"].get<double>();
    if (saved <= 0) {
      EXPECT_TRUE(length["reuse_that_pays"].is_null());
    } else {
      EXPECT_NEAR(length["reuse_that_pays"].get<double>(),
                  length["put_seconds"].get<double>() / saved, 1e-9);
      // What is made behind the put counts beside it.
      const double background = length["background_seconds"];
      EXPECT_GT(background, 0);
      EXPECT_NEAR(length["reuse_that_pays_with_background"].get<double>(),
                  (length["put_seconds"].get<double>() + background) / saved, 1e-9);
    }
  }
  EXPECT_TRUE(Has(Page(), "log.jsonl"));
  EXPECT_TRUE(Has(out_, "hits 38%")) << out_;

  ASSERT_EQ(Run(Small("capacity", {"--model", "SmolLM2-135M", "--requests", "500"})), 0) << err_;
  figures = Figures();
  EXPECT_EQ(figures["replay"]["endless"]["requests"], 500);
  double before = 0;
  for (const json& point : figures["replay"]["curve"]) {
    EXPECT_GE(point["bytes"].get<double>(), before);
    before = point["bytes"];
  }
  EXPECT_NEAR(figures["replay"]["curve"].back()["score"].get<double>(),
              figures["replay"]["endless"]["hit_share"].get<double>(), 1e-9);
  EXPECT_TRUE(NothingLeft());
}

TEST_F(PrefixctlBenchTest, BadLogsAreNamed) {
  testing::WriteFile(dir_ / "log.jsonl", "{\"timestamp\": 1}\n");
  EXPECT_EQ(Run(Small("capacity", {"--log", dir_ / "log.jsonl"})), 1);
  EXPECT_TRUE(Has(err_, "log.jsonl:1: has no input_length")) << err_;
  EXPECT_EQ(Run(Small("capacity", {"--log", dir_ / "absent"})), 1);
  EXPECT_TRUE(Has(err_, "cannot read the log")) << err_;
  EXPECT_EQ(Run({"capacity", "--log", "x", "--documents", "3"}), 2);
  EXPECT_TRUE(NothingLeft());
}

TEST_F(PrefixctlBenchTest, APlanMeasuresNothing) {
  std::ofstream(dir_ / "page.html") << "an earlier one";
  ASSERT_EQ(Run(Small("break-even", {"--plan", "--model", "SmolLM2-135M"})), 0) << err_;
  EXPECT_TRUE(Has(out_, "It takes about")) << out_;
  EXPECT_FALSE(Has(out_, "Verdict")) << out_;
  EXPECT_TRUE(NothingLeft());
  EXPECT_FALSE(fs::exists(dir_ / "figures.json"));  // no figures, and no file that looks like them
  EXPECT_EQ(Page(), "an earlier one");
}

TEST_F(PrefixctlBenchTest, AnOutputThatCannotBeWrittenIsNoSuccess) {
  std::string command = "exec \"$0\" bench";
  for (const std::string& arg : Small("break-even", {"--plan", "--model", "SmolLM2-135M"})) {
    command += " '" + arg + "'";
  }
  command += " > /dev/full 2> '" + (dir_ / "said").string() + "'";
  const pid_t child = ::fork();
  if (child == 0) {
    ::execl("/bin/sh", "sh", "-c", command.c_str(), PREFIXCTL_BINARY, nullptr);
    ::_exit(127);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  EXPECT_TRUE(Has(testing::ReadFile(dir_ / "said"), "cannot write the output"));
  EXPECT_TRUE(NothingLeft());
}

TEST_F(PrefixctlBenchTest, NothingIsLeftBehindBySignals) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    BenchProcess process(dir_.path(), {"break-even", "--model", "Llama-3.1-8B", "--lengths",
                                       "65536", "--minutes", "60", "--dir", disk_.string()});
    // It is in the middle of writing its store.
    ASSERT_TRUE(BenchProcess::Await([&] {
      std::error_code ec;
      for (const auto& e : fs::recursive_directory_iterator(disk_, ec)) {
        if (e.path().extension() == ".seg") return true;
      }
      return false;
    })) << process.Err();
    process.Signal(signal);
    EXPECT_EQ(process.Wait(), 128 + signal);
    EXPECT_TRUE(NothingLeft()) << signal;
    EXPECT_TRUE(Has(process.Err(), "nothing of it is left")) << process.Err();
  }
}

// A run that was killed could not clean up; the next one does, and leaves others' folders alone.
TEST_F(PrefixctlBenchTest, TheNextRunRemovesWhatAKilledOneLeft) {
  fs::create_directories(disk_ / "prefixd-bench-killed" / "store");
  fs::create_directories(disk_ / "mine");
  ASSERT_EQ(
      Run({"break-even", "--quick", "--plan", "--model", "SmolLM2-135M", "--dir", disk_.string()}),
      0)
      << err_;
  EXPECT_FALSE(fs::exists(disk_ / "prefixd-bench-killed"));
  EXPECT_TRUE(fs::exists(disk_ / "mine"));
}

// A killed run's processes take a while to die, and hold its folder until then. A run that begins
// at once waits for them, and leaves the folder of one that lives.
TEST_F(PrefixctlBenchTest, ARunThatBeginsAtOnceRemovesWhatAKilledOneLeft) {
  fs::create_directory(dir_ / "other");
  const auto begin = [&](const char* files) {
    // Its measuring process has much memory to give back when it dies.
    return std::make_unique<BenchProcess>(
        dir_ / files,
        std::vector<std::string>{"break-even", "--model", "Llama-3.1-8B", "--lengths", "131072",
                                 "--minutes", "60", "--dir", disk_.string()});
  };
  const auto folders = [&] {
    std::set<fs::path> out;
    for (const auto& e : fs::directory_iterator(disk_)) out.insert(e.path());
    return out;
  };
  const auto writes = [](const fs::path& folder) {
    return BenchProcess::Await([&] {
      std::error_code ec;
      for (const auto& e : fs::recursive_directory_iterator(folder, ec)) {
        if (e.path().extension() == ".seg" && e.file_size(ec) > (64 << 20)) return true;
      }
      return false;
    });
  };
  const auto killed = begin("");
  ASSERT_TRUE(writes(disk_)) << killed->Err();
  const std::set<fs::path> left = folders();
  ASSERT_EQ(left.size(), 1u);
  const auto lives = begin("other");
  ASSERT_TRUE(BenchProcess::Await([&] { return folders().size() == 2; })) << lives->Err();
  killed->Signal(SIGKILL);
  killed->Wait();
  ASSERT_EQ(
      Run({"break-even", "--quick", "--plan", "--model", "SmolLM2-135M", "--dir", disk_.string()}),
      0)
      << err_;
  EXPECT_FALSE(fs::exists(*left.begin()));
  EXPECT_EQ(folders().size(), 1u);  // of the one that lives
  lives->Signal(SIGTERM);
  EXPECT_EQ(lives->Wait(), 128 + SIGTERM);
  EXPECT_TRUE(NothingLeft());
}

// The same, with the moments made long: of one run nobody lives but a process that holds its folder
// for half a second; of the other the process that will remove the folder does.
TEST_F(PrefixctlBenchTest, WaitsForTheDyingAndNeverTouchesTheLiving) {
  const auto held = [](const fs::path& path, int flags) {
    const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
    EXPECT_EQ(::flock(fd, LOCK_EX | LOCK_NB), 0);
    return fd;
  };
  const fs::path dying = disk_ / "prefixd-bench-dying", living = disk_ / "prefixd-bench-living";
  for (const fs::path& dir : {dying, living}) {
    fs::create_directories(dir / "store");
    testing::WriteFile(dir / ".owner", "");
  }
  const int of_dying = held(dying, O_RDONLY | O_DIRECTORY);
  const int of_living = held(living, O_RDONLY | O_DIRECTORY),
            owner = held(living / ".owner", O_RDWR);
  std::jthread dies([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    testing::WriteFile(dying / "store" / "last", "what it still wrote");
    ::close(of_dying);
  });
  ASSERT_EQ(
      Run({"break-even", "--quick", "--plan", "--model", "SmolLM2-135M", "--dir", disk_.string()}),
      0)
      << err_;
  EXPECT_FALSE(fs::exists(dying));
  EXPECT_TRUE(fs::exists(living / "store"));
  ::close(of_living);
  ::close(owner);
}

TEST_F(PrefixctlBenchTest, RefusesStoresAndNonsense) {
  testing::WriteFile(disk_ / "STORE", "");
  EXPECT_EQ(Run(Small("break-even")), 1);
  EXPECT_TRUE(Has(err_, "holds a store")) << err_;
  fs::create_directory(disk_ / "segments");
  EXPECT_EQ(Run({"break-even", "--dir", (disk_ / "segments").string()}), 1);
  EXPECT_TRUE(Has(err_, "holds a store")) << err_;
  fs::remove_all(disk_);
  EXPECT_EQ(Run(Small("break-even")), 1);
  EXPECT_TRUE(Has(err_, "is no directory")) << err_;
  fs::create_directory(disk_);
  EXPECT_EQ(Run(Small("break-even", {"--model", "no-such-model"})), 1);
  EXPECT_TRUE(Has(err_, "Llama-3.1-8B")) << err_;
  EXPECT_EQ(Run(Small("break-even", {"--model", "SmolLM2-135M", "--layers", "31"})), 1);
  EXPECT_TRUE(Has(err_, "30 layers")) << err_;
  EXPECT_EQ(Run({"break-even", "--json", "/nonexistent/figures.json", "--dir", disk_.string()}), 1);
  EXPECT_TRUE(Has(err_, "cannot write")) << err_;
  EXPECT_EQ(Run({"break-even", "--lengths", "12"}), 2);
  EXPECT_EQ(Run({"break-even", "--prefill-rate", "-1"}), 2);
  EXPECT_EQ(Run({}), 2);
  EXPECT_TRUE(NothingLeft());
}

TEST_F(PrefixctlBenchTest, HelpNamesEveryOptionOnce) {
  for (const char* name : {"break-even", "io", "capacity"}) {
    ASSERT_EQ(Run({name, "--help"}), 0);
    for (const char* option : {"--model", "--dir", "--json", "--html", "--quick", "--plan"}) {
      const std::string start = std::string("  ") + option + " ";
      const size_t at = out_.find(start);
      EXPECT_NE(at, std::string::npos) << name << option << out_;
      EXPECT_EQ(out_.find(start, at + 1), std::string::npos) << name << option << out_;
    }
    EXPECT_TRUE(Has(out_, "Example: prefixctl bench")) << out_;
  }
}

}  // namespace
}  // namespace prefixd
