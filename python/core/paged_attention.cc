#include "python/core/paged_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>

#include "attention/rows/rows.h"
#include "base/capture_errors.h"

// Loops over tokens and dimensions run at the width of the machine, whatever the module was built
// for.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define PREFIXD_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PREFIXD_WIDE
#endif

namespace prefixd::python {
namespace {

// Fewer multiplications than these are not worth a second thread.
constexpr uint64_t kThreadWork = 1 << 23;
// Queries that one thread takes at a time, with one head's blocks.
constexpr uint32_t kQueriesTogether = 64;

// scores[t] = sum over d of q[d] * keys[d][t].
PREFIXD_WIDE void Dot(const float* q, const float* const* keys, uint32_t dim, uint32_t n,
                      float* __restrict scores) {
  std::fill_n(scores, n, 0.0f);
  for (uint32_t d = 0; d < dim; ++d) {
    const float* __restrict key = keys[d];
    const float x = q[d];
    for (uint32_t t = 0; t < n; ++t) scores[t] += x * key[t];
  }
}

// y[d] = keep * y[d] + sum over t of p[t] * values[t][d].
PREFIXD_WIDE void Gather(const float* p, const float* const* values, uint32_t n, uint32_t dim,
                         float keep, float* __restrict y) {
  for (uint32_t d = 0; d < dim; ++d) y[d] *= keep;
  for (uint32_t t = 0; t < n; ++t) {
    const float* __restrict value = values[t];
    const float x = p[t];
    for (uint32_t d = 0; d < dim; ++d) y[d] += x * value[d];
  }
}

// Copies n elements from their places, `step` places apart in the table, and makes them float32.
void Pick(const std::byte* head, const uint64_t* places, size_t step, uint32_t n, DType dtype,
          std::vector<std::byte>* bits, float* out) {
  const size_t size = DTypeBytes(dtype);
  bits->resize(n * size);
  for (uint32_t i = 0; i < n; ++i) {
    std::memcpy(bits->data() + i * size, head + places[i * step] * size, size);
  }
  ToFloat(dtype, bits->data(), {out, n});
}

struct Task {
  size_t sequence;
  uint32_t first, n, head;
};

}  // namespace

PagedAttention::PagedAttention(const PagedRows& rows, DType dtype) : rows_(&rows), dtype_(dtype) {
  const PagedOrder& order = rows.order();
  keys_in_place_ = values_in_place_ = dtype == DType::kF32;
  for (size_t i = 0; i < order.k_offsets.size() && keys_in_place_; ++i) {
    keys_in_place_ = order.k_offsets[i] == order.k_offsets[i % rows.key_dim()] + i / rows.key_dim();
  }
  for (size_t i = 0; i < order.v_offsets.size() && values_in_place_; ++i) {
    const size_t d = i % rows.value_dim();
    values_in_place_ = order.v_offsets[i] == order.v_offsets[i - d] + d;
  }
}

Result<PagedAttention> PagedAttention::Create(const PagedRows& rows, DType dtype) {
  if (DTypeBytes(dtype) != rows.element_bytes()) {
    return InvalidArgument("the cache's elements have " + std::to_string(rows.element_bytes()) +
                           " bytes, and those of " + std::string(DTypeName(dtype)) + " have not");
  }
  return PagedAttention(rows, dtype);
}

void PagedAttention::Load(const std::byte* head, uint32_t tokens, Tile* tile) const {
  const PagedOrder& order = rows_->order();
  const uint32_t dk = rows_->key_dim(), dv = rows_->value_dim();
  const auto* elements = reinterpret_cast<const float*>(head);
  tile->keys.resize(dk);
  tile->values.resize(tokens);
  tile->scratch.resize((keys_in_place_ ? 0 : size_t{dk} * tokens) +
                       (values_in_place_ ? 0 : size_t{dv} * tokens));
  float* free = tile->scratch.data();
  for (uint32_t d = 0; d < dk; ++d) {
    if (keys_in_place_) {
      tile->keys[d] = elements + order.k_offsets[d];
      continue;
    }
    Pick(head, order.k_offsets.data() + d, dk, tokens, dtype_, &tile->bits, free);
    tile->keys[d] = free;
    free += tokens;
  }
  for (uint32_t t = 0; t < tokens; ++t) {
    const uint64_t* places = order.v_offsets.data() + size_t{t} * dv;
    if (values_in_place_) {
      tile->values[t] = elements + places[0];
      continue;
    }
    Pick(head, places, 1, dv, dtype_, &tile->bits, free);
    tile->values[t] = free;
    free += dv;
  }
}

void PagedAttention::AttendHead(std::span<const std::byte> cache, const LayerGeometry& layer,
                                uint32_t n_q_heads, const PagedQueries& sequence, uint32_t first,
                                uint32_t n, uint32_t head, Tile* tile) const {
  const PagedOrder& order = rows_->order();
  const uint32_t dk = rows_->key_dim(), dv = rows_->value_dim();
  const uint32_t group = n_q_heads / order.n_heads;
  const uint32_t before = sequence.tokens - sequence.queries;  // tokens without a query
  std::vector<float> most(size_t{n} * group, -std::numeric_limits<float>::infinity());
  std::vector<float> sum(size_t{n} * group, 0.0f), scores(order.block_tokens);
  const auto at = [&](uint32_t i, uint32_t g) {
    return size_t{first + i} * n_q_heads + size_t{head} * group + g;
  };
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t g = 0; g < group; ++g) std::fill_n(sequence.y + at(i, g) * dv, dv, 0.0f);
  }
  const uint32_t end = before + first + n;  // behind the last token that any query sees
  for (uint32_t begin = sequence.first / order.block_tokens * order.block_tokens; begin < end;
       begin += order.block_tokens) {
    // Tokens of the first block that are left out.
    const uint32_t out = sequence.first > begin ? sequence.first - begin : 0;
    const auto block = static_cast<uint64_t>(sequence.blocks[begin / order.block_tokens]);
    const uint64_t place = block * order.block_stride + head * order.head_stride;
    Load(cache.data() + place * DTypeBytes(dtype_), std::min(order.block_tokens, end - begin),
         tile);
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t seen = before + first + i + 1;
      if (seen <= begin) continue;
      const uint32_t tokens = std::min(order.block_tokens, seen - begin);
      for (uint32_t g = 0; g < group; ++g) {
        const size_t row = at(i, g), own = size_t{i} * group + g;
        Dot(sequence.q + row * dk, tile->keys.data(), dk, tokens, scores.data());
        float high = most[own];
        for (uint32_t t = out; t < tokens; ++t) {
          float s = scores[t] * layer.scale;
          if (layer.softcap > 0) s = layer.softcap * std::tanh(s / layer.softcap);
          scores[t] = s;
          high = std::max(high, s);
        }
        const float keep = std::exp(most[own] - high);
        float added = 0;
        for (uint32_t t = out; t < tokens; ++t) added += scores[t] = std::exp(scores[t] - high);
        Gather(scores.data() + out, tile->values.data() + out, tokens - out, dv, keep,
               sequence.y + row * dv);
        sum[own] = sum[own] * keep + added;
        most[own] = high;
      }
    }
  }
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t g = 0; g < group; ++g) {
      const size_t row = at(i, g), own = size_t{i} * group + g;
      const float share = 1 / sum[own];
      for (uint32_t d = 0; d < dv; ++d) sequence.y[row * dv + d] *= share;
      sequence.lse[row] = most[own] + std::log(sum[own]);
    }
  }
}

