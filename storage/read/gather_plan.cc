#include "storage/read/gather_plan.h"

#include <algorithm>

#include "base/check.h"

namespace prefixd::storage {

uint32_t GatherPlan::SlotOf(uint32_t own) const {
  if (order_ == nullptr) return own;
  if (layout_.compressed()) {
    const auto at = std::ranges::lower_bound(order_->kept, own);
    PREFIXD_CHECK(at != order_->kept.end() && *at == own, own);
    return static_cast<uint32_t>(at - order_->kept.begin());
  }
  return own / layout_.chunk_tokens() * layout_.chunk_tokens() + order_->slot_of[own];
}

uint32_t GatherPlan::OwnOf(uint32_t slot) const {
  if (order_ == nullptr) return slot;
  return slot / layout_.chunk_tokens() * layout_.chunk_tokens() + order_->token_in[slot];
}

// Adds one piece for each page: items larger than a page take several.
void GatherPlan::AddBytes(uint64_t address, size_t bytes, std::byte* out) {
  uint64_t page = address / kPageBytes;
  auto offset = static_cast<uint32_t>(address % kPageBytes);
  for (; bytes > 0; ++page, offset = 0) {
    const auto n = static_cast<uint32_t>(std::min<size_t>(bytes, kPageBytes - offset));
    pieces_.push_back({page, offset, n, out});
    out += n;
    bytes -= n;
  }
}

void GatherPlan::AddItem(const ItemPages& items, uint64_t first_page, uint32_t i, std::byte* out) {
  if (items.pages_per_item > 1) {
    return AddBytes((first_page + items.page(i)) * kPageBytes, items.bytes, out);
  }
  const uint32_t page = i / items.per_page;
  pieces_.push_back(
      {first_page + page, (i - page * items.per_page) * items.bytes, items.bytes, out});
}

void GatherPlan::AddRow(uint32_t own, const RowTarget& out) {
  if (!layout_.reclustered()) return AddSlot(SlotOf(own), out.key, out.value);
  if (own < chunk_.begin || own >= chunk_.end) {
    const uint32_t chunk = own / layout_.chunk_tokens();
    const uint64_t run = layout_.run_page(layer_, head_);
    chunk_.begin = layout_.chunk_begin(chunk);
    chunk_.end = chunk_.begin + layout_.chunk_size(chunk);
    chunk_.keys = run + layout_.chunk_keys(layer_, chunk);
    chunk_.values = run + layout_.chunk_values(layer_, chunk);
  }
  const uint32_t i = order_->slot_of[own];
  if (wants_key()) AddItem(run_.key, chunk_.keys, i, out.key);
  if (wants_value()) AddItem(run_.value, chunk_.values, i, out.value);
}

void GatherPlan::AddRows(std::span<const uint32_t> tokens, uint32_t first, const RowTarget& out) {
  constexpr size_t kPrefetch = 16;  // rows whose slot is prefetched ahead
  pieces_.reserve(pieces_.size() + tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (layout_.reclustered() && i + kPrefetch < tokens.size()) {
      __builtin_prefetch(&order_->slot_of[tokens[i + kPrefetch] - first]);
    }
    AddRow(tokens[i] - first, out.From(i));
  }
}

void GatherPlan::AddSlot(uint32_t slot, std::byte* key, std::byte* value) {
  if (Adjacent(key, value)) {
    return AddBytes(layout_.KeyAddress(layer_, head_, slot), run_.row_bytes(), key);
  }
  if (wants_key()) AddBytes(layout_.KeyAddress(layer_, head_, slot), run_.key_bytes(), key);
  if (wants_value()) AddBytes(layout_.ValueAddress(layer_, head_, slot), run_.value_bytes(), value);
}

void GatherPlan::AddRun(uint32_t begin, uint32_t end, const RowTarget& out) {
  if (!layout_.reclustered()) {
    if (begin == end) return;
    // Tokens that follow one another lie in slots that do.
    end = SlotOf(begin) + (end - begin);
    begin = SlotOf(begin);
    const bool dense = Adjacent(out.key, out.value) && out.key_stride == run_.row_bytes() &&
                       out.value_stride == out.key_stride;
    if (dense && run_.row.pages_per_item == 1) return AddPageRuns(begin, end, out.key);
    if (run_.row.pages_per_item == 1) return AddSlots(begin, end, out);
    for (uint32_t i = begin; i < end; ++i) {
      const RowTarget to = out.From(i - begin);
      AddSlot(i, to.key, to.value);
    }
    return;
  }
  const uint32_t chunk_tokens = layout_.chunk_tokens();
  // When a run covers little of a large chunk (anchors), its rows are found one by one.
  if (end - begin < chunk_tokens / 16) {
    for (uint32_t i = begin; i < end; ++i) AddRow(i, out.From(i - begin));
    return;
  }
  // The loop goes slot by slot, keys before values: pieces then ascend in the order of the pages.
  for (uint32_t chunk = begin / chunk_tokens; chunk <= (end - 1) / chunk_tokens; ++chunk) {
    const uint32_t first = layout_.chunk_begin(chunk), n = layout_.chunk_size(chunk);
    const bool whole = begin <= first && first + n <= end;
    const auto add = [&](bool value) {
      if (whole && (value ? run_.value : run_.key).pages_per_item == 1) {
        const RowTarget to = out.From(first - begin);
        return value ? AddChunk(chunk, true, to.value, to.value_stride)
                     : AddChunk(chunk, false, to.key, to.key_stride);
      }
      for (uint32_t slot = first; slot < first + n; ++slot) {
        const uint32_t own = OwnOf(slot);
        if (own < begin || own >= end) continue;
        const RowTarget to = out.From(own - begin);
        value ? AddBytes(layout_.ValueAddress(layer_, head_, slot), run_.value_bytes(), to.value)
              : AddBytes(layout_.KeyAddress(layer_, head_, slot), run_.key_bytes(), to.key);
      }
    };
    if (wants_key()) add(false);
    if (wants_value()) add(true);
  }
}

// Adds whole rows of the arrival layout, densely: one piece per page.
void GatherPlan::AddPageRuns(uint32_t begin, uint32_t end, std::byte* out) {
  const uint64_t base = layout_.run_page(layer_, head_);
  const ItemPages& row = run_.row;
  while (begin < end) {
    const uint32_t n = std::min(end - begin, row.per_page - begin % row.per_page);
    pieces_.push_back({base + row.page(begin), row.offset(begin), n * row.bytes, out});
    out += size_t{n} * row.bytes;
    begin += n;
  }
}

void GatherPlan::AddSlots(uint32_t begin, uint32_t end, const RowTarget& out) {
  const uint64_t base = layout_.run_page(layer_, head_);
  const ItemPages& row = run_.row;
  const auto add = [&](uint32_t slot, uint32_t n, uint32_t within, uint32_t bytes, std::byte* to,
                       size_t stride) {
    PagePiece& piece =
        pieces_.emplace_back(base + row.page(slot), row.offset(slot) + within, bytes, to);
    piece.n = static_cast<uint16_t>(n);
    piece.step = static_cast<uint16_t>(row.bytes);
    piece.out_step = stride;
  };
  for (uint32_t slot = begin, n = 0; slot < end; slot += n) {
    n = std::min(end - slot, row.per_page - slot % row.per_page);
    const RowTarget to = out.From(slot - begin);
    // Keys and values of their own arrays may touch by chance, for one row.
    const bool dense = out.key_stride == out.value_stride && out.key_stride >= run_.row_bytes();
    if (dense && Adjacent(to.key, to.value)) {
      add(slot, n, 0, run_.row_bytes(), to.key, out.key_stride);
      continue;
    }
    if (wants_key()) add(slot, n, 0, run_.key_bytes(), to.key, out.key_stride);
    if (wants_value()) {
      add(slot, n, run_.key_bytes(), run_.value_bytes(), to.value, out.value_stride);
    }
  }
}

void GatherPlan::AddChunk(uint32_t chunk, bool value, std::byte* out, size_t stride) {
  const ItemPages& items = value ? run_.value : run_.key;
  const uint64_t base =
      layout_.run_page(layer_, head_) +
      (value ? layout_.chunk_values(layer_, chunk) : layout_.chunk_keys(layer_, chunk));
  const uint32_t first = layout_.chunk_begin(chunk), n = layout_.chunk_size(chunk);
  for (uint32_t i = 0; i < n; i += items.per_page) {
    PagePiece& piece = pieces_.emplace_back(base + items.page(i), 0, items.bytes, out);
    piece.n = static_cast<uint16_t>(std::min(n - i, items.per_page));
    piece.step = static_cast<uint16_t>(items.bytes);
    piece.out_step = stride;
    piece.places = &order_->token_in[first + i];
  }
}

std::vector<PagePiece> GatherPlan::Take() {
  const auto by_page = [](const PagePiece& a, const PagePiece& b) { return a.page < b.page; };
  if (!std::is_sorted(pieces_.begin(), pieces_.end(), by_page)) {
    std::sort(pieces_.begin(), pieces_.end(), by_page);
  }
  return std::move(pieces_);
}

}  // namespace prefixd::storage
