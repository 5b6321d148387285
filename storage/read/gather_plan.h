// Computes the gather plan: which bytes of which pages make up rows of one (layer, KV head) of a
// segment, in either layout, and where they go. Every key and every value of encoded rows is a
// piece of its own, decoded when it is delivered (ReadPieces, Deliver::kDecoded).
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/stored_part.h"
#include "storage/read/page_reader.h"
#include "storage/read/row_access.h"
#include "storage/segment/segment_file.h"

namespace prefixd::storage {

// Item i goes to key + i * key_stride and value + i * value_stride. A part that is not read may be
// null.
struct RowTarget {
  std::byte* key = nullptr;
  size_t key_stride = 0;
  std::byte* value = nullptr;
  size_t value_stride = 0;

  RowTarget From(size_t i) const {
    return {key ? key + i * key_stride : nullptr, key_stride,
            value ? value + i * value_stride : nullptr, value_stride};
  }
};

class GatherPlan {
 public:
  // `order` is the run's of a reclustered or compressed segment, else null. Of a compressed one
  // rows that it has may be added, no others. GatherPlan borrows both arguments.
  GatherPlan(const SegmentLayout& layout, const RunOrder* order, uint32_t layer, uint32_t head,
             RowPart part, RowEncoding encoding = RowEncoding::kAsGiven)
      : layout_(layout),
        run_(layout.of(layer)),
        order_(order),
        layer_(layer),
        head_(head),
        part_(part),
        decoded_(encoding != RowEncoding::kAsGiven) {}

  // Adds the row with this own index (position minus the segment's first) as item 0.
  void AddRow(uint32_t own, const RowTarget& out);
  // Adds the rows of `tokens` less `first` (own indices) as items 0, 1, ...
  void AddRows(std::span<const uint32_t> tokens, uint32_t first, const RowTarget& out);
  // Adds the rows [begin, end) as items 0, 1, ...
  void AddRun(uint32_t begin, uint32_t end, const RowTarget& out);
  // Returns the pieces, ascending by page.
  std::vector<PagePiece> Take();

 private:
  uint32_t SlotOf(uint32_t own) const;
  uint32_t OwnOf(uint32_t slot) const;
  bool wants_key() const { return part_ != RowPart::kValue; }
  bool wants_value() const { return part_ != RowPart::kKey; }
  void AddBytes(uint64_t address, size_t bytes, std::byte* out);
  // Adds item i of the items that begin at a page.
  void AddItem(const ItemPages& items, uint64_t first_page, uint32_t i, std::byte* out);
  void AddSlot(uint32_t slot, std::byte* key, std::byte* value);
  // Returns whether stored key and value are adjacent here as they are in the arrival layout.
  bool Adjacent(const std::byte* key, const std::byte* value) const {
    return !decoded_ && !layout_.reclustered() && part_ == RowPart::kRow &&
           value == key + run_.key_bytes();
  }
  void AddPageRuns(uint32_t begin, uint32_t end, std::byte* out);
  // Adds the rows in slots [begin, end) of the arrival layout as items 0, 1, ...: a piece or two
  // for each page.
  void AddSlots(uint32_t begin, uint32_t end, const RowTarget& out);
  // Adds all keys or values of a reclustered chunk, a piece for each page; `out` is where the
  // chunk's first token goes.
  void AddChunk(uint32_t chunk, bool value, std::byte* out, size_t stride);

  const SegmentLayout& layout_;
  const RunLayout& run_;
  const RunOrder* const order_;
  const uint32_t layer_, head_;
  const RowPart part_;
  const bool decoded_;  // pieces of different parts must then not be joined
  // Caches the last row's chunk of the reclustered layout, since it is mostly the next row's too.
  struct {
    uint32_t begin = 0, end = 0;  // own indices
    uint64_t keys = 0, values = 0;
  } chunk_;
  std::vector<PagePiece> pieces_;
};

}  // namespace prefixd::storage
