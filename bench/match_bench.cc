// Measures how long schedulers and engines wait for match and attach in a store of many prefixes:
// warm, cold (nothing open, nothing in the page cache), and beside a disk made slow.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "bench/support/bench_main.h"
#include "bench/support/percentiles.h"
#include "bench/support/slow_engine.h"
#include "bench/support/small_prefixes.h"
#include "measure/disk/page_cache.h"
#include "measure/prompts/bench_prompt.h"
#include "measure/timing/json_file.h"
#include "storage/store/open_store.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

struct Options {
  uint32_t prefixes = 10000, tokens = 128, long_tokens = 8192;
  uint32_t calls = 1000, warm_prefixes = 50;
  uint32_t read_delay_ms = 20, deadline_ms = 5;
  std::filesystem::path dir;
  std::string json_file;
};

class MatchBench {
 public:
  explicit MatchBench(const Options& options) : o_(options), small_(options.tokens) {
    runtime_.dir = o_.dir;
    runtime_.recluster = false;
    runtime_.scrub_bytes_per_second = 0;
    runtime_.build_codes = runtime_.build_ivf = false;
    runtime_.phi_features = "none";
    runtime_.estimators = {EstimatorKind::kNone, EstimatorKind::kMoment};
    runtime_.host_tier_bytes = 64 << 20;
  }

  Status Run() {
    PREFIXD_TRY(Fill());
    std::printf("%u prefixes of %u tokens, %u calls each; times in us\n", o_.prefixes, o_.tokens,
                o_.calls);
    std::printf("%-44s %10s %10s %10s\n", "", "p50", "p99", "max");
    const auto warm = [&](auto call) { return Measure(o_.calls, WarmOnes(), call); };
    // Beside others calls come one by one: one that waits must not stand for all.
    const auto spaced = [&](auto call) {
      return Measure(200, WarmOnes(), call, std::chrono::milliseconds(3));
    };
    const auto cold = [&](auto call) { return Measure(o_.calls, ColdOnes(), call); };
    const auto match = [this](uint32_t i) { return Match(i); };
    const auto attach = [this](uint32_t i) { return Attach(i); };
    PREFIXD_TRY(Open());
    PREFIXD_TRY(Report("match, cold", cold(match)));
    PREFIXD_TRY(Open());
    PREFIXD_TRY(Report("attach, cold", cold(attach)));
    PREFIXD_TRY(Open());
    PREFIXD_TRY(Warm());
    PREFIXD_TRY(Report("match, warm", warm(match)));
    PREFIXD_TRY(Report("attach, warm", warm(attach)));
    if (o_.long_tokens > 0) PREFIXD_TRY(LongMatch());
    PREFIXD_TRY(BesideSlowDisk(spaced, match, attach));
    if (o_.json_file.empty()) return {};
    return WriteJson(o_.json_file, {{"prefixes", o_.prefixes},
                                    {"tokens", o_.tokens},
                                    {"long_tokens", o_.long_tokens},
                                    {"read_delay_ms", o_.read_delay_ms},
                                    {"deadline_ms", o_.deadline_ms},
                                    {"times", times_}});
  }

 private:
  // Opens the store over the wrapped disk, with nothing in memory.
  Status Open() {
    held_.clear();
    store_.reset();
    DropPageCache(o_.dir / "segments");
    return OpenAsItIs();
  }

  Status OpenAsItIs() {
    held_.clear();
    store_.reset();
    PREFIXD_ASSIGN(store_, LocalStore::Open(runtime_, [this](const storage::StoreOptions& at) {
                     return storage::OpenStoreWithEngine(
                         at, [this](std::unique_ptr<storage::IoEngine> inner) {
                           return std::make_unique<SlowEngine>(std::move(inner), slowness_);
                         });
                   }));
    return {};
  }

