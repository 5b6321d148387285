// Reads the exact keys of one head's mid region, for selection: from memory where selection has
// room for them (selector_memory.h), else from where they are stored.
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

  // [mid], densely; nullopt: keys are read from where they are stored.
  const std::optional<RowsView>& resident() const { return resident_; }
  // Tells `request`, which is for this head, where its keys are. The request borrows from this
  // object.
  void Into(index::SearchRequest& request);

  Status Gather(std::span<const uint32_t> ids, std::span<std::byte> out) override;
  Status Range(TokenRange tokens, std::span<std::byte> out) override;
  uint32_t RunEnd(uint32_t begin, uint32_t max_tokens) const override;

 private:
  HeadKeys(PreparedPrefix& prefix, size_t head, storage::ReadStats* reads)
      : prefix_(&prefix), head_(head), reads_(reads) {}

  PreparedPrefix* prefix_;
  size_t head_;
  storage::ReadStats* reads_;
  std::optional<RowsView> resident_;
  uint64_t ranged_ = 0;  // tokens that Range read from the store
};

}  // namespace prefixd