Status PagedAttention::Attend(std::span<const std::byte> cache, const LayerGeometry& layer,
                              uint32_t n_q_heads, std::span<const PagedQueries> sequences,
                              uint32_t threads) const {
  const uint32_t heads = rows_->n_heads();
  if (n_q_heads == 0 || n_q_heads % heads != 0) {
    return InvalidArgument(std::to_string(n_q_heads) + " query heads do not share " +
                           std::to_string(heads) + " KV heads evenly");
  }
  std::vector<Task> tasks;
  uint64_t work = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PagedQueries& one = sequences[s];
    if (one.first > one.tokens || one.queries > one.tokens - one.first) {
      return InvalidArgument(std::to_string(one.queries) + " queries of tokens " +
                             std::to_string(one.first) + ".." + std::to_string(one.tokens));
    }
    const uint32_t tokens = one.tokens - one.first;
    PREFIXD_TRY(rows_->Check(cache.size(), one.blocks, one.first, tokens));
    work += uint64_t{one.queries} * tokens * n_q_heads * (rows_->key_dim() + rows_->value_dim());
    for (uint32_t first = 0; first < one.queries; first += kQueriesTogether) {
      const uint32_t n = std::min(kQueriesTogether, one.queries - first);
      for (uint32_t head = 0; head < heads; ++head) tasks.push_back({s, first, n, head});
    }
  }
  const uint64_t wanted = std::min<uint64_t>({threads, tasks.size(), 1 + work / kThreadWork});
  std::vector<Status> ended(std::max<uint64_t>(wanted, 1));
  std::atomic<size_t> next = 0;
  const auto run = [&](size_t thread) {
    ended[thread] = CaptureErrors([&]() -> Status {
      Tile tile;
      for (size_t i = next++; i < tasks.size(); i = next++) {
        const Task& task = tasks[i];
        AttendHead(cache, layer, n_q_heads, sequences[task.sequence], task.first, task.n, task.head,
                   &tile);
      }
      return {};
    });
  };
  {
    std::vector<std::jthread> others;
    // Where no more threads can be had, those that there are do the work.
    (void)CaptureErrors([&]() -> Status {
      others.reserve(wanted);
      for (size_t i = 1; i < wanted; ++i) others.emplace_back(run, i);
      return {};
    });
    run(0);
  }
  for (const Status& status : ended) PREFIXD_TRY(status);
  return {};
}

}  // namespace prefixd::python
