// Which bytes of which pages make up rows of one (layer, KV head) of a segment, in either layout.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "storage/page_reader.h"
#include "storage/prefix_store.h"
#include "storage/segment_file.h"

namespace prefixd::storage {

class RowPieces {
 public:
  // `order` is the run's in the settled layout, else null. Both are borrowed.
  RowPieces(const SegmentLayout& layout, const RunOrder* order, uint32_t layer, uint32_t head,
            RowPart part)
      : layout_(layout), order_(order), layer_(layer), head_(head), part_(part) {}

  // The row with this own index (position minus the segment's first), to `out`.
  void AddRow(uint32_t own, std::byte* out) { AddSlot(SlotOf(own), out); }
  // Rows [begin, end), the first to `out`, the others `stride` bytes apart.
  void AddRun(uint32_t begin, uint32_t end, std::byte* out, size_t stride);
  // Ascending by page.
  std::vector<PagePiece> Take();

  // The own indices in [0, n) whose part lies wholly in pages that hold the part of one of `own`
  // (ascending); ascending, `own` among them.
  std::vector<uint32_t> Sharing(std::span<const uint32_t> own, uint32_t n) const;

 private:
  uint32_t SlotOf(uint32_t own) const;
  uint32_t OwnOf(uint32_t slot) const;
  bool wants_key() const { return part_ != RowPart::kValue; }
  bool wants_value() const { return part_ != RowPart::kKey; }
  uint64_t KeyPage(uint32_t slot) const {
    return layout_.KeyAddress(layer_, head_, slot) / kPageBytes;
  }
  uint64_t ValuePage(uint32_t slot) const {
    return layout_.ValueAddress(layer_, head_, slot) / kPageBytes;
  }
  void AddBytes(uint64_t address, size_t bytes, std::byte* out);
  void AddSlot(uint32_t slot, std::byte* out);
  void AddPageRuns(uint32_t begin, uint32_t end, std::byte* out);

  const SegmentLayout& layout_;
  const RunOrder* const order_;
  const uint32_t layer_, head_;
  const RowPart part_;
  std::vector<PagePiece> pieces_;
};

}  // namespace prefixd::storage
