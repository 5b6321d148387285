// One segment of an open prefix: what it has of the prefix, how its rows may be read, and the plans
// that gather them.
//
// Thread-safety: const methods may be called concurrently.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "storage/core/store_core.h"
#include "storage/read/gather_plan.h"

namespace prefixd::storage {

class PrefixLink {
 public:
  // The segment has the positions `tokens` of the prefix. `core` outlives the link.
  PrefixLink(StoreCore& core, std::shared_ptr<const SegmentFile> file, TokenRange tokens)
      : core_(&core), file_(std::move(file)), tokens_(tokens) {}

  const std::shared_ptr<const SegmentFile>& file() const { return file_; }
  const SegmentLayout& layout() const { return file_->layout(); }
  TokenRange tokens() const { return tokens_; }
  uint32_t first() const { return tokens_.begin; }
  // Returns one past the last of `ids`, from `at` on, that the segment holds.
  size_t EndOf(std::span<const uint32_t> ids, size_t at) const;
  // Returns the part of a run that the segment holds; it may be empty.
  TokenRange Within(TokenRange run) const;

  // Whether stored rows have the form that the kernels need, each in one piece.
  bool InPlaceable(uint32_t layer) const;
  // kFailedPrecondition where they do not.
  Status CheckReadableInPlace(uint32_t layer) const;

  // Whether the segment has the row of this own index; order: the run's.
  bool IsKept(const RunOrder* order, uint32_t own) const;
  // kFailedPrecondition, about `prefix`, where rows of these tokens have been dropped.
  Status CheckKept(const SegmentId& prefix, uint32_t layer, uint32_t kv_head,
                   std::span<const uint32_t> ids) const;
  Status CheckKept(const SegmentId& prefix, uint32_t layer, uint32_t kv_head, TokenRange run) const;

  // Returns null in the arrival layout. kCorrupt quarantines the segment.
  Result<const RunOrder*> Order(uint32_t layer, uint32_t kv_head) const;
  Result<GatherPlan> Plan(uint32_t layer, uint32_t kv_head, RowPart part) const;

 private:
  uint32_t ItemBytes(uint32_t layer) const;

  StoreCore* core_;
  std::shared_ptr<const SegmentFile> file_;
  TokenRange tokens_;
};

}  // namespace prefixd::storage
