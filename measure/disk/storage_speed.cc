#include "measure/disk/storage_speed.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "measure/disk/fio.h"
#include "measure/disk/prompt_rows.h"
#include "measure/timing/timed.h"
#include "runtime/work/thread_pool.h"
#include "storage/io/file.h"
#include "storage/segment/segment_format.h"
#include "storage/store/prefix_store.h"

namespace prefixd::bench {
namespace {

using storage::PrefixStore;
using storage::StoredPrefix;

// The store's defaults, which fio gets, too: 16 MiB in flight, in writes of 1 MiB and sequential
// reads of 512 KiB; 64 operations when they are pages.
constexpr uint64_t kInflightBytes = 16u << 20, kWriteBytes = 1u << 20, kReadBytes = 512u << 10;
constexpr uint32_t kRowDepth = 64;

class SpeedBench {
 public:
  SpeedBench(const Prompt& prompt, const SpeedOptions& options)
      : prompt_(prompt),
        options_(options),
        pool_(options.threads),
        layer_(prompt.row_bytes() / prompt.geometry.n_layers) {}

  Result<SpeedReport> Run() {
    SpeedReport report;
    report.threads = pool_.threads();
    PREFIXD_TRY(FindBackend(report));
    std::optional<Error> failed;
    for (const std::string& part : options_.parts) {
      if (options_.progress) options_.progress(part);
      auto line = MeasurePart(part);
      if (line.ok()) {
        report.lines[part] = *std::move(line);
      } else {
        failed = line.error();
        report.skipped.push_back(part + ": " + failed->message);
      }
    }
    if (report.lines.empty() && failed) return *failed;
    if (options_.source && report.lines.contains("put")) {
      PREFIXD_ASSIGN(report.source_read, MeasureSource());
    }
    report.row_amplification = row_amplification_;
    report.skipped.insert(report.skipped.end(), without_floor_.begin(), without_floor_.end());
    prefix_.reset();
    store_.reset();
    std::error_code ec;
    std::filesystem::remove_all(StoreDir(), ec);
    std::filesystem::remove_all(options_.dir / "runtime", ec);
    return report;
  }

 private:
  Result<Paired> MeasurePart(const std::string& part) {
    if (part == "put") return MeasurePut();
    if (part == "segment") return MeasureSegmentPut();
    const bool host = part.find("host") != std::string::npos || part == "reclustered";
    PREFIXD_TRY(OpenStored(host ? prompt_.row_bytes() / 4 * 5 : 0));
    if (part == "restore") return MeasureRestore();
    if (part == "rows") return MeasureRows("random rows, cold", &row_amplification_);
    if (part == "host") return MeasureHost("full restore, host tier");
    if (part == "host_rows") return MeasureHostRows("random rows, host tier");
    PREFIXD_TRY(Recluster());
    if (part == "reclustered") return MeasureHost("the same, rows reclustered");
    if (part == "reclustered_rows") return MeasureRows("random rows, cold, reclustered", nullptr);
    if (part == "reclustered_host_rows") return MeasureHostRows("random rows, host, reclustered");
    return Error{Code::kInvalidArgument, "there is no such part"};
  }

  // In turns with the floor; where that fails, alone.
  Result<Paired> Pairs(const Paired& what, const Measurement& ours, const Measurement& floor) {
    std::optional<Error> failed;
    const Measurement noted = [&]() -> Result<Sample> {
      auto sample = floor();
      if (!sample.ok()) failed = sample.error();
      return sample;
    };
    auto paired = MeasurePairs(what, options_.pairs, ours, floor ? noted : nullptr);
    if (paired.ok() || !failed) return paired;
    without_floor_.push_back(what.floor_name + " beside " + what.name + ": " + failed->message);
    return MeasurePairs(what, options_.pairs, ours, nullptr);
  }

  std::filesystem::path StoreDir() const { return options_.dir / "store"; }

  // fio uses the store's I/O interface, where it can.
  Status FindBackend(SpeedReport& report) {
    PREFIXD_TRY(OpenStore(0));
    report.io_backend = store_->stats().io_backend;
    report.fio_engine = fio_engine_ = report.io_backend == "io_uring" ? "io_uring" : "libaio";
    return {};
  }

