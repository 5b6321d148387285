#include "runtime/put_stream.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "runtime/ingest.h"
#include "runtime/query_samples.h"
#include "storage/errors.h"

namespace prefixd {
namespace {

using Clock = std::chrono::steady_clock;

// What one thread checks at a time.
constexpr size_t kCheckBytes = 256u << 10;
// Rows are interleaved in tiles that stay in the core's own cache until they are checksummed.
constexpr size_t kTileBytes = 256u << 10;

// NaN and Inf have all exponent bits set: the largest exponent field tells. This is the first to
// touch what the caller wrote, mostly from far memory, so it asks for the next block while it looks
// at one: the hardware's prefetching ends with every page.
template <typename Bits>
bool ExponentsBelow(Bits exponent, const std::byte* bytes, size_t n) {
  constexpr size_t kBlockBytes = 2048, kLineBytes = 64, kBlock = kBlockBytes / sizeof(Bits);
  Bits largest = 0;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const std::byte* block = bytes + begin * sizeof(Bits);
    const size_t size = std::min(kBlock, n - begin);
    for (size_t at = 0; at < size * sizeof(Bits); at += kLineBytes) {
      __builtin_prefetch(block + kBlockBytes + at);
    }
    for (size_t i = 0; i < size; ++i) {
      Bits bits;
      std::memcpy(&bits, block + i * sizeof(Bits), sizeof(Bits));
      largest = std::max(largest, static_cast<Bits>(bits & exponent));
    }
  }
  return largest < exponent;
}

bool AllFinite(DType dtype, const std::byte* bytes, size_t n) {
  if (dtype == DType::kF32) return ExponentsBelow<int32_t>(0x7f800000, bytes, n);
  return ExponentsBelow<int16_t>(dtype == DType::kBf16 ? 0x7f80 : 0x7c00, bytes, n);
}

// As memcpy; the usual sizes of keys and values need no call.
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
  PutStreamImpl(PutContext context, std::unique_ptr<storage::SegmentWriter> writer)
      : context_(std::move(context)),
        writer_(std::move(writer)),
        missing_(writer_->range()),
        reservoir_(context_.geometry, context_.prompt_tokens, context_.query_samples) {}

  TokenRange missing() const override { return missing_; }

  Status Write(uint32_t layer, uint32_t first, uint32_t n, std::span<const std::byte> k,
               std::span<const std::byte> v) override {
    const KvGeometry& geometry = context_.geometry;
    const RowShape row = geometry.row();
    const size_t k_token = geometry.n_kv_heads * row.key_bytes();
    const size_t v_token = geometry.n_kv_heads * row.value_bytes();
    PREFIXD_TRY(CheckRun(layer, first, n));
    PREFIXD_TRY(CheckSize("k", k.size(), n * k_token));
    PREFIXD_TRY(CheckSize("v", v.size(), n * v_token));
    const uint32_t begin = std::max(first, missing_.begin);
    const uint32_t end = std::min(first + n, missing_.end);
    if (begin >= end) return {};
    k = k.subspan((begin - first) * k_token, (end - begin) * k_token);
    v = v.subspan((begin - first) * v_token, (end - begin) * v_token);
    PREFIXD_TRY(CheckFinite("key", layer, begin, row.dtype, k, end - begin));
    PREFIXD_TRY(CheckFinite("value", layer, begin, row.dtype, v, end - begin));

    PREFIXD_TRY(writer_->CheckRun(layer, begin, end - begin));  // all of it, or nothing
    const size_t tile = std::max<size_t>(64, std::bit_floor(kTileBytes / (k_token + v_token)));
    for (size_t at = 0; at < end - begin; at += tile) {
      const size_t n_tile = std::min<size_t>(tile, end - begin - at);
      Interleave(n_tile, k.data() + at * k_token, v.data() + at * v_token);
      PREFIXD_TRY(writer_->WriteRows(layer, begin + static_cast<uint32_t>(at),
                                     static_cast<uint32_t>(n_tile), rows_));
      written_ += n_tile;
    }
    return {};
  }

  PutProgress progress() const override {
    return {written_, uint64_t{missing_.size()} * context_.geometry.n_layers};
  }

  Status WriteQueries(uint32_t layer, uint32_t first, uint32_t n,
                      std::span<const float> q) override {
    const KvGeometry& geometry = context_.geometry;
    const size_t token = size_t{geometry.n_q_heads} * geometry.key_dim;
    PREFIXD_TRY(CheckRun(layer, first, n));
    PREFIXD_TRY(CheckSize("q", q.size_bytes(), n * token * sizeof(float)));
    for (size_t i = 0; i < q.size(); ++i) {
      if (!std::isfinite(q[i])) {
        return InvalidArgument("query of layer " + std::to_string(layer) + ", token " +
                               std::to_string(first + i / token) + ", head " +
                               std::to_string(i % token / geometry.key_dim) + " is NaN or Inf");
      }
    }
    reservoir_.Add(layer, first, n, q);
    return {};
  }

