// Splices a stored prefix into a decoder. An engine needs three calls to use prefixd: the session
// computes the attention state over the prefix, the engine computes its own over the new tokens,
// and a merge joins them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "decoder/attention/attention_backend.h"
#include "decoder/attention/local_attention.h"
#include "prefixd/client.h"

namespace prefixd::decoder {

// Selects how a call with several new tokens (the question after a stored document) attends to the
// prefix. Every new token sees the whole prefix, so no mask is needed.
enum class BlockMode : uint8_t {
  kExact,  // Session::AttendExact: one pass over the prefix for all tokens
  kStep,   // Session::Step for each, under the session's read budget: as if decoded one by one
};

class SplicedAttention : public AttentionBackend {
 public:
  // Tokens start at position session->info().n_tokens and are kept in memory.
  explicit SplicedAttention(std::shared_ptr<Session> session,
                            BlockMode block_mode = BlockMode::kExact);

  Status Attend(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q,
                std::span<const float> k, std::span<const float> v, std::span<float> out) override;

  // These work like LocalAttention's; the stored prefix itself is never cut.
  uint32_t position() const { return local_.position(); }
  void TruncateTo(uint32_t position) { local_.TruncateTo(position); }

  void set_block_mode(BlockMode mode) { block_mode_ = mode; }
  Session& session() { return *session_; }
  // From now on reads the prefix through another session of it. The tokens after it stay.
  void set_session(std::shared_ptr<Session> session) { session_ = std::move(session); }
  // Returns the rows of the tokens after the prefix.
  const KvCache& cache() const { return local_.cache(); }
  // Returns what the steps read so far; only the session's own report counts exact blocks.
  const Ledger& step_ledger() const { return step_ledger_; }

 private:
  // Writes the prefix's states for n tokens' queries into prefix_y_ and prefix_lse_.
  Status AttendPrefix(uint32_t layer, uint32_t n, std::span<const float> q);

  std::shared_ptr<Session> session_;
  BlockMode block_mode_;
  LocalAttention local_;
  Ledger step_ledger_;
  std::vector<float> prefix_y_, prefix_lse_, own_lse_;  // scratch: [n][Hq][dv], [n][Hq], [n][Hq]
};

}  // namespace prefixd::decoder
