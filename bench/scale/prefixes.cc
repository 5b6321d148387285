// A store that grows: what a daemon takes for puts, matches, attaches, its start and its memory
// with ever more prefixes, through its socket as its users call it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "bench/scale/own_store.h"
#include "bench/scale/scale_options.h"
#include "bench/steps/daemon_child.h"
#include "bench/support/percentiles.h"
#include "bench/support/small_prefixes.h"
#include "measure/disk/page_cache.h"
#include "measure/timing/json_file.h"
#include "measure/timing/process.h"
#include "prefixd/client.h"
#include "storage/recover/recover.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr uint32_t kWarm = 50;                // prefixes that are open all the time
constexpr uint32_t kUnfinished = 2000000000;  // the first of those that a crash overtakes
constexpr uint32_t kUnknown = 3000000000;     // the first of those that nobody stores
constexpr uint32_t kTimedStarts = 3;          // starts behind which calls are timed
constexpr auto kUntilKill = std::chrono::milliseconds(500);

double Seconds(Clock::time_point begun) {
  return std::chrono::duration<double>(Clock::now() - begun).count();
}

double MibBelow(const std::filesystem::path& dir) {
  uint64_t bytes = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir, ignored)) {
    if (entry.is_regular_file(ignored)) bytes += entry.file_size(ignored);
  }
  return double(bytes) / 1048576;
}

class PrefixScale {
 public:
  explicit PrefixScale(const ScaleOptions& o)
      : o_(o),
        dir_(o.dir.empty() ? o.scratch / "prefixes" : o.dir),
        small_(o.prefix_tokens),
        daemon_(dir_, o.scratch) {}

  Result<json> Run() {
    if (!o_.dir.empty()) {
      PREFIXD_TRY(ClaimStore(
          dir_, "prompts of " + std::to_string(o_.prefix_tokens) + " tokens that begin alike"));
    }
    PREFIXD_TRY(MeasureEmpty());
    PREFIXD_TRY(Start());
    PREFIXD_TRY(store_->RegisterModel(small_.model()));
    std::printf("\nprefixes of %u tokens; times in us where not said\n", o_.prefix_tokens);
    std::printf("%8s %7s | %17s %17s | %17s %17s | %17s %17s | %7s %7s %7s | %8s %8s %8s %8s\n",
                "prefixes", "puts/s", "match open", "just started", "match miss", "just started",
                "attach open", "just started", "start s", "kill -9", "rebuild", "MiB mem.",
                "counted", "catalog", "segments");
    json rows = json::array();
    for (const uint32_t n : o_.prefixes) {
      PREFIXD_ASSIGN(const RuntimeStats stats, store_->Stats());
      if (stats.prefixes > n) {
        std::printf("%8u: left out, the store in %s has %llu\n", n, dir_.c_str(),
                    static_cast<unsigned long long>(stats.prefixes));
        continue;
      }
      PREFIXD_ASSIGN(rows.emplace_back(), Level(n, stats.prefixes));
    }
    held_.clear();
    store_.reset();
    PREFIXD_TRY(daemon_.Stop());
    return rows;
  }

 private:
  std::vector<std::string> Arguments() const {
    std::vector<std::string> args = {
        "--recluster",  "false",       "--scrub-mib-per-second", "0",     "--host-tier-mib", "64",
        "--build-ivf",  "false",       "--build-codes",          "false", "--phi-features",  "none",
        "--estimators", "none,moment", "--busy-percent",         "100"};
    args.insert(args.end(), o_.daemon.begin(), o_.daemon.end());
    return args;
  }

  // Starts the daemon over what is there, and returns after how many seconds it serves.
  Result<double> Start() {
    const auto begun = Clock::now();
    PREFIXD_TRY(daemon_.Start(o_.program, Arguments()));
    const double seconds = Seconds(begun);
    PREFIXD_ASSIGN(store_, Connect(daemon_.address()));
    return seconds;
  }
  Result<double> StartAgain(bool crash) {
    held_.clear();
    store_.reset();
    PREFIXD_TRY(crash ? daemon_.Kill() : daemon_.Stop());
    DropPageCache(dir_);
    return Start();
  }

