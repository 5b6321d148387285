#include "bench/storage/step_reads.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "measure/disk/fio.h"
#include "measure/timing/timed.h"
#include "runtime/work/thread_pool.h"
#include "storage/io/file.h"
#include "storage/segment/segment_layout.h"
#include "storage/store/prefix_store.h"

namespace prefixd::bench {
namespace {

using storage::PrefixStore;

constexpr double kStepShare = 0.01;  // share of the prompt's tokens, for every KV head

// Holds the tokens of each head, ascending.
using Sets = std::vector<std::vector<uint32_t>>;

size_t CountRows(const Sets& sets) {
  size_t n = 0;
  for (const auto& ids : sets) n += ids.size();
  return n;
}

class StepBench {
 public:
  StepBench(const Prompt& prompt, const SpeedOptions& options, std::string fio_engine)
      : prompt_(prompt),
        options_(options),
        fio_engine_(std::move(fio_engine)),
        pool_(options.threads),
        per_page_(static_cast<uint32_t>(
            std::max<size_t>(1, storage::kPageBytes / prompt.geometry.row(0).bytes()))) {}
  ~StepBench() {
    prefix_.reset();
    store_.reset();
    std::error_code ec;
    std::filesystem::remove_all(dir(), ec);
  }

  Result<std::map<std::string, Paired>> Run() {
    std::map<std::string, Paired> lines;
    const auto wants = [&](std::string_view part) {
      return std::find(options_.parts.begin(), options_.parts.end(), part) != options_.parts.end();
    };
    PREFIXD_TRY(Put());
    if (wants("step_cold")) {
      PREFIXD_ASSIGN(lines["step_cold"], MeasureDisk("step's rows, cold", 0));
    }
    if (wants("step_half")) {
      PREFIXD_ASSIGN(lines["step_half"],
                     MeasureDisk("step's rows, half in tier", prompt_.row_bytes() / 2));
    }
    if (wants("step_full")) {
      PREFIXD_ASSIGN(lines["step_full"], MeasureFull());
    }
    if (wants("scrubbed")) {
      PREFIXD_ASSIGN(lines["scrubbed"], MeasureDisturbed("layers' rows, scrubbed", true));
    }
    if (wants("verified")) {
      PREFIXD_ASSIGN(lines["verified"], MeasureDisturbed("layers' rows, verified", false));
    }
    if (wants("gap")) {
      PREFIXD_ASSIGN(lines["gap"], MeasureNear(storage::StoreOptions{}.max_gap_pages));
    }
    return lines;
  }

 private:
  std::filesystem::path dir() const { return options_.dir / "steps"; }
  size_t heads() const { return size_t{prompt_.geometry.n_layers} * prompt_.geometry.n_kv_heads; }

  Status Put() {
    RuntimeOptions runtime;
    runtime.dir = dir();
    runtime.host_tier_bytes = 0;
    runtime.recluster = false;
    PREFIXD_ASSIGN(const auto store, LocalStore::Open(runtime));
    PREFIXD_TRY(store->RegisterModel(BenchModel(prompt_.geometry)));
    PREFIXD_ASSIGN(const auto put, store->BeginPut({kModelName, "", prompt_.tokens, "steps"}));
    PREFIXD_TRY(WritePrompt(prompt_, *put));
    PREFIXD_ASSIGN(const PutResult result, put->Commit());
    PREFIXD_ASSIGN(id_, storage::SegmentId::Parse(result.prefix));
    return {};
  }

  Status Open(uint64_t host_bytes, uint32_t max_gap_pages) {
    prefix_.reset();
    store_.reset();
    storage::StoreOptions at;
    at.dir = dir();
    at.host_tier_bytes = host_bytes;
    at.max_gap_pages = max_gap_pages;
    if (options_.io != "auto") {
      at.io = options_.io == "uring" ? storage::IoBackend::kUring : storage::IoBackend::kThreads;
    }
    PREFIXD_ASSIGN(store_, PrefixStore::Open(at));
    PREFIXD_ASSIGN(prefix_, store_->OpenPrefix(id_, 0));
    return {};
  }

