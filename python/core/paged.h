// Declares what puts and restores do with the blocks of an engine's paged cache. Callers have let
// go of the interpreter's lock.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "python/core/handles.h"
#include "python/core/paged_rows.h"

namespace prefixd::python {

using Offsets = nb::ndarray<const uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Blocks = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline std::span<const int64_t> Span(const Blocks& blocks) {
  return {blocks.data(), blocks.size()};
}

// Writes tokens [first, first + n) of one layer out of the engine's blocks.
void WriteBlocks(PutStream& put, uint32_t layer, uint32_t first, uint32_t n, const PagedRows& rows,
                 std::span<const std::byte> cache, std::span<const int64_t> blocks);

// Appends own tokens to some KV heads of one layer of a session, out of the engine's blocks: tokens
// [first, first + n) of those that the blocks have, with all heads of the cache.
Status AppendBlocks(Session& session, uint32_t layer, HeadRange heads, uint32_t first, uint32_t n,
                    const PagedRows& rows, std::span<const std::byte> cache,
                    std::span<const int64_t> blocks);

// Takes all runs of the restore's next layer into the engine's blocks. The stored rows have
// `row_heads` heads (0: as many as the cache), of which the cache's are those from first_head on.
void FillLayer(PyRestore& restore, uint32_t layer, const PagedRows& rows,
               std::span<std::byte> cache, std::span<const int64_t> blocks, uint32_t row_heads,
               uint32_t first_head);

}  // namespace prefixd::python
