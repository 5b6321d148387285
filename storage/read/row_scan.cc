#include "storage/read/row_scan.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "prefixd/stored_part.h"
#include "storage/read/gather_plan.h"

namespace prefixd::storage {
namespace {

// The bytes of rows in a batch: two of the disk's windows, which are in flight together. Pages of
// the tier stay pinned while a batch is visited, so a batch is no larger.
constexpr uint32_t kBatchBytes = 4u << 20;

class RowScan {
 public:
  RowScan(const ReadServices& services, const ScannedRows& rows, RowViews& room,
          const RowVisitor& visit, VisitPlace& place, uint64_t& before, ReadStats* stats)
      : services_(services),
        rows_(rows),
        layout_(rows.file.layout()),
        run_(layout_.of(rows.layer)),
        room_(room),
        visit_(visit),
        place_(place),
        before_(before),
        stats_(stats) {}

  Status Run() {
    room_.rows.clear();  // `room_` may come from another use
    const bool in_place = rows_.file.header().encoding == RowEncoding::kAsGiven &&
                          Keys().pages_per_item == 1 && Values().pages_per_item == 1;
    const auto batch = static_cast<uint32_t>(std::max<size_t>(1, kBatchBytes / rows_.row.bytes()));
    for (uint32_t chunk = 0; chunk < layout_.chunks(); ++chunk) {
      const uint32_t first = layout_.chunk_begin(chunk);
      if (first >= rows_.n_tokens) break;
      // In the arrival layout the requested tokens are the first ones.
      const uint32_t n = layout_.reclustered() ? layout_.chunk_size(chunk)
                                               : std::min(layout_.shape.n_tokens, rows_.n_tokens);
      for (uint32_t begin = 0; begin < n; begin += batch) {
        if (before_ < place_.batches) {
          ++before_;
          continue;
        }
        PREFIXD_TRY(CheckCall());
        const LetGo let_go{room_};
        const uint32_t end = std::min(n, begin + batch);
        PREFIXD_TRY(in_place ? ViewBatch(chunk, begin, end)
                             : ReadBatch(first + begin, first + end));
        if (!room_.rows.empty()) PREFIXD_TRY(visit_(room_.rows));
        place_.batches = ++before_;
      }
    }
    return {};
  }

 private:
  // Releases the batch's pins, however its visit ends.
  struct LetGo {
    RowViews& room;
    ~LetGo() {
      room.rows.clear();
      room.hold.reset();
    }
  };
  // Pages lists, for each piece, the requested items that are adjacent in a page.
  struct Pages {
    uint32_t item_bytes = 0;
    std::vector<uint32_t> items;  // [pieces], items in each
    size_t piece = 0;             // the first
  };

  const ItemPages& Keys() const { return layout_.reclustered() ? run_.key : run_.row; }
  const ItemPages& Values() const { return layout_.reclustered() ? run_.value : run_.row; }

  uint32_t OwnOf(uint32_t chunk_first, uint32_t i) const {
    return chunk_first + (rows_.order ? rows_.order->token_in[chunk_first + i] : i);
  }
  bool Wanted(uint32_t chunk_first, uint32_t i) const {
    return OwnOf(chunk_first, i) < rows_.n_tokens;
  }

  // Adds the pages with the requested items of slots [begin, end) of the chunk.
  Pages AddPages(const ItemPages& items, uint64_t base, uint32_t chunk_first, uint32_t begin,
                 uint32_t end) {
    Pages pages{items.bytes, {}, pieces_.size()};
    for (uint32_t i = begin; i < end;) {
      if (!Wanted(chunk_first, i)) {
        ++i;
        continue;
      }
      const uint32_t page = i / items.per_page, first = i;
      const uint32_t page_end = std::min(end, (page + 1) * items.per_page);
      while (i < page_end && Wanted(chunk_first, i)) ++i;
      pages.items.push_back(i - first);
      pieces_.push_back({base + page, (first - page * items.per_page) * items.bytes,
                         (i - first) * items.bytes, nullptr});
    }
    return pages;
  }

  // Calls set(item) for each of the items, in their order.
  template <typename Set>
  void ForEachItem(const Pages& pages, const Set& set) const {
    for (size_t p = 0; p < pages.items.size(); ++p) {
      const std::byte* at = where_[pages.piece + p];
      for (uint32_t i = 0; i < pages.items[p]; ++i, at += pages.item_bytes) set(at);
    }
  }