  Status Read(const Sets& sets) {
    const uint32_t kv_heads = prompt_.geometry.n_kv_heads;
    return pool_.ParallelFor(sets.size(), [&](size_t head) {
      std::vector<std::byte> out(sets[head].size() * prompt_.geometry.row(0).bytes());
      return prefix_->ReadRows(static_cast<uint32_t>(head / kv_heads),
                               static_cast<uint32_t>(head % kv_heads), sets[head], out, nullptr);
    });
  }

  Sets NextStep() {
    const auto n = static_cast<uint32_t>(prompt_.tokens.size());
    const auto k = static_cast<size_t>(std::max(1.0, kStepShare * double(n)));
    Sets sets(heads());
    for (auto& ids : sets) {
      std::set<uint32_t> chosen;
      while (chosen.size() < k) chosen.insert(static_cast<uint32_t>(rng_() % n));
      ids.assign(chosen.begin(), chosen.end());
    }
    return sets;
  }

  Status ReadEverything() {
    Sets all(heads());
    for (auto& ids : all) {
      ids.resize(prompt_.tokens.size());
      for (uint32_t t = 0; t < ids.size(); ++t) ids[t] = t;
    }
    return Read(all);
  }

  // Where there is a host tier, it is filled first, as far as the rows fit.
  Result<Paired> MeasureDisk(const std::string& name, uint64_t host_bytes) {
    PREFIXD_TRY(Open(host_bytes, storage::StoreOptions{}.max_gap_pages));
    if (host_bytes > 0) PREFIXD_TRY(ReadEverything());
    const size_t rows = CountRows(NextStep());
    FioJob job;
    job.pattern = "randread";
    job.file = dir() / "segments" / (id_.ToString() + ".seg");
    job.offset = storage::kPageBytes;
    job.bytes = prompt_.row_bytes();
    job.block_bytes = storage::kPageBytes;
    job.total_bytes = rows * storage::kPageBytes;
    job.depth = 64;
    job.engine = fio_engine_;
    const double bytes = double(rows) * double(prompt_.geometry.row(0).bytes());
    return MeasurePairs(
        {name, "k/s", "fio randread", 1e3}, options_.pairs,
        [&] {
          const Sets sets = NextStep();
          return Timed(double(rows), bytes, [&] { return Read(sets); });
        },
        [&]() -> Result<Sample> {
          PREFIXD_ASSIGN(const FioFigure figure, RunFio(job));
          return Sample{figure.operations_per_second, 0};
        });
  }

  Result<Paired> MeasureFull() {
    PREFIXD_TRY(Open(prompt_.row_bytes() / 4 * 5, storage::StoreOptions{}.max_gap_pages));
    PREFIXD_TRY(ReadEverything());
    const size_t row = prompt_.geometry.row(0).bytes(), rows = CountRows(NextStep());
    storage::AlignedBuffer source(prompt_.row_bytes());
    std::memset(source.data(), 1, source.size());
    const size_t n = prompt_.tokens.size();
    const auto copy = [&](const Sets& sets) {
      return pool_.ParallelFor(sets.size(), [&](size_t head) -> Status {
        std::vector<std::byte> out(sets[head].size() * row);
        for (size_t i = 0; i < sets[head].size(); ++i) {
          std::memcpy(&out[i * row], source.data() + (head * n + sets[head][i]) * row, row);
        }
        return {};
      });
    };
    const double bytes = double(rows) * double(row);
    return MeasurePairs(
        {"step's rows, all in tier", "k/s", "memcpy of rows", 1e3}, options_.pairs,
        [&] {
          const Sets sets = NextStep();
          return Timed(double(rows), bytes, [&] { return Read(sets); });
        },
        [&] {
          const Sets sets = NextStep();
          return Timed(double(rows), bytes, [&] { return copy(sets); });
        });
  }