  Result<Sample> Fio(FioJob job, bool operations) const {
    job.engine = fio_engine_;
    PREFIXD_ASSIGN(const FioFigure figure, RunFio(job));
    const double bytes = figure.bytes_per_second * figure.seconds;
    return Sample{operations ? figure.operations_per_second : figure.bytes_per_second,
                  figure.cpu_seconds / (bytes / 1e9)};
  }

  Measurement Floor(Measurement fio) const { return options_.fio ? std::move(fio) : nullptr; }

  Result<Sample> FioWrite() const {
    FioJob job;
    job.pattern = "write";
    job.file = options_.dir / "fio";
    job.bytes = prompt_.row_bytes();
    job.block_bytes = kWriteBytes;
    job.depth = kInflightBytes / kWriteBytes;
    auto sample = Fio(job, false);
    std::error_code ec;
    std::filesystem::remove(job.file, ec);
    return sample;
  }

  // Measures the durable put of the runtime: keys and values as an engine has them, until Commit
  // returned.
  Result<Paired> MeasurePut() {
    RuntimeOptions runtime;
    runtime.dir = options_.dir / "runtime";
    runtime.io = options_.io;
    runtime.host_tier_bytes = 0;
    runtime.recluster = false;  // only the put is measured
    PREFIXD_ASSIGN(const auto store, LocalStore::Open(runtime));
    PREFIXD_TRY(store->RegisterModel(BenchModel(prompt_.geometry)));
    std::string prefix;
    return Pairs(
        {"durable put", "MB/s", "fio write", 1e6},
        [&]() -> Result<Sample> {
          const auto bytes = double(prompt_.row_bytes());
          PREFIXD_ASSIGN(const Sample sample, Timed(bytes, bytes, [&]() -> Status {
                           PREFIXD_ASSIGN(const auto put,
                                          store->BeginPut({kModelName, "", prompt_.tokens, "put"}));
                           PREFIXD_TRY(WritePrompt(prompt_, *put));
                           PREFIXD_ASSIGN(const PutResult result, put->Commit());
                           prefix = result.prefix;
                           return {};
                         }));
          // Removing also ends the background work for the prefix, so that fio's turn is
          // undisturbed.
          PREFIXD_TRY(store->Remove(prefix));
          return sample;
        },
        Floor([&] { return FioWrite(); }));
  }

  // Reads the prompt once, with the caches as a put finds them.
  Result<Spread> MeasureSource() const {
    std::vector<double> rates;
    for (uint32_t i = 0; i < std::max(3u, options_.pairs / 2); ++i) {
      PREFIXD_TRY(FioWrite());
      PREFIXD_ASSIGN(const double seconds, ReadOnce(prompt_));
      rates.push_back(double(prompt_.row_bytes()) / seconds);
    }
    return Summarise(std::move(rates));
  }

  // Measures the same through storage's SegmentWriter alone; rows are interleaved beforehand.
  Result<Paired> MeasureSegmentPut() {
    PREFIXD_TRY(OpenStore(0));
    PREFIXD_TRY(RemoveStored());
    const auto rows = InterleavedRows(prompt_);
    return Pairs(
        {"put of a segment", "MB/s", "fio write", 1e6},
        [&]() -> Result<Sample> {
          PREFIXD_TRY(RemoveStored());
          const auto bytes = double(prompt_.row_bytes());
          return Timed(bytes, bytes, [&] { return PutSegment(rows); });
        },
        Floor([&] { return FioWrite(); }));
  }

  Status PutSegment(const std::vector<std::vector<std::byte>>& rows) {
    PREFIXD_ASSIGN(const auto put, store_->BeginPut(kModelName, "", prompt_.tokens, "segment"));
    for (uint32_t layer = 0; layer < rows.size(); ++layer) {
      PREFIXD_TRY(put->WriteRows(layer, 0, put->range().end, rows[layer]));
    }
    PREFIXD_ASSIGN(id_, put->Commit());
    stored_ = true;
    return {};
  }

  Status RemoveStored() {
    if (!stored_) return {};
    stored_ = reclustered_ = false;
    return store_->Remove(id_);
  }

