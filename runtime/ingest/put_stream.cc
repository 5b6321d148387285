#include "runtime/ingest/put_stream.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "attention/rows/finite_check.h"
#include "base/call_scope.h"
#include "base/interrupted_writes.h"
#include "base/session_arguments.h"
#include "runtime/derived/query_samples.h"
#include "runtime/rates/prefill_watch.h"

namespace prefixd {
namespace {

// One thread checks and interleaves a tile at a time, small enough for the core's own cache.
constexpr size_t kTileBytes = 256u << 10;
// A batch of rows is interleaved before its first row is written.
constexpr size_t kBatchBytes = 8u << 20;

// Copies like memcpy; the usual sizes of keys and values need no call.
void CopyItem(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes == 128) {
    std::memcpy(to, from, 128);
  } else if (bytes == 256) {
    std::memcpy(to, from, 256);
  } else {
    std::memcpy(to, from, bytes);
  }
}

class PutStreamImpl : public PutStream {
 public:
  PutStreamImpl(PutContext context, std::unique_ptr<PutPart> writer)
      : context_(std::move(context)),
        writer_(std::move(writer)),
        missing_(writer_->range()),
        reservoir_(context_.geometry, context_.prompt_tokens, context_.query_samples) {}
  // A child of fork() must neither end its parent's put nor free the store that it keeps.
  ~PutStreamImpl() override {
    if (context_.opened.holds()) return;
    static_cast<void>(writer_.release());
    static_cast<void>(new PutContext(std::move(context_)));
  }
  PutStreamImpl(const PutStreamImpl&) = delete;
  PutStreamImpl& operator=(const PutStreamImpl&) = delete;

  TokenRange missing() const override { return missing_; }

  Status Write(uint32_t layer, uint32_t first, uint32_t n, std::span<const std::byte> k,
               std::span<const std::byte> v) override {
    PREFIXD_TRY(CheckRun(layer, first, n));
    const LayerShape shape = context_.geometry.layer(layer);
    const RowShape row = shape.row();
    const size_t k_token = shape.n_kv_heads * row.key_bytes();
    const size_t v_token = shape.n_kv_heads * row.value_bytes();
    PREFIXD_TRY(CheckPutSize("k", k.size(), n * k_token));
    PREFIXD_TRY(CheckPutSize("v", v.size(), n * v_token));
    const TokenRange own{std::max(first, missing_.begin), std::min(first + n, missing_.end)};
    if (own.begin >= own.end) return {};
    // Where the same write ended early, it goes on.
    const uint32_t begin = interrupted_.Resume(layer, own), end = own.end;
    k = k.subspan((begin - first) * k_token, (end - begin) * k_token);
    v = v.subspan((begin - first) * v_token, (end - begin) * v_token);
    const KvRun run{layer, begin, end - begin, k, v};
    PREFIXD_TRY(writer_->CheckRun(layer, begin, run.n));  // a call writes all its rows or none

    // The rows of a batch, and as many again for their encoding. A refusal writes nothing.
    const size_t rows_bytes = std::min<size_t>(kBatchBytes, run.n * (k_token + v_token));
    PREFIXD_TRY(context_.memory.Resize(
        std::max(context_.memory.bytes(), context_.fixed_bytes + 2 * rows_bytes)));
    // A batch is checked once it is copied, because its source may be memory that a client can
    // still change. A larger call is checked whole before any of it is written.
    const size_t token = k_token + v_token;
    const size_t tile = std::max<size_t>(64, std::bit_floor(kTileBytes / token));
    const size_t batch = std::max<size_t>(1, kBatchBytes / (tile * token)) * tile;
    if (run.n > batch) PREFIXD_TRY(ForTiles(run, 0, run.n, tile, TileWork::kCheck));
    uint32_t next = begin;  // the first token that is not written
    const auto write = [&]() -> Status {
      for (size_t at = 0; at < run.n; at += batch) {
        const size_t n_batch = std::min(batch, run.n - at);
        PREFIXD_TRY(ForTiles(run, at, n_batch, tile, TileWork::kCopy));
        for (size_t t = 0; t < n_batch; t += tile) {
          const auto n_tile = static_cast<uint32_t>(std::min(tile, n_batch - t));
          PREFIXD_TRY(writer_->WriteRows(
              layer, next, n_tile,
              std::span<const std::byte>(rows_).subspan(t * token, n_tile * token)));
          next += n_tile;
          written_ += n_tile;
        }
      }
      return {};
    };
    const auto begun = PrefillWatch::Clock::now();
    Status written = write();
    const uint32_t computed = std::max(begin, context_.prefill_from.value_or(end));
    if (written.ok() && computed < end) {
      prefill_.Note(layer, end - computed, begun, PrefillWatch::Clock::now());
    }
    if (written.ok() || EndedEarly(written.error())) interrupted_.Note(layer, own, next);
    return written;
  }

  PutProgress progress() const override {
    return {written_, uint64_t{missing_.size()} * StoredLayers(context_.geometry)};
  }

  Status WriteQueries(uint32_t layer, uint32_t first, uint32_t n,
                      std::span<const float> q) override {
    PREFIXD_TRY(CheckRun(layer, first, n));
    const LayerShape shape = context_.geometry.layer(layer);
    const size_t token = shape.query_floats();
    PREFIXD_TRY(CheckPutSize("q", q.size_bytes(), n * token * sizeof(float)));
    for (size_t i = 0; i < q.size(); ++i) {
      if (!std::isfinite(q[i])) {
        return InvalidArgument("query of layer " + std::to_string(layer) + ", token " +
                               std::to_string(first + i / token) + ", head " +
                               std::to_string(FirstQueryHead(layer) + i % token / shape.key_dim) +
                               " is NaN or Inf");
      }
    }
    reservoir_.Add(layer, first, n, q);
    return {};
  }

