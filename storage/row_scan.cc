#include "storage/row_scan.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "storage/row_encoding.h"
#include "storage/row_pieces.h"

namespace prefixd::storage {
namespace {

// Rows of a batch: of keys and values of 256 bytes eight windows of the disk's, three of which are
// on their way at a time.
constexpr uint32_t kBatchRows = 16384;

class RowScan {
 public:
  RowScan(const ReadServices& services, const ScannedRows& rows, RowViews& room,
          const RowVisitor& visit, ReadStats* stats)
      : services_(services),
        rows_(rows),
        layout_(rows.file.layout()),
        room_(room),
        visit_(visit),
        stats_(stats) {}

  Status Run() {
    const bool in_place = rows_.file.header().encoding == RowEncoding::kAsGiven &&
                          Keys().pages_per_item == 1 && Values().pages_per_item == 1;
    for (uint32_t chunk = 0; chunk < layout_.chunks(); ++chunk) {
      const uint32_t first = layout_.chunk_begin(chunk), n = layout_.chunk_size(chunk);
      if (first >= rows_.n_tokens) break;
      for (uint32_t begin = 0; begin < n; begin += kBatchRows) {
        const uint32_t end = std::min(n, begin + kBatchRows);
        room_.rows.clear();
        PREFIXD_TRY(in_place ? ViewBatch(chunk, begin, end)
                             : ReadBatch(first + begin, first + end));
        Status visited;
        if (!room_.rows.empty()) visited = visit_(room_.rows);
        room_.hold.reset();
        PREFIXD_TRY(std::move(visited));
      }
    }
    return {};
  }

 private:
  // Wanted items of one page: those of slots [first, last] of the chunk that are wanted.
  struct PageItems {
    uint32_t first, last;
  };
  struct Pages {
    uint32_t item_bytes = 0;
    std::vector<PageItems> items;  // of each page
    size_t piece = 0;              // of the first
  };

  const ItemPages& Keys() const { return layout_.settled() ? layout_.key : layout_.row; }
  const ItemPages& Values() const { return layout_.settled() ? layout_.value : layout_.row; }

  uint32_t OwnOf(uint32_t chunk_first, uint32_t i) const {
    return chunk_first + (rows_.order ? rows_.order->token_in[chunk_first + i] : i);
  }
  bool Wanted(uint32_t chunk_first, uint32_t i) const {
    return OwnOf(chunk_first, i) < rows_.n_tokens;
  }

  // Slots [begin, end) of the chunk: one piece a page, and where its wanted items are.
  Pages AddPages(const ItemPages& items, uint64_t base, uint32_t chunk_first, uint32_t begin,
                 uint32_t end) {
    Pages pages{items.bytes, {}, pieces_.size()};
    for (uint32_t i = begin; i < end;) {
      const uint32_t page = i / items.per_page;
      const uint32_t page_end = std::min(end, (page + 1) * items.per_page);
      uint32_t first = i, last = page_end - 1;
      while (first < page_end && !Wanted(chunk_first, first)) ++first;
      while (last > first && !Wanted(chunk_first, last)) --last;
      i = page_end;
      if (first == page_end) continue;
      pages.items.push_back({first, last});
      pieces_.push_back({base + page, (first - page * items.per_page) * items.bytes,
                         (last - first + 1) * items.bytes,
                         room_.own.data() + pieces_.size() * kPageBytes});
    }
    return pages;
  }

  // Calls set(row, item) for each wanted item of `pages`, in their order.
  template <typename Set>
  void ForEachItem(const Pages& pages, uint32_t chunk_first, const Set& set) const {
    size_t row = 0;
    for (size_t p = 0; p < pages.items.size(); ++p) {
      const auto [first, last] = pages.items[p];
      const std::byte* at = where_[pages.piece + p];
      for (uint32_t i = first; i <= last; ++i, at += pages.item_bytes) {
        if (Wanted(chunk_first, i)) set(row++, at);
      }
    }
  }

  Status ViewBatch(uint32_t chunk, uint32_t begin, uint32_t end) {
    const uint32_t first = layout_.chunk_begin(chunk);
    const uint64_t run = layout_.run_page(rows_.layer, rows_.kv_head);
    const size_t most = Keys().pages(end) - begin / Keys().per_page +
                        (Values().pages(end) - begin / Values().per_page);
    if (room_.own.size() < most * kPageBytes) room_.own.resize(most * kPageBytes);
    pieces_.clear();
    Pages keys, values;
    if (layout_.settled()) {
      keys = AddPages(layout_.key, run + layout_.chunk_keys(chunk), first, begin, end);
      values = AddPages(layout_.value, run + layout_.chunk_values(chunk), first, begin, end);
    } else {
      keys = AddPages(layout_.row, run, first, begin, end);
    }
    if (pieces_.empty()) return {};
    where_.resize(pieces_.size());
    auto pins = std::make_shared<PagePins>(services_.tier->PinsForAStep());
    PREFIXD_TRY(ViewPieces(services_, rows_.file, pieces_, where_, Access::kScan, *pins, stats_));
    room_.hold = std::move(pins);
    room_.rows.reserve(end - begin);
    const size_t key_bytes = layout_.shape.key_bytes;
    ForEachItem(keys, first, [&](size_t, const std::byte* at) {
      room_.rows.push_back({at, at + key_bytes});
    });
    ForEachItem(values, first,
                [&](size_t row, const std::byte* at) { room_.rows[row].value = at; });
    return {};
  }

  // Slots [begin, end) of the run, decoded or from several pages each, one row after the other.
  Status ReadBatch(uint32_t begin, uint32_t end) {
    const size_t stride = rows_.row.bytes(), key_bytes = rows_.row.key_bytes();
    if (room_.own.size() < (end - begin) * stride) room_.own.resize((end - begin) * stride);
    RowPieces pieces(layout_, rows_.order, rows_.layer, rows_.kv_head, RowPart::kRow,
                     rows_.file.header().encoding);
    const uint32_t chunk_first = begin / layout_.chunk_tokens() * layout_.chunk_tokens();
    std::byte* out = room_.own.data();
    for (uint32_t slot = begin; slot < end; ++slot) {
      const uint32_t own = OwnOf(chunk_first, slot - chunk_first);
      if (own >= rows_.n_tokens) continue;
      pieces.AddRow(own, {out, stride, out + key_bytes, stride});
      room_.rows.push_back({out, out + key_bytes});
      out += stride;
    }
    if (room_.rows.empty()) return {};
    return ReadPieces(services_, rows_.file, pieces.Take(), Access::kScan, stats_,
                      Deliver::kDecoded);
  }

  const ReadServices& services_;
  const ScannedRows& rows_;
  const SegmentLayout& layout_;
  RowViews& room_;
  const RowVisitor& visit_;
  ReadStats* const stats_;
  std::vector<PagePiece> pieces_;
  std::vector<const std::byte*> where_;  // [pieces]
};

}  // namespace

Status ScanRows(const ReadServices& services, const ScannedRows& rows, RowViews& room,
                const RowVisitor& visit, ReadStats* stats) {
  ReadStats ignored;
  return RowScan(services, rows, room, visit, stats ? stats : &ignored).Run();
}

}  // namespace prefixd::storage