  storage::StoreOptions StorageOptions(uint64_t host_bytes) const {
    storage::StoreOptions at;
    at.dir = StoreDir();
    at.host_tier_bytes = host_bytes;
    if (options_.io != "auto") {
      at.io = options_.io == "uring" ? storage::IoBackend::kUring : storage::IoBackend::kThreads;
    }
    return at;
  }

  Status OpenStore(uint64_t host_bytes) {
    prefix_.reset();
    store_.reset();
    PREFIXD_ASSIGN(store_, PrefixStore::Open(StorageOptions(host_bytes)));
    const KvGeometry& g = prompt_.geometry;
    return store_->PutModel({kModelName, {}, g, "{}"});
  }

  // Stores and opens the prompt; its rows are in no memory of this process.
  Status OpenStored(uint64_t host_bytes) {
    PREFIXD_TRY(OpenStore(host_bytes));
    if (!stored_) PREFIXD_TRY(PutSegment(InterleavedRows(prompt_)));
    PREFIXD_ASSIGN(prefix_, store_->OpenPrefix(id_, 0));
    return {};
  }

  // Rewrites the stored rows, once, in an order that is independent of the tokens' order.
  Status Recluster() {
    if (reclustered_) return {};
    prefix_.reset();
    PREFIXD_TRY(store_->Recluster(id_, AnyOrder(prompt_)));
    reclustered_ = true;
    PREFIXD_ASSIGN(prefix_, store_->OpenPrefix(id_, 0));
    return {};
  }

  // Restores all rows, first layer first; the threads share the heads of a layer.
  Status Restore() {
    const KvGeometry& g = prompt_.geometry;
    const TokenRange all{0, prefix_->n_tokens()};
    const size_t head_bytes = layer_.size() / g.n_kv_heads;
    for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
      PREFIXD_TRY(pool_.ParallelFor(g.n_kv_heads, [&](size_t h) {
        return prefix_->ReadRange(layer, static_cast<uint32_t>(h), all,
                                  layer_.span().subspan(h * head_bytes, head_bytes), nullptr);
      }));
    }
    return {};
  }

  FioJob ReadJob(const char* pattern) const {
    FioJob job;
    job.pattern = pattern;
    job.file = LargestFile(StoreDir() / "segments");  // reclustering gives it another name
    job.offset = storage::kPageBytes;                 // the rows begin after the header
    job.bytes = prompt_.row_bytes();
    return job;
  }

  Result<Paired> MeasureRestore() {
    const auto bytes = double(prompt_.row_bytes());
    FioJob job = ReadJob("read");
    job.block_bytes = kReadBytes;
    job.depth = kInflightBytes / kReadBytes;
    return Pairs(
        {"full restore, cold", "MB/s", "fio read", 1e6},
        [&] { return Timed(bytes, bytes, [&] { return Restore(); }); },
        Floor([&] { return Fio(job, false); }));
  }

  // Reads the same rows from the host tier, beside memcpy of as many rows from as many places.
  Result<Paired> MeasureHostRows(const char* name) {
    const KvGeometry& g = prompt_.geometry;
    const size_t row = g.row(0).bytes();
    size_t reads = 0;
    const auto ids = SparseRows(prompt_, 3, &reads);
    PREFIXD_TRY(Restore());  // fills the tier
    storage::AlignedBuffer source(prompt_.row_bytes());
    std::memset(source.data(), 1, source.size());
    const size_t head_bytes = source.size() / ids.size();
    const auto each = [&](const auto& read) {
      return pool_.ParallelFor(ids.size(), [&](size_t head) -> Status {
        std::vector<std::byte> out(ids[head].size() * row);
        return read(head, out);
      });
    };
    const auto ours = [&] {
      return each([&](size_t head, std::vector<std::byte>& out) {
        return prefix_->ReadRows(static_cast<uint32_t>(head / g.n_kv_heads),
                                 static_cast<uint32_t>(head % g.n_kv_heads), ids[head], out,
                                 nullptr);
      });
    };
    const auto copy = [&] {
      return each([&](size_t head, std::vector<std::byte>& out) -> Status {
        for (size_t i = 0; i < ids[head].size(); ++i) {
          std::memcpy(&out[i * row], source.data() + head * head_bytes + ids[head][i] * row, row);
        }
        return {};
      });
    };
    const auto bytes = double(reads) * double(row);
    return Pairs(
        {name, "k/s", "memcpy", 1e3}, [&] { return Timed(double(reads), bytes, ours); },
        [&] { return Timed(double(reads), bytes, copy); });
  }

