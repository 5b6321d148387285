// A stored prefix spliced into a decoder. This is all that an engine must do to use prefixd: ask
// the session for the attention state over the prefix, compute its own over the new tokens, merge.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "decoder/attention_backend.h"
#include "decoder/local_attention.h"
#include "prefixd/client.h"

namespace prefixd::decoder {

// How a call with several new tokens (the question after a stored document) sees the prefix. All
// of them see all of it: no mask is needed there.
enum class BlockMode : uint8_t {
  kExact,  // Session::AttendExact: one pass over the prefix for all of them
  kStep,   // Session::Step for each, under the session's read budget: as if decoded one by one
};

class SplicedAttention : public AttentionBackend {
 public:
  // Tokens start at position session->info().n_tokens and are kept in memory.
  explicit SplicedAttention(std::shared_ptr<Session> session,
                            BlockMode block_mode = BlockMode::kExact);

  Status Attend(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q,
                std::span<const float> k, std::span<const float> v, std::span<float> out) override;

  // As in LocalAttention; the stored prefix itself is never cut.
  uint32_t position() const { return local_.position(); }
  void TruncateTo(uint32_t position) { local_.TruncateTo(position); }

  void set_block_mode(BlockMode mode) { block_mode_ = mode; }
  Session& session() { return *session_; }
  // Of the tokens after the prefix.
  const KvCache& cache() const { return local_.cache(); }
  // What the steps read so far (exact blocks are counted by the session's own report only).
  const Ledger& step_ledger() const { return step_ledger_; }

 private:
  // The state over the prefix of n tokens' queries, into prefix_y_ and prefix_lse_.
  Status AttendPrefix(uint32_t layer, uint32_t n, std::span<const float> q);

  std::shared_ptr<Session> session_;
  BlockMode block_mode_;
  LocalAttention local_;
  Ledger step_ledger_;
  std::vector<float> prefix_y_, prefix_lse_, own_lse_;  // scratch: [n][Hq][dv], [n][Hq], [n][Hq]
};

}  // namespace prefixd::decoder