  // Puts what the directory lacks: a second run finds all of it.
  Status Fill() {
    std::filesystem::create_directories(o_.dir / "segments");
    PREFIXD_TRY(OpenAsItIs());
    PREFIXD_TRY(store_->RegisterModel(small_.model()));
    for (uint32_t i = 0; i < o_.prefixes; ++i) {
      PREFIXD_ASSIGN(ids_.emplace_back(), small_.Put(*store_, i));
      if (i % 500 == 0) std::fprintf(stderr, "\rput %u", i);
    }
    std::fprintf(stderr, "\r");
    if (o_.long_tokens > 0) PREFIXD_TRY(PutLong());
    return store_->WaitRewritten(nullptr);
  }

  Status PutLong() {
    const Prompt prompt = SyntheticPrompt(Llama1B(), o_.long_tokens, /*huge_pages=*/true);
    long_ = prompt.tokens;
    PREFIXD_TRY(store_->RegisterModel(BenchModel(prompt.geometry)));
    PREFIXD_ASSIGN(const auto put, store_->BeginPut({kModelName, "", long_, "long"}));
    if (put->missing().size() > 0) PREFIXD_TRY(WritePrompt(prompt, *put));
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    return store_->WaitReady(stored.prefix, nullptr);
  }

  // Prefixes that are open all the time, and prefixes that come once.
  std::function<uint32_t(uint32_t)> WarmOnes() const {
    return [n = o_.warm_prefixes](uint32_t call) { return call % n; };
  }
  std::function<uint32_t(uint32_t)> ColdOnes() const {
    return [n = o_.prefixes, w = o_.warm_prefixes](uint32_t call) {
      return w + call * 7919 % (n - w);
    };
  }

  // Sessions hold the warm prefixes, so that attaching to them reads nothing.
  Status Warm() {
    for (uint32_t i = 0; i < o_.warm_prefixes; ++i) {
      PREFIXD_TRY(Match(i));
      PREFIXD_ASSIGN(held_.emplace_back(), Attached(i));
    }
    return {};
  }

  Status Match(uint32_t i) { return small_.Match(*store_, tokens_.at(i)); }

  Result<std::shared_ptr<Session>> Attached(uint32_t i) {
    return small_.Attach(*store_, ids_.at(i));
  }

  Status Attach(uint32_t i) {
    PREFIXD_ASSIGN(const auto session, Attached(i));
    return {};
  }