  struct Memory {
    double process_mib = 0;  // of the process, beyond that of a daemon without prefixes
    double counted_mib = 0;  // what the daemon itself counts for the catalogue
  };
  // Behind a start the daemon looks in the background for what prefixes lack; that is waited for.
  Result<Memory> MemoryOfPrefixes() {
    PREFIXD_TRY(Settle());
    PREFIXD_ASSIGN(const Holding held, Look(daemon_.pid()));
    PREFIXD_ASSIGN(const RuntimeStats stats, store_->Stats());
    Memory memory{held.anonymous_mib - empty_mib_, 0};
    for (const MemoryOfKind& kind : stats.memory_kinds) {
      if (kind.kind == "catalog") memory.counted_mib = double(kind.bytes) / 1048576;
    }
    return memory;
  }

  Status MeasureEmpty() {
    DaemonChild empty({}, o_.scratch);
    PREFIXD_TRY(empty.Start(o_.program, Arguments()));
    PREFIXD_ASSIGN(const Holding held, Look(empty.pid()));
    empty_mib_ = held.anonymous_mib;
    return {};
  }

  // Puts prefixes by several clients; do(i) for each until `stop`.
  Status Together(uint32_t begin, uint32_t end,
                  const std::function<Status(Store&, uint32_t)>& put) const {
    std::atomic<uint32_t> next{begin};
    std::vector<Status> statuses(o_.putters);
    std::vector<std::thread> team;
    for (uint32_t t = 0; t < o_.putters; ++t) {
      team.emplace_back([&, t] {
        statuses[t] = [&]() -> Status {
          ConnectOptions options;
          options.reconnect_ms = 0;
          PREFIXD_ASSIGN(const auto store, Connect(daemon_.address(), options));
          for (uint32_t i = next++; i < end; i = next++) {
            PREFIXD_TRY(put(*store, i));
            if (i % 1000 == 0 && end > begin + 1000) std::fprintf(stderr, "\rput %u", i);
          }
          return {};
        }();
      });
    }
    for (std::thread& thread : team) thread.join();
    for (const Status& status : statuses) PREFIXD_TRY(status);
    return {};
  }

