#include "measure/disk/storage_speed.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "measure/disk/fio.h"
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
    for (const std::string& part : options_.parts) {
      if (options_.progress) options_.progress(part);
      if (part == "put") {
        PREFIXD_ASSIGN(report.lines[part], MeasurePut());
        if (options_.fio) {
          PREFIXD_ASSIGN(report.source_read, MeasureSource());
        }
      } else if (part == "segment") {
        PREFIXD_ASSIGN(report.lines[part], MeasureSegmentPut());
      } else if (part == "restore") {
        PREFIXD_TRY(OpenStored(0));
        PREFIXD_ASSIGN(report.lines[part], MeasureRestore());
      } else if (part == "rows") {
        PREFIXD_TRY(OpenStored(0));
        PREFIXD_ASSIGN(report.lines[part], MeasureRows());
      } else if (part == "host") {
        PREFIXD_TRY(OpenStored(prompt_.row_bytes() / 4 * 5));
        PREFIXD_ASSIGN(report.lines[part], MeasureHost("full restore, host tier"));
      } else if (part == "host_rows") {
        PREFIXD_TRY(OpenStored(prompt_.row_bytes() / 4 * 5));
        PREFIXD_ASSIGN(report.lines[part], MeasureHostRows());
      } else if (part == "reclustered") {
        PREFIXD_TRY(OpenStored(prompt_.row_bytes() / 4 * 5));
        PREFIXD_TRY(Recluster());
        PREFIXD_ASSIGN(report.lines[part], MeasureHost("the same, rows reclustered"));
        prefix_.reset();
        PREFIXD_TRY(RemoveStored());
      }
    }
    prefix_.reset();
    store_.reset();
    std::error_code ec;
    std::filesystem::remove_all(StoreDir(), ec);
    std::filesystem::remove_all(options_.dir / "runtime", ec);
    return report;
  }

 private:
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
    return MeasurePairs(
        {"durable put", "MB/s", "fio write", 1e6}, options_.pairs,
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
      uint64_t sum = 0;
      const auto begun = std::chrono::steady_clock::now();
      for (const auto* part : {&prompt_.k, &prompt_.v}) {
        for (const storage::AlignedBuffer& bytes : *part) {
          for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
            uint64_t word;
            std::memcpy(&word, bytes.data() + at, sizeof(word));
            sum += word;
          }
        }
      }
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
      rates.push_back(double(prompt_.row_bytes()) / seconds);
      if (sum == 0) return Error{Code::kInternal, "the synthetic prompt is all zero"};
    }
    return Summarise(std::move(rates));
  }

  // Measures the same through storage's SegmentWriter alone; rows are interleaved beforehand.
  Result<Paired> MeasureSegmentPut() {
    PREFIXD_TRY(OpenStore(0));
    PREFIXD_TRY(RemoveStored());
    const auto rows = InterleavedRows();
    return MeasurePairs(
        {"put of a segment", "MB/s", "fio write", 1e6}, options_.pairs,
        [&]() -> Result<Sample> {
          PREFIXD_TRY(RemoveStored());
          const auto bytes = double(prompt_.row_bytes());
          return Timed(bytes, bytes, [&] { return PutSegment(rows); });
        },
        Floor([&] { return FioWrite(); }));
  }

  std::vector<std::vector<std::byte>> InterleavedRows() const {
    const KvGeometry& g = prompt_.geometry;
    const RowShape row = g.row(0);
    const size_t n = prompt_.tokens.size();
    std::vector<std::vector<std::byte>> rows(g.n_layers);
    for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
      rows[layer].resize(n * g.n_kv_heads * row.bytes());
      std::byte* out = rows[layer].data();
      for (size_t h = 0; h < g.n_kv_heads; ++h) {
        for (size_t t = 0; t < n; ++t, out += row.bytes()) {
          const size_t at = t * g.n_kv_heads + h;
          std::memcpy(out, prompt_.k[layer].data() + at * row.key_bytes(), row.key_bytes());
          std::memcpy(out + row.key_bytes(), prompt_.v[layer].data() + at * row.value_bytes(),
                      row.value_bytes());
        }
      }
    }
    return rows;
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
    stored_ = false;
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
    if (!stored_) PREFIXD_TRY(PutSegment(InterleavedRows()));
    PREFIXD_ASSIGN(prefix_, store_->OpenPrefix(id_, 0));
    return {};
  }

  // Rewrites the stored rows in an order that is independent of the tokens' order.
  Status Recluster() {
    storage::ReclusterOptions recluster;
    recluster.chunk_tokens = 16384;  // like a daemon
    const size_t row_bytes = prompt_.geometry.row(0).bytes();
    recluster.order = [row_bytes](
                          uint32_t layer, uint32_t head, uint32_t chunk,
                          std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
      std::vector<uint32_t> order(rows.size() / row_bytes);
      std::iota(order.begin(), order.end(), 0);
      std::mt19937_64 rng((uint64_t{layer} << 40) + (uint64_t{head} << 20) + chunk);
      std::shuffle(order.begin(), order.end(), rng);
      return order;
    };
    prefix_.reset();
    PREFIXD_TRY(store_->Recluster(id_, recluster));
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
    job.file = StoreDir() / "segments" / (id_.ToString() + ".seg");
    job.offset = storage::kPageBytes;  // the rows begin after the header
    job.bytes = prompt_.row_bytes();
    return job;
  }

  Result<Paired> MeasureRestore() {
    const auto bytes = double(prompt_.row_bytes());
    FioJob job = ReadJob("read");
    job.block_bytes = kReadBytes;
    job.depth = kInflightBytes / kReadBytes;
    return MeasurePairs(
        {"full restore, cold", "MB/s", "fio read", 1e6}, options_.pairs,
        [&] { return Timed(bytes, bytes, [&] { return Restore(); }); },
        Floor([&] { return Fio(job, false); }));
  }

  // Rows of all heads of all layers in the order of a step, each in a page of its own and no two
  // pages near.
  std::vector<std::vector<uint32_t>> SparseRows(size_t* count) const {
    const KvGeometry& g = prompt_.geometry;
    const auto per_page =
        static_cast<uint32_t>(std::max<size_t>(1, storage::kPageBytes / g.row(0).bytes()));
    const auto pages = static_cast<uint32_t>(prompt_.tokens.size() / per_page);
    constexpr uint32_t kStride = 6;  // leaves at least three pages between
    std::mt19937_64 rng(3);
    std::vector<std::vector<uint32_t>> ids(size_t{g.n_layers} * g.n_kv_heads);
    for (auto& of_head : ids) {
      for (uint32_t p = 0; p + kStride <= pages; p += kStride) {
        of_head.push_back((p + static_cast<uint32_t>(rng() % 3)) * per_page +
                          static_cast<uint32_t>(rng() % per_page));
      }
      *count += of_head.size();
    }
    return ids;
  }

  // Reads the same rows from the host tier, beside memcpy of as many rows from as many places.
  Result<Paired> MeasureHostRows() {
    const KvGeometry& g = prompt_.geometry;
    const size_t row = g.row(0).bytes();
    size_t reads = 0;
    const auto ids = SparseRows(&reads);
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
    return MeasurePairs(
        {"random rows, host tier", "k/s", "memcpy", 1e3}, options_.pairs,
        [&] { return Timed(double(reads), bytes, ours); },
        [&] { return Timed(double(reads), bytes, copy); });
  }

  // Reads single rows, each in a page of its own and no two pages near, so that every row costs one
  // read. They cover all heads of all layers, in the order of a step.
  Result<Paired> MeasureRows() {
    const KvGeometry& g = prompt_.geometry;
    size_t reads = 0;
    const auto ids = SparseRows(&reads);
    FioJob job = ReadJob("randread");
    job.block_bytes = storage::kPageBytes;
    job.total_bytes = reads * storage::kPageBytes;
    job.depth = kRowDepth;
    const auto read_all = [&] {
      return pool_.ParallelFor(ids.size(), [&](size_t head) {
        std::vector<std::byte> out(ids[head].size() * g.row(0).bytes());
        return prefix_->ReadRows(static_cast<uint32_t>(head / g.n_kv_heads),
                                 static_cast<uint32_t>(head % g.n_kv_heads), ids[head], out,
                                 nullptr);
      });
    };
    return MeasurePairs(
        {"random rows, cold", "k/s", "fio randread", 1e3}, options_.pairs,
        [&] { return Timed(double(reads), double(job.total_bytes), read_all); },
        Floor([&] { return Fio(job, true); }));
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
    PREFIXD_ASSIGN(Paired host, MeasurePairs(
                                    {name, "MB/s", "memcpy", 1e6}, options_.pairs,
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
  bool stored_ = false;
  std::shared_ptr<const StoredPrefix> prefix_;
};

}  // namespace

Result<SpeedReport> MeasureSpeed(const Prompt& prompt, const SpeedOptions& options) {
  return SpeedBench(prompt, options).Run();
}

}  // namespace prefixd::bench
