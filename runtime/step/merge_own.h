// Merges exact attention over a session's own tokens into the state of its prefix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "prefixd/ledger.h"
#include "prefixd/result.h"
#include "runtime/step/own_tokens.h"
#include "runtime/step/plan.h"
#include "runtime/work/scratch.h"

namespace prefixd {

// Attends exactly over the own rows behind plan.moved, too, and merges into y and lse, which hold
// the state of the prefix: queries of n tokens of one KV head, [n][G][key_dim], of which the i-th
// sees the first own.size() - after - n + 1 + i rows: one behind plan.moved, at least.
// Thread-safety: any number of concurrent calls.
Status MergeOwn(ScratchPool& scratch_pool, const SessionPlan& plan, size_t head, const OwnRows& own,
                uint32_t n, uint32_t after, std::span<const float> q, std::span<float> y,
                std::span<float> lse, Ledger& ledger);

}  // namespace prefixd