  Result<PutResult> Commit() override {
    PREFIXD_TRY(CheckOpen());
    auto id = writer_->Commit();
    if (!id.ok()) return std::move(id).error();
    writer_.reset();
    PutResult result;
    result.prefix = id->ToString();
    result.n_tokens = context_.prompt_tokens;
    result.stored_tokens = missing_.size();
    result.seconds = std::chrono::duration<double>(Clock::now() - begun_).count();
    const auto stored = context_.storage->GetPrefix(*id);
    if (stored.ok()) {
      result.encoding = stored->encoding;
      result.encoding_error = stored->encoding_error;
    }
    if (missing_.size() > 0) {
      PREFIXD_ASSIGN(const auto& info, stored);
      result.bytes = info.own_bytes;
      // The rows are durable whatever happens here: without samples the prefix is untuned.
      const QuerySamples samples = reservoir_.Take();
      if (!samples.empty() && info.n_tokens == context_.prompt_tokens) {
        Status kept =
            context_.storage->PutBlob(*id, kQueriesBlob, kQueriesProducer, samples.Serialize());
        if (!kept.ok()) {
          storage::LogWarning("the sampled queries of prefix " + id->ToString() +
                              " could not be stored, so it is untuned: " + kept.error().message);
        }
      }
      context_.committed(*id);
    }
    return result;
  }

  void Abort() override {
    if (writer_) writer_->Abort();
    writer_.reset();
  }

 private:
  Status CheckOpen() const {
    if (writer_) return {};
    return Error{Code::kFailedPrecondition, "this put was committed or aborted already"};
  }

  Status CheckRun(uint32_t layer, uint32_t first, uint32_t n) const {
    PREFIXD_TRY(CheckOpen());
    if (layer >= context_.geometry.n_layers) {
      return InvalidArgument("layer " + std::to_string(layer) + " is not one of the model's " +
                             std::to_string(context_.geometry.n_layers));
    }
    if (first > context_.prompt_tokens || n > context_.prompt_tokens - first) {
      return InvalidArgument(
          "tokens " + std::to_string(first) + ".." + std::to_string(uint64_t{first} + n) +
          " are not all in the prompt of " + std::to_string(context_.prompt_tokens));
    }
    return {};
  }

  static Status CheckSize(const char* what, size_t got, size_t want) {
    if (got == want) return {};
    return InvalidArgument(std::string(what) + " has " + std::to_string(got) +
                           " bytes; this many tokens of the model's geometry take " +
                           std::to_string(want));
  }

  // Nothing of a call is stored unless all of it is finite. Where memory is slow this is the slow
  // part of a put, since it reads what nobody has read yet: the pool's threads share it.
  Status CheckFinite(const char* what, uint32_t layer, uint32_t first, DType dtype,
                     std::span<const std::byte> bytes, size_t n_tokens) const {
    std::atomic<bool> finite{true};
    PREFIXD_TRY(context_.pool->ParallelFor((bytes.size() + kCheckBytes - 1) / kCheckBytes,
                                           [&](size_t i) -> Status {
                                             const auto part = bytes.subspan(i * kCheckBytes);
                                             const size_t n = std::min(part.size(), kCheckBytes) /
                                                              DTypeBytes(dtype);
                                             if (!AllFinite(dtype, part.data(), n)) finite = false;
                                             return {};
                                           },
                                           WorkPriority::kBackground));
    if (finite) return {};
    const size_t token = bytes.size() / n_tokens;
    size_t at = 0;
    while (AllFinite(dtype, bytes.data() + at * token, token / DTypeBytes(dtype))) ++at;
    return InvalidArgument(std::string(what) + " of layer " + std::to_string(layer) + ", token " +
                           std::to_string(first + at) + " is NaN or Inf; nothing was stored of it");
  }

  // rows_ [n_kv_heads][n][row] of n tokens' k [n][n_kv_heads][key] and v likewise.
  void Interleave(size_t n, const std::byte* k, const std::byte* v) {
    const size_t heads = context_.geometry.n_kv_heads;
    const RowShape row = context_.geometry.row();
    const size_t key = row.key_bytes(), value = row.value_bytes();
    rows_.resize(n * heads * row.bytes());
    std::byte* out = rows_.data();
    for (size_t h = 0; h < heads; ++h) {
      for (size_t t = 0; t < n; ++t, out += key + value) {
        CopyItem(out, k + (t * heads + h) * key, key);
        CopyItem(out + key, v + (t * heads + h) * value, value);
      }
    }
  }

  PutContext context_;
  std::unique_ptr<storage::SegmentWriter> writer_;
  TokenRange missing_;
  QueryReservoir reservoir_;
  std::vector<std::byte> rows_;
  uint64_t written_ = 0;  // tokens times layers
  const Clock::time_point begun_ = Clock::now();
};

}  // namespace

std::unique_ptr<PutStream> MakePutStream(PutContext context,
                                         std::unique_ptr<storage::SegmentWriter> writer) {
  return std::make_unique<PutStreamImpl>(std::move(context), std::move(writer));
}

}  // namespace prefixd
