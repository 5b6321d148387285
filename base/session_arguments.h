// Checks the arguments of sessions and puts. The embedded store and the client of a daemon share
// these checks, so that both refuse the same with the same words. A daemon never relies on what its
// client has checked.
//
// Thread-safety: free functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "prefixd/kv_shape.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"
#include "prefixd/session.h"
#include "prefixd/session_info.h"

namespace prefixd {

// ---- sessions ----

Status CheckOwnMemory(uint32_t own_memory_tokens);  // of AttachSpec
// id: SessionInfo::id.
Error SessionDetached(uint64_t id);
// got, want: elements of the tensor `what`.
Status CheckSize(const char* what, size_t got, size_t want);
Status CheckHead(const KvGeometry& geometry, uint32_t layer, uint32_t kv_head);
// Checks that ids ascend and lie in the prefix.
Status CheckIds(std::span<const uint32_t> ids, uint32_t n_tokens);
Status CheckRange(TokenRange range, uint32_t n_tokens);
// Returns the range with its number of heads; all of them must be the layer's.
Result<HeadRange> ResolveHeads(const KvGeometry& geometry, uint32_t layer, HeadRange heads);
// Checks a slice and the sizes of its outputs, in bytes; returns its resolved heads.
Result<HeadRange> CheckSlice(const SessionInfo& info, const LayerSlice& slice, size_t k_bytes,
                             size_t v_bytes);
// Returns one past the last of the reads, from `begin` on, that go together: at least one, and
// kSeriesBytes of rows if there are so many.
inline constexpr uint64_t kSeriesBytes = 32u << 20;
size_t SeriesEnd(std::span<const LayerRead> reads, size_t begin);
// Checks that prefixd attends over the layer, and that queries [n][query heads of `heads`][...] are
// finite and of the right size; returns the resolved heads.
Result<HeadRange> CheckQueries(const KvGeometry& geometry, uint32_t layer, HeadRange heads,
                               uint32_t n, std::span<const float> q, std::span<const float> y,
                               std::span<const float> lse);
// Checks that the layer has rows, and the bytes of n own tokens' rows; returns the resolved heads.
Result<HeadRange> CheckOwnRows(const KvGeometry& geometry, uint32_t layer, HeadRange heads,
                               uint32_t n, size_t k_bytes, size_t v_bytes);
// Checks that a KV head with `own` own tokens, if it has any, has those that n queries are of.
Status CheckOwnBlock(uint32_t layer, uint32_t kv_head, uint32_t own, uint32_t n,
                     uint32_t own_after);

// ---- puts ----

Error PutEnded();
// Returns a range of the model's heads with its number of heads. Each layer must have whole heads
// of that share.
Result<HeadRange> ResolvePutHeads(const KvGeometry& geometry, HeadRange heads);
// Returns what resolved heads of the model are in a layer.
HeadRange HeadsIn(const KvGeometry& geometry, uint32_t layer, HeadRange heads);
// Returns the geometry of resolved heads of the model alone.
KvGeometry GeometryOf(const KvGeometry& geometry, HeadRange heads);
// Returns how many layers have rows.
uint32_t StoredLayers(const KvGeometry& geometry);
// Checks that tokens [first, first + n) of a layer are the prompt's, and that it has rows.
Status CheckPutRun(const KvGeometry& geometry, uint32_t prompt_tokens, uint32_t layer,
                   uint32_t first, uint32_t n);
// got, want: bytes of the tensor `what`.
Status CheckPutSize(const char* what, size_t got, size_t want);

// ---- stores ----

Error NoSuchPrefix(std::string_view id);
// For a step of another store's session.
Error NotOfThisStore();

}  // namespace prefixd