  template <typename Call>
  Result<Percentiles> Measure(uint32_t calls, const std::function<uint32_t(uint32_t)>& prefix,
                              Call call, std::chrono::milliseconds pause = {}) {
    if (tokens_.empty()) {
      for (uint32_t i = 0; i < o_.prefixes; ++i) tokens_.push_back(small_.Tokens(i));
    }
    std::vector<double> us;
    for (uint32_t i = 0; i < calls; ++i) {
      const uint32_t p = prefix(i);
      if (pause.count() > 0) std::this_thread::sleep_for(pause);
      const auto begun = Clock::now();
      PREFIXD_TRY(call(p));
      us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begun).count());
    }
    return PercentilesOf(std::move(us));
  }

  Status Report(const char* what, const Result<Percentiles>& times) {
    if (!times.ok()) return times.error();
    std::printf("%-44s %10.1f %10.1f %10.1f\n", what, times->p50_us, times->p99_us, times->max_us);
    std::fflush(stdout);
    times_.push_back({{"what", what},
                      {"p50_us", times->p50_us},
                      {"p99_us", times->p99_us},
                      {"max_us", times->max_us}});
    return {};
  }

  Status LongMatch() {
    std::vector<double> us;
    for (int i = 0; i < 5; ++i) {
      PREFIXD_TRY(Open());
      PREFIXD_TRY(store_->WaitRewritten(nullptr));
      const auto begun = Clock::now();
      PREFIXD_ASSIGN(const PrefixMatch match,
                     store_->Match({.model = kModelName, .tokens = long_}));
      us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begun).count());
      if (match.n_tokens != long_.size()) return Error{Code::kInternal, "no match"};
    }
    std::sort(us.begin(), us.end());
    PREFIXD_TRY(
        Report("match of the long prefix, cold", Percentiles{us[2], us[4], us[4], us.size()}));
    PREFIXD_TRY(Open());
    return Warm();
  }

  // Others attach and match cold prefixes all the time while these calls need no read at all.
  template <typename Warmed, typename MatchCall, typename AttachCall>
  Status BesideSlowDisk(const Warmed& warm, const MatchCall& match, const AttachCall& attach) {
    slowness_->read_delay_us = int64_t{o_.read_delay_ms} * 1000;
    for (const bool attaching : {true, false}) {
      std::atomic<bool> stop{false};
      std::thread others([&] {
        for (uint32_t i = o_.calls; !stop; ++i) {
          const uint32_t p = ColdOnes()(i);
          if (!(attaching ? Attach(p) : Match(p)).ok()) break;
        }
      });
      const auto slow_disk = [&]() -> Status {
        PREFIXD_TRY(Report(attaching ? "warm match beside slow cold attaches"
                                     : "warm match beside slow cold matches",
                           warm(match)));
        PREFIXD_TRY(Report(attaching ? "warm attach beside slow cold attaches"
                                     : "warm attach beside slow cold matches",
                           warm(attach)));
        return {};
      }();
      stop = true;
      others.join();
      PREFIXD_TRY(slow_disk);
    }
    PREFIXD_TRY(Report("cold match on the slow disk", Measure(50, ColdOnes(), match)));
    PREFIXD_TRY(Asynchronous());
    slowness_->read_delay_us = 0;
    return {};
  }

  // What a scheduler's loop waits for: the begin of a match, and its end at the deadline.
  Status Asynchronous() {
    std::unique_ptr<PendingMatch> match;
    uint32_t late = 0;
    const auto shifted = [cold = ColdOnes()](uint32_t i) { return cold(i + 5000); };
    const auto begin = [&](uint32_t p) -> Status {
      PREFIXD_ASSIGN(match,
                     store_->MatchAsync({.model = small_.model().name, .tokens = tokens_.at(p)},
                                        std::chrono::milliseconds(o_.deadline_ms)));
      return {};
    };
    PREFIXD_TRY(Report("slow disk: MatchAsync returns", Measure(200, shifted, begin)));
    match = nullptr;
    const auto both = [&](uint32_t p) -> Status {
      PREFIXD_TRY(begin(p));
      late += match->Get().ok() ? 0 : 1;
      return {};
    };
    PREFIXD_TRY(Report("slow disk: MatchAsync and Get", Measure(200, shifted, both)));
    std::printf("%u of 200 kept to a deadline of %u ms without an answer\n", late, o_.deadline_ms);
    return {};
  }

  const Options& o_;
  const SmallPrefixes small_;
  RuntimeOptions runtime_;
  std::shared_ptr<Slowness> slowness_ = std::make_shared<Slowness>();
  std::unique_ptr<LocalStore> store_;
  std::vector<std::shared_ptr<Session>> held_;
  std::vector<std::string> ids_;
  std::vector<std::vector<uint32_t>> tokens_;
  std::vector<uint32_t> long_;
  json times_ = json::array();
};

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Waits for match and attach in a store of many prefixes.");
  app.add_option("--dir", options.dir, "Directory of the store; what it lacks is put")->required();
  app.add_option("--prefixes", options.prefixes, "Small prefixes")->capture_default_str();
  app.add_option("--tokens", options.tokens, "Tokens of a small prefix")
      ->check(CLI::Range(8, 65536))
      ->capture_default_str();
  app.add_option("--long-tokens", options.long_tokens, "Tokens of one long prefix; 0: none")
      ->capture_default_str();
  app.add_option("--calls", options.calls, "Calls of each kind")->capture_default_str();
  app.add_option("--read-delay-ms", options.read_delay_ms, "The slow disk's delay of each read")
      ->capture_default_str();
  app.add_option("--deadline-ms", options.deadline_ms, "Of asynchronous matches")
      ->capture_default_str();
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::MatchBench(options).Run(); });
}