  // Reads single rows, each in a page of its own and no two pages near, so that every row costs one
  // read where rows lie as written. They cover all heads of all layers, in the order of a step, and
  // are others in each pair, as fio's are: no disk has them in a cache of its own.
  Result<Paired> MeasureRows(const char* name, double* amplification) {
    const KvGeometry& g = prompt_.geometry;
    const size_t row = g.row(0).bytes();
    uint64_t seed = 3;
    size_t reads = 0;
    auto ids = SparseRows(prompt_, seed, &reads);
    FioJob job = ReadJob("randread");
    job.block_bytes = storage::kPageBytes;
    job.total_bytes = reads * storage::kPageBytes;
    job.depth = kRowDepth;
    std::atomic<uint64_t> from_disk{0}, wanted{0};
    const auto read_all = [&] {
      return pool_.ParallelFor(ids.size(), [&](size_t head) -> Status {
        std::vector<std::byte> out(ids[head].size() * row);
        storage::ReadStats stats;
        PREFIXD_TRY(prefix_->ReadRows(static_cast<uint32_t>(head / g.n_kv_heads),
                                      static_cast<uint32_t>(head % g.n_kv_heads), ids[head], out,
                                      &stats));
        from_disk += stats.bytes[static_cast<size_t>(Tier::kSsd)];
        wanted += out.size();
        return {};
      });
    };
    auto paired = Pairs(
        {name, "k/s", "fio randread", 1e3},
        [&] {
          ids = SparseRows(prompt_, ++seed, &reads);
          return Timed(double(reads), double(job.total_bytes), read_all);
        },
        Floor([&] { return Fio(job, true); }));
    if (amplification != nullptr && wanted > 0) {
      *amplification = double(from_disk) / double(wanted);
    }
    return paired;
  }

  // Measures the same restore from pages in the host tier, against memcpy of as many bytes to the
  // same place on the same number of threads.
  Result<Paired> MeasureHost(const char* name) {
    const auto bytes = double(prompt_.row_bytes());
    storage::AlignedBuffer source(prompt_.row_bytes());
    std::memset(source.data(), 1, source.size());
    const uint32_t heads = prompt_.geometry.n_kv_heads;
    const size_t head_bytes = layer_.size() / heads;
    const auto copy = [&]() -> Status {
      for (size_t at = 0; at < source.size(); at += layer_.size()) {
        PREFIXD_TRY(pool_.ParallelFor(heads, [&](size_t h) -> Status {
          std::memcpy(layer_.data() + h * head_bytes, source.data() + at + h * head_bytes,
                      head_bytes);
          return {};
        }));
      }
      return {};
    };
    PREFIXD_ASSIGN(Paired host, Pairs(
                                    {name, "MB/s", "memcpy", 1e6},
                                    [&] { return Timed(bytes, bytes, [&] { return Restore(); }); },
                                    [&] { return Timed(bytes, bytes, copy); }));
    const auto stats = store_->stats();
    if (stats.host_tier_bytes < prompt_.row_bytes()) {
      return Error{Code::kInternal, "the host tier holds " + std::to_string(stats.host_tier_bytes) +
                                        " bytes of the rows' " +
                                        std::to_string(prompt_.row_bytes())};
    }
    return host;
  }

  const Prompt& prompt_;
  const SpeedOptions& options_;
  ThreadPool pool_;
  storage::AlignedBuffer layer_;  // destination of a restored layer: [n_kv_heads][n][row bytes]
  std::string fio_engine_;
  std::unique_ptr<PrefixStore> store_;
  storage::SegmentId id_;
  bool stored_ = false, reclustered_ = false;
  double row_amplification_ = 0;
  std::vector<std::string> without_floor_;
  std::shared_ptr<const StoredPrefix> prefix_;
};

}  // namespace

Result<SpeedReport> MeasureSpeed(const Prompt& prompt, const SpeedOptions& options) {
  return SpeedBench(prompt, options).Run();
}

}  // namespace prefixd::bench
