// Binds PagedRows: rows between puts and restores and an engine's paged cache, one call a layer.
#include "python/core/paged.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "python/core/handles.h"

namespace prefixd::python {
namespace {

// So many bytes are gathered and handed over at a time: enough for one message, little enough to
// stay in a cache of the processor.
constexpr size_t kChunkBytes = 1 << 20;

std::vector<uint64_t> Copy(const Offsets& offsets) {
  return {offsets.data(), offsets.data() + offsets.size()};
}

// Keys and values behind one another, uninitialised.
struct Chunk {
  Chunk(const PagedRows& rows, uint32_t tokens)
      : key_bytes(size_t{tokens} * rows.n_heads() * rows.key_bytes()),
        data(std::make_unique_for_overwrite<std::byte[]>(
            key_bytes + size_t{tokens} * rows.n_heads() * rows.value_bytes())) {}
  std::byte* k() const { return data.get(); }
  std::byte* v() const { return data.get() + key_bytes; }

  size_t key_bytes;
  std::unique_ptr<std::byte[]> data;
};

// Hands tokens [first, first + n) over in runs: take(first, n, k, v).
template <typename Take>
Status GatherRuns(const PagedRows& rows, std::span<const std::byte> cache,
                  std::span<const int64_t> blocks, uint32_t first, uint32_t n, const Take& take) {
  PREFIXD_TRY(rows.Check(cache.size(), blocks, first, n));
  const size_t token = rows.n_heads() * (rows.key_bytes() + rows.value_bytes());
  const auto most = uint32_t(std::clamp<size_t>(kChunkBytes / token, 1, std::max(n, 1u)));
  const Chunk chunk(rows, most);
  for (uint32_t done = 0; done < n;) {
    const uint32_t run = std::min(most, n - done);
    rows.Gather(cache, blocks, first + done, run, chunk.k(), chunk.v());
    const size_t heads = size_t{run} * rows.n_heads();
    PREFIXD_TRY(take(first + done, run, std::span(chunk.k(), heads * rows.key_bytes()),
                     std::span(chunk.v(), heads * rows.value_bytes())));
    done += run;
  }
  return {};
}

void Exactly(const char* name, size_t bytes, size_t want) {
  if (bytes != want) throw Failure{InvalidArgument(std::string(name) + " must be [n][heads][dim]")};
}

}  // namespace

void WriteBlocks(PutStream& put, uint32_t layer, uint32_t first, uint32_t n, const PagedRows& rows,
                 std::span<const std::byte> cache, std::span<const int64_t> blocks) {
  Check(GatherRuns(rows, cache, blocks, first, n,
                   [&](uint32_t at, uint32_t run, std::span<const std::byte> k,
                       std::span<const std::byte> v) { return put.Write(layer, at, run, k, v); }));
}

Status AppendBlocks(Session& session, uint32_t layer, HeadRange heads, uint32_t first, uint32_t n,
                    const PagedRows& rows, std::span<const std::byte> cache,
                    std::span<const int64_t> blocks) {
  return GatherRuns(
      rows, cache, blocks, first, n,
      [&](uint32_t, uint32_t run, std::span<const std::byte> k, std::span<const std::byte> v) {
        return session.Append(layer, heads, run, k, v);
      });
}

void FillLayer(PyRestore& restore, uint32_t layer, const PagedRows& rows,
               std::span<std::byte> cache, std::span<const int64_t> blocks, uint32_t row_heads,
               uint32_t first_head) {
  if (restore.order != KvOrder::kTokenMajor) {
    throw Failure{InvalidArgument(
        "this restore is head-major, and blocks are filled from rows in the order of tokens; begin "
        "one without head_major")};
  }
  if (row_heads == 0) row_heads = rows.n_heads();
  if (uint64_t{first_head} + rows.n_heads() > row_heads) {
    throw Failure{InvalidArgument("the cache has more heads than the rows")};
  }
  const uint32_t end = restore.restore_end;
  while (true) {
    const auto next = Unwrap(restore.restore->Next());
    if (!next || next->layer != layer) {
      throw Failure{InvalidArgument("layers are filled once each, in order")};
    }
    const size_t row = size_t{next->tokens.size()} * row_heads;
    Exactly("stored keys", next->k.size(), row * rows.key_bytes());
    Exactly("stored values", next->v.size(), row * rows.value_bytes());
    Check(rows.Check(cache.size(), blocks, next->tokens.begin, next->tokens.size()));
    rows.Scatter(cache, blocks, next->tokens.begin, next->tokens.size(), row_heads, first_head,
                 next->k.data(), next->v.data());
    if (next->tokens.end == end) return;
  }
}

void BindPaged(nb::module_& m) {
  nb::class_<PagedRows>(m, "PagedRows")
      .def(
          "__init__",
          [](PagedRows* self, const Offsets& k, const Offsets& v, uint64_t block_stride,
             uint64_t head_stride, uint32_t n_heads, uint32_t element_bytes) {
            PagedOrder order;
            order.block_tokens = uint32_t(k.shape(0));
            order.block_stride = block_stride;
            order.head_stride = head_stride;
            order.n_heads = n_heads;
            order.k_offsets = Copy(k);
            order.v_offsets = Copy(v);
            if (k.shape(0) != v.shape(0)) {
              throw Failure{InvalidArgument("k_offsets and v_offsets need the same tokens")};
            }
            new (self) PagedRows(Unwrap(PagedRows::Create(std::move(order), element_bytes)));
          },
          nb::arg("k_offsets"), nb::arg("v_offsets"), nb::arg("block_stride"),
          nb::arg("head_stride"), nb::arg("n_heads"), nb::arg("element_bytes"))
      .def(
          "gather",
          [](const PagedRows& rows, const In& cache, const Blocks& blocks, uint32_t first,
             uint32_t n, const Out& k, const Out& v) {
            const auto table = Span(blocks);
            Check(rows.Check(cache.nbytes(), table, first, n));
            Exactly("k", k.nbytes(), size_t{n} * rows.n_heads() * rows.key_bytes());
            Exactly("v", v.nbytes(), size_t{n} * rows.n_heads() * rows.value_bytes());
            const std::span from(static_cast<const std::byte*>(cache.data()), cache.nbytes());
            nb::gil_scoped_release unlocked;
            rows.Gather(from, table, first, n, static_cast<std::byte*>(k.data()),
                        static_cast<std::byte*>(v.data()));
          },
          nb::arg("cache"), nb::arg("blocks"), nb::arg("first"), nb::arg("n"),
          nb::arg("k").noconvert(), nb::arg("v").noconvert())
      .def(
          "scatter",
          [](const PagedRows& rows, const Out& cache, const Blocks& blocks, uint32_t first,
             uint32_t n, const In& k, const In& v) {
            const auto table = Span(blocks);
            Check(rows.Check(cache.nbytes(), table, first, n));
            Exactly("k", k.nbytes(), size_t{n} * rows.n_heads() * rows.key_bytes());
            Exactly("v", v.nbytes(), size_t{n} * rows.n_heads() * rows.value_bytes());
            const std::span to(static_cast<std::byte*>(cache.data()), cache.nbytes());
            nb::gil_scoped_release unlocked;
            rows.Scatter(to, table, first, n, rows.n_heads(), 0,
                         static_cast<const std::byte*>(k.data()),
                         static_cast<const std::byte*>(v.data()));
          },
          nb::arg("cache").noconvert(), nb::arg("blocks"), nb::arg("first"), nb::arg("n"),
          nb::arg("k"), nb::arg("v"));
}

}  // namespace prefixd::python