  // Until nothing is left to be made of what was put.
  Status Settle() {
    for (;;) {
      PREFIXD_ASSIGN(const RuntimeStats stats, store_->Stats());
      if (stats.ingest_queue + stats.rewrite_queue == 0) return {};
      std::fprintf(stderr, "\rin the background %llu  ",
                   static_cast<unsigned long long>(stats.ingest_queue));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  Result<json> Level(uint32_t n, uint64_t stored) {
    json row = {{"prefixes", n}};
    const auto first = static_cast<uint32_t>(ids_.size());
    ids_.resize(n);
    auto begun = Clock::now();
    PREFIXD_TRY(Together(first, n, [this](Store& store, uint32_t i) -> Status {
      PREFIXD_ASSIGN(ids_[i], small_.Put(store, i));
      return {};
    }));
    const double puts = double(n - first) / Seconds(begun);
    const bool all_put = stored <= first && first < n;  // none was there before
    if (all_put) row["puts_per_s"] = puts;
    PREFIXD_TRY(Settle());
    if (all_put) row["put_and_ready_per_s"] = double(n - first) / Seconds(begun);

    const uint32_t warm = std::min(n, kWarm);
    std::vector<std::vector<uint32_t>> tokens, unknown;
    for (uint32_t i = 0; i < std::min(n, warm + o_.calls); ++i) {
      tokens.push_back(small_.Tokens(Nth(i, n)));
    }
    for (uint32_t i = 0; i < o_.calls; ++i) unknown.push_back(small_.Tokens(kUnknown + i));
    for (uint32_t i = 0; i < warm; ++i) {
      PREFIXD_TRY(small_.Match(*store_, tokens[i]));
      PREFIXD_ASSIGN(held_.emplace_back(), small_.Attach(*store_, ids_[Nth(i, n)]));
    }
    const auto match = [&](uint32_t i) { return small_.Match(*store_, tokens[i]); };
    const auto miss = [&](uint32_t i) { return small_.Miss(*store_, unknown[i]); };
    const auto attach = [&](uint32_t i) -> Status {
      PREFIXD_ASSIGN(const auto session, small_.Attach(*store_, ids_[Nth(i, n)]));
      return {};
    };
    PREFIXD_ASSIGN(const Percentiles match_open,
                   TimeCalls(o_.calls, [&](uint32_t i) { return match(i % warm); }));
    PREFIXD_ASSIGN(const Percentiles attach_open,
                   TimeCalls(o_.calls, [&](uint32_t i) { return attach(i % warm); }));
    PREFIXD_ASSIGN(const Percentiles miss_open, TimeCalls(o_.calls, miss));
    row["match_open"] = match_open, row["match_miss_open"] = miss_open;
    row["attach_open"] = attach_open;

    const uint32_t once = std::min(n, o_.calls);
    std::vector<double> starts, memory, counted, crashes;
    Percentiles match_started, miss_started, attach_started;
    // Each kind of call behind a start of its own; memory behind those without calls.
    for (uint32_t start = 0; start < kTimedStarts + o_.repeats; ++start) {
      PREFIXD_ASSIGN(starts.emplace_back(), StartAgain(/*crash=*/false));
      if (start == 0) {
        PREFIXD_ASSIGN(match_started, TimeCalls(once, match));
      } else if (start == 1) {
        PREFIXD_ASSIGN(miss_started, TimeCalls(o_.calls, miss));
      } else if (start == 2) {
        PREFIXD_ASSIGN(attach_started, TimeCalls(once, attach));
      } else {
        PREFIXD_ASSIGN(const Memory held, MemoryOfPrefixes());
        memory.push_back(held.process_mib), counted.push_back(held.counted_mib);
      }
    }
    row["match_just_started"] = match_started, row["match_miss_just_started"] = miss_started;
    row["attach_just_started"] = attach_started;
    for (uint32_t repeat = 0; repeat < o_.repeats; ++repeat) {
      PREFIXD_ASSIGN(crashes.emplace_back(), Crash());
    }
    row["start_s"] = Summarise(starts), row["recovery_s"] = Summarise(crashes);
    row["memory_mib"] = Summarise(memory), row["counted_memory_mib"] = Summarise(counted);
    row["catalog_mib"] = MibBelow(dir_ / "catalog");
    row["disk_mib"] = MibBelow(dir_ / "segments");
    row["memory_bytes_each"] = 1048576 * Summarise(memory).median / n;
    PREFIXD_ASSIGN(row["rebuild_s"], Rebuild(n, match));

    std::printf(
        "%8u %7.0f | %7.0f p99 %5.0f %7.0f p99 %5.0f | %7.0f p99 %5.0f %7.0f p99 %5.0f | %7.0f p99 "
        "%5.0f %7.0f p99 %5.0f | %7.3f %7.3f %7.3f | %8.1f %8.1f %8.1f %8.1f\n",
        n, all_put ? puts : 0, match_open.p50_us, match_open.p99_us, match_started.p50_us,
        match_started.p99_us, miss_open.p50_us, miss_open.p99_us, miss_started.p50_us,
        miss_started.p99_us, attach_open.p50_us, attach_open.p99_us, attach_started.p50_us,
        attach_started.p99_us, Summarise(starts).median, Summarise(crashes).median,
        row["rebuild_s"].get<double>(), Summarise(memory).median, Summarise(counted).median,
        row["catalog_mib"].get<double>(), row["disk_mib"].get<double>());
    std::fflush(stdout);
    return row;
  }

  // Spreads the calls over all prefixes. Consecutive ones are far from each other.
  static uint32_t Nth(uint32_t i, uint32_t n) {
    return static_cast<uint32_t>(uint64_t{i} * 7919 % n);
  }

  // Kills the daemon while clients put, and returns how long the next one takes until it serves.
  // What was acknowledged must be there. That the daemon goes by itself is an error.
  Result<double> Crash() {
    std::mutex mutex;
    std::vector<std::pair<uint32_t, std::string>> acknowledged;
    std::atomic<bool> killing = false;
    Status killed, unplanned;
    std::thread killer([&] {
      std::this_thread::sleep_for(kUntilKill);
      held_.clear();
      killing = true;
      killed = daemon_.Kill();
    });
    const Status ended = Together(kUnfinished, UINT32_MAX, [&](Store& store, uint32_t i) -> Status {
      const auto id = small_.Put(store, i);
      if (!id.ok()) {
        // Only the kill may end puts.
        const bool planned = killing && id.error().code == Code::kUnavailable;
        std::lock_guard lock(mutex);
        if (!planned && unplanned.ok()) unplanned = id.error();
        return id.error();
      }
      std::lock_guard lock(mutex);
      acknowledged.emplace_back(i, *id);
      return {};
    });
    killer.join();
    PREFIXD_TRY(killed);
    PREFIXD_TRY(unplanned);
    if (!ended.ok() && ended.error().code != Code::kUnavailable) return ended.error();
    if (acknowledged.empty()) {
      return Error{Code::kInternal, "no put was acknowledged before the kill: it shows nothing"};
    }
    PREFIXD_ASSIGN(const double seconds, StartAgain(/*crash=*/true));
    for (const auto& [i, id] : acknowledged) {
      PREFIXD_TRY(small_.Match(*store_, small_.Tokens(i)));
    }
    // Those that were stored without their clients having heard of it go too.
    for (uint32_t i = kUnfinished; i < kUnfinished + acknowledged.size() + o_.putters; ++i) {
      PREFIXD_ASSIGN(const PrefixMatch match,
                     store_->Match({.model = small_.model().name, .tokens = small_.Tokens(i)}));
      // Its first tokens alone may be those of another prefix, which stays.
      if (match.n_tokens == o_.prefix_tokens) PREFIXD_TRY(store_->Remove(match.prefix));
    }
    return seconds;
  }

  // Makes the catalog anew from the segment files alone, and starts over it.
  Result<double> Rebuild(uint32_t n, const std::function<Status(uint32_t)>& match) {
    PREFIXD_TRY(Settle());
    store_.reset();
    PREFIXD_TRY(daemon_.Stop());
    DropPageCache(dir_);
    storage::RecoverOptions options;
    options.dir = dir_;
    const auto begun = Clock::now();
    PREFIXD_ASSIGN(
        const storage::RecoverReport report,
        storage::RecoverCatalog(options, [](uint64_t done, uint64_t all, std::string_view) {
          if (done % 1000 == 0) {
            std::fprintf(stderr, "\rrebuild %llu of %llu", static_cast<unsigned long long>(done),
                         static_cast<unsigned long long>(all));
          }
          return true;
        }));
    const double seconds = Seconds(begun);
    std::error_code ignored;
    if (!report.old_catalog.empty()) std::filesystem::remove_all(report.old_catalog, ignored);
    if (report.segments != n) {
      return Error{Code::kInternal, "the catalog made anew has " + std::to_string(report.segments) +
                                        " prefixes instead of " + std::to_string(n)};
    }
    PREFIXD_TRY(Start());
    PREFIXD_TRY(match(0));
    return seconds;
  }

  const ScaleOptions& o_;
  const std::filesystem::path dir_;
  const SmallPrefixes small_;
  DaemonChild daemon_;
  std::unique_ptr<Store> store_;
  std::vector<std::shared_ptr<Session>> held_;
  std::vector<std::string> ids_;
  double empty_mib_ = 0;
};

}  // namespace

Result<json> MeasurePrefixes(const ScaleOptions& options) { return PrefixScale(options).Run(); }

}  // namespace prefixd::bench