  Result<PutResult> Commit() override {
    PREFIXD_TRY(CheckOpen());
    PREFIXD_TRY(CheckCall());
    auto result = writer_->Commit(reservoir_.Take(), context_.wait);
    // Rows are missing, or other parts, or the call ended before them: the put can go on. Any other
    // failure has ended it.
    const bool goes_on = !result.ok() && (result.error().code == Code::kFailedPrecondition ||
                                          EndedEarly(result.error()));
    if (!goes_on) writer_.reset();
    if (result.ok()) {
      context_.rates->NotePrefill(context_.tenant, context_.model,
                                  prefill_.tokens(StoredLayers(context_.geometry)),
                                  prefill_.seconds());
    }
    return result;
  }

  void Abort() override {
    if (context_.opened.holds()) writer_.reset();
  }

 private:
  Status CheckOpen() const {
    PREFIXD_TRY(context_.opened.Check());
    if (writer_) return {};
    return PutEnded();
  }

  Status CheckRun(uint32_t layer, uint32_t first, uint32_t n) const {
    PREFIXD_TRY(CheckOpen());
    return CheckPutRun(context_.geometry, context_.prompt_tokens, layer, first, n);
  }

  // Describes what one call writes: tokens [first, first + n) of a layer.
  struct KvRun {
    uint32_t layer, first;
    size_t n;
    std::span<const std::byte> k, v;
  };
  enum class TileWork : uint8_t { kCheck, kCopy };

  // Copies the rows of tokens [at, at + n) of the run into rows_, tile by tile, and checks that
  // what it has copied is finite, or checks them where they are. The first pass reads memory that
  // no cache holds yet, which is the slow part of a put where memory is slow: the pool's threads
  // share it, and each tile is read from memory once.
  Status ForTiles(const KvRun& run, size_t at, size_t n, size_t tile, TileWork work) {
    const KvGeometry& g = context_.geometry;
    const size_t k_token = run.k.size() / run.n, v_token = run.v.size() / run.n;
    const size_t token = k_token + v_token, element = DTypeBytes(g.dtype);
    if (work == TileWork::kCopy && rows_.size() < n * token) rows_.resize(n * token);
    std::atomic<bool> finite{true};
    PREFIXD_TRY(context_.pool->ParallelFor(
        (n + tile - 1) / tile,
        [&](size_t i) -> Status {
          const size_t t = i * tile, n_tile = std::min(tile, n - t);
          const std::byte* k = run.k.data() + (at + t) * k_token;
          const std::byte* v = run.v.data() + (at + t) * v_token;
          bool all_finite = true;
          if (work == TileWork::kCopy) {
            std::byte* const rows = rows_.data() + t * token;
            Interleave(run.layer, n_tile, k, v, rows);
            all_finite = AllFinite(g.dtype, rows, n_tile * token / element);
          } else {
            all_finite = AllFinite(g.dtype, k, n_tile * k_token / element) &&
                         AllFinite(g.dtype, v, n_tile * v_token / element);
          }
          if (!all_finite) finite = false;
          return {};
        },
        WorkPriority::kBackground));
    return finite ? Status() : NotFinite(run);
  }

  Error NotFinite(const KvRun& run) const {
    const DType dtype = context_.geometry.dtype;
    const auto first_in = [&](std::span<const std::byte> bytes) {
      const size_t token = bytes.size() / run.n;
      size_t at = 0;
      while (at < run.n && AllFinite(dtype, bytes.data() + at * token, token / DTypeBytes(dtype))) {
        ++at;
      }
      return at;
    };
    const size_t key = first_in(run.k), at = key < run.n ? key : first_in(run.v);
    return InvalidArgument(std::string(key < run.n ? "key" : "value") + " of layer " +
                           std::to_string(run.layer) + ", token " + std::to_string(run.first + at) +
                           " is NaN or Inf; nothing was stored of it");
  }

  // Writes out [n_kv_heads][n][row] from n tokens' k [n][n_kv_heads][key] and v likewise.
  void Interleave(uint32_t layer, size_t n, const std::byte* k, const std::byte* v,
                  std::byte* out) const {
    const size_t heads = context_.geometry.layer(layer).n_kv_heads;
    const RowShape row = context_.geometry.row(layer);
    const size_t key = row.key_bytes(), value = row.value_bytes();
    for (size_t h = 0; h < heads; ++h) {
      for (size_t t = 0; t < n; ++t, out += key + value) {
        CopyItem(out, k + (t * heads + h) * key, key);
        CopyItem(out + key, v + (t * heads + h) * value, value);
      }
    }
  }

  // The number in the model of the first query head that this put has in a layer.
  size_t FirstQueryHead(uint32_t layer) const {
    const LayerShape shape = context_.geometry.layer(layer);
    return size_t{context_.first_head} * shape.n_q_heads / context_.geometry.n_kv_heads;
  }

  PutContext context_;
  std::unique_ptr<PutPart> writer_;
  TokenRange missing_;
  QueryReservoir reservoir_;
  std::vector<std::byte> rows_;  // one batch
  InterruptedWrites interrupted_;
  uint64_t written_ = 0;  // tokens times layers
  PrefillWatch prefill_;
};

}  // namespace

std::unique_ptr<PutStream> MakePutStream(PutContext context, std::unique_ptr<PutPart> writer) {
  return std::make_unique<PutStreamImpl>(std::move(context), std::move(writer));
}

}  // namespace prefixd