  // Runs steps one after the other, with time between them for the engine, and returns how many
  // layers' reads one second of reading answers.
  Result<Sample> Steps() {
    constexpr int kSteps = 12;
    constexpr std::chrono::milliseconds kBetween(10);
    const uint32_t kv_heads = prompt_.geometry.n_kv_heads;
    double seconds = 0;
    for (int step = 0; step < kSteps; ++step) {
      const Sets sets = NextStep();
      std::this_thread::sleep_for(kBetween);
      const auto begun = std::chrono::steady_clock::now();
      for (uint32_t layer = 0; layer < prompt_.geometry.n_layers; ++layer) {
        PREFIXD_TRY(pool_.ParallelFor(kv_heads, [&](size_t h) {
          const auto& ids = sets[size_t{layer} * kv_heads + h];
          std::vector<std::byte> out(ids.size() * prompt_.geometry.row(0).bytes());
          return prefix_->ReadRows(layer, static_cast<uint32_t>(h), ids, out, nullptr);
        }));
      }
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
      seconds += took.count();
    }
    return Sample{double(kSteps * prompt_.geometry.n_layers) / seconds, 0};
  }

  // scrub: at the background's rate; otherwise a verification at full speed.
  Result<Paired> MeasureDisturbed(const std::string& name, bool scrub) {
    PREFIXD_TRY(Open(0, storage::StoreOptions{}.max_gap_pages));
    const auto verify = [&](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        if (scrub) {
          storage::ScrubOptions options;
          options.interval_ms = 0;
          options.wait = [&](std::chrono::nanoseconds pause) {
            std::this_thread::sleep_for(pause);
            return !stop.stop_requested();
          };
          (void)store_->Scrub(options);  // the stop ends it with kCancelled
        } else {
          (void)store_->Verify(
              &id_, [&](uint64_t, uint64_t, std::string_view) { return !stop.stop_requested(); });
        }
      }
    };
    return MeasurePairs(
        {name, "/s", "undisturbed", 1}, options_.pairs,
        [&]() -> Result<Sample> {
          std::jthread other(verify);
          return Steps();
        },
        [&] { return Steps(); });
  }

  // Reads rows of pages with `gap` others between them, with one operation or each with its own.
  Result<Paired> MeasureNear(uint32_t gap) {
    const auto pages = static_cast<uint32_t>(prompt_.tokens.size() / per_page_);
    Sets sets(heads());
    for (auto& ids : sets) {
      for (uint32_t page = 0; page < pages; page += 1 + gap) {
        ids.push_back(page * per_page_ + static_cast<uint32_t>(rng_() % per_page_));
      }
    }
    const size_t rows = CountRows(sets);
    const double bytes = double(rows) * double(prompt_.geometry.row(0).bytes());
    const auto read = [&](uint32_t max_gap) -> Result<Sample> {
      PREFIXD_TRY(Open(0, max_gap));
      return Timed(double(rows), bytes, [&] { return Read(sets); });
    };
    const std::string name = "rows over gaps of " + std::to_string(gap);
    return MeasurePairs(
        {name, "k/s", "one by one", 1e3}, options_.pairs, [&] { return read(gap); },
        [&] { return read(0); });
  }

  const Prompt& prompt_;
  const SpeedOptions& options_;
  const std::string fio_engine_;
  ThreadPool pool_;
  const uint32_t per_page_;
  std::mt19937_64 rng_{5};
  storage::SegmentId id_;
  std::unique_ptr<PrefixStore> store_;
  std::shared_ptr<const storage::StoredPrefix> prefix_;
};

}  // namespace

Result<std::map<std::string, Paired>> MeasureStepReads(const Prompt& prompt,
                                                       const SpeedOptions& options,
                                                       const std::string& fio_engine) {
  return StepBench(prompt, options, fio_engine).Run();
}

}  // namespace prefixd::bench
