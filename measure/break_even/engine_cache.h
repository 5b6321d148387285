// Holds a prompt's rows as an engine does after a restore, in arrays of its own, and attends to all
// of them, so that restoring is compared with what an engine does behind it.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/row_ref.h"
#include "prefixd/session.h"
#include "runtime/work/thread_pool.h"

namespace prefixd::bench {

class EngineCache {
 public:
  EngineCache(const KvGeometry& geometry, uint32_t tokens, ThreadPool& pool);

  // Reads all rows; threads share a layer's tokens. An engine has its arrays already: they are
  // written here when they are made, so that no restore waits for the kernel to clear them.
  Status Restore(Session& session);
  // Full attention of one token in a layer that was restored: q [n_q_heads][key_dim], y
  // [n_q_heads][value_dim]; threads share the KV heads.
  Status Attend(uint32_t layer, std::span<const float> q, std::span<float> y);

 private:
  struct Layer {
    std::vector<std::byte> k, v;               // [tokens][n_kv_heads][dim]
    std::vector<std::vector<RowRef>> of_head;  // [n_kv_heads][tokens]
  };

  const KvGeometry& geometry_;
  const uint32_t tokens_;
  ThreadPool& pool_;
  std::vector<Layer> layers_;
};

}  // namespace prefixd::bench