  Status ViewBatch(uint32_t chunk, uint32_t begin, uint32_t end) {
    const uint32_t first = layout_.chunk_begin(chunk);
    const uint64_t run = layout_.run_page(rows_.layer, rows_.kv_head);
    pieces_.clear();
    Pages keys, values;
    if (layout_.reclustered()) {
      keys = AddPages(run_.key, run + layout_.chunk_keys(rows_.layer, chunk), first, begin, end);
      values =
          AddPages(run_.value, run + layout_.chunk_values(rows_.layer, chunk), first, begin, end);
    } else {
      keys = AddPages(run_.row, run, first, begin, end);
    }
    if (pieces_.empty()) return {};
    Place();
    where_.resize(pieces_.size());
    auto pins = std::make_shared<PagePins>(services_.tier->PinsForAStep());
    PREFIXD_TRY(ViewPieces(services_, rows_.file, pieces_, where_, Access::kScan, *pins, stats_));
    room_.hold = std::move(pins);
    room_.rows.reserve(end - begin);
    const size_t key_bytes = run_.key_bytes();
    ForEachItem(keys, [&](const std::byte* at) { room_.rows.push_back({at, at + key_bytes}); });
    size_t row = 0;
    ForEachItem(values, [&](const std::byte* at) { room_.rows[row++].value = at; });
    return {};
  }

  // Places the pieces that must be copied: one behind the other, each aligned for any element.
  void Place() {
    constexpr size_t kAlign = 64;
    const auto padded = [](const PagePiece& piece) {
      return (piece.bytes + kAlign - 1) / kAlign * kAlign;
    };
    size_t bytes = 0;
    for (const PagePiece& piece : pieces_) bytes += padded(piece);
    if (room_.own.size() < bytes) room_.own.resize(bytes);
    std::byte* out = room_.own.data();
    for (PagePiece& piece : pieces_) {
      piece.out = out;
      out += padded(piece);
    }
  }

  // Reads slots [begin, end) of the run, decoded or from several pages each, one row after the
  // other.
  Status ReadBatch(uint32_t begin, uint32_t end) {
    const size_t stride = rows_.row.bytes(), key_bytes = rows_.row.key_bytes();
    if (room_.own.size() < (end - begin) * stride) room_.own.resize((end - begin) * stride);
    const uint32_t chunk_first = begin / layout_.chunk_tokens() * layout_.chunk_tokens();
    std::byte* const out = room_.own.data();
    std::vector<uint32_t> own;
    for (uint32_t slot = begin; slot < end; ++slot) {
      const uint32_t token = OwnOf(chunk_first, slot - chunk_first);
      if (token >= rows_.n_tokens) continue;
      const std::byte* key = out + own.size() * stride;
      room_.rows.push_back({key, key + key_bytes});
      own.push_back(token);
    }
    if (own.empty()) return {};
    // Keys are added before values, as the reclustered layout's pages lie, so that no sort is
    // needed.
    pieces_.clear();
    const auto add = [&](RowPart part) {
      GatherPlan pieces(layout_, rows_.order, rows_.layer, rows_.kv_head, part,
                        rows_.file.header().encoding);
      pieces.AddRows(own, 0, {out, stride, out + key_bytes, stride});
      const std::vector<PagePiece> taken = pieces.Take();
      pieces_.insert(pieces_.end(), taken.begin(), taken.end());
    };
    if (layout_.reclustered()) {
      add(RowPart::kKey);
      add(RowPart::kValue);
    } else {
      add(RowPart::kRow);
    }
    return ReadPieces(services_, rows_.file, pieces_, Access::kScan, stats_, Deliver::kDecoded);
  }

  const ReadServices& services_;
  const ScannedRows& rows_;
  const SegmentLayout& layout_;
  const RunLayout& run_;
  RowViews& room_;
  const RowVisitor& visit_;
  VisitPlace& place_;
  uint64_t& before_;
  ReadStats* const stats_;
  std::vector<PagePiece> pieces_;
  std::vector<const std::byte*> where_;  // [pieces]
};

}  // namespace

Status ScanRows(const ReadServices& services, const ScannedRows& rows, RowViews& room,
                const RowVisitor& visit, VisitPlace& place, uint64_t& before, ReadStats* stats) {
  ReadStats ignored;
  return RowScan(services, rows, room, visit, place, before, stats ? stats : &ignored).Run();
}

}  // namespace prefixd::storage
