// Reads the exact keys of one head's mid region, for selection: from memory where selection has
// room for them (selector_memory.h), else from where they are stored.
//
// Of a compressed prefix the keys that are left are searched as if they followed one another: token
// `mid.begin + i` of a search stands for the i-th token that has rows.
//
// Thread-safety: used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "index/search/key_index.h"
#include "index/search/key_reader.h"
#include "runtime/prefix/prepared_prefix.h"

namespace prefixd {

class HeadKeys final : public index::KeyReader {
 public:
  // Loads the keys into memory if there is room: at once, or later (kLater). A Range over a good
  // part of them loads them at once in either case. `reads` is charged for all reads, now and
  // later.
  static Result<HeadKeys> Of(PreparedPrefix& prefix, size_t head, Bring bring,
                             storage::ReadStats* reads);

  // [mid, or kept], densely; nullopt: keys are read from where they are stored.
  const std::optional<RowsView>& resident() const { return resident_; }
  // Tells `request`, which is for this head, where its keys are. The request borrows from this
  // object.
  void Into(index::SearchRequest& request);

  // Returns the key of a mid token that has one. REQUIRES: resident().
  const std::byte* key(uint32_t token) const { return resident_->key(IndexOf(token)); }
  // Returns the tokens of a search that stand for those of the mid region.
  TokenRange Searched(TokenRange candidates) const;
  // Turns what such a search returned into tokens of the mid region. Tokens without rows may score
  // above the cuts.
  void ToTokens(Selection& found) const;

  Status Gather(std::span<const uint32_t> ids, std::span<std::byte> out) override;
  Status Range(TokenRange tokens, std::span<std::byte> out) override;
  uint32_t RunEnd(uint32_t begin, uint32_t max_tokens) const override;

 private:
  HeadKeys(PreparedPrefix& prefix, size_t head, storage::ReadStats* reads)
      : prefix_(&prefix), head_(head), reads_(reads) {}

  // Where a mid token's key lies among the keys.
  size_t IndexOf(uint32_t token) const;

  PreparedPrefix* prefix_;
  size_t head_;
  storage::ReadStats* reads_;
  std::optional<RowsView> resident_;
  std::span<const uint32_t> kept_;  // of a compressed prefix
  uint64_t ranged_ = 0;             // tokens that Range read from the store
};

}  // namespace prefixd
