#include "storage/store/prefix_link.h"

#include <algorithm>
#include <string>

namespace prefixd::storage {

size_t PrefixLink::EndOf(std::span<const uint32_t> ids, size_t at) const {
  const auto from = ids.begin() + static_cast<ptrdiff_t>(at);
  return static_cast<size_t>(std::lower_bound(from, ids.end(), tokens_.end) - ids.begin());
}

TokenRange PrefixLink::Within(TokenRange run) const {
  const uint32_t begin = std::max(run.begin, tokens_.begin);
  return {begin, std::max(begin, std::min(run.end, tokens_.end))};
}

uint32_t PrefixLink::ItemBytes(uint32_t layer) const {
  const RunLayout& run = layout().of(layer);
  return layout().reclustered() ? std::max(run.key_bytes(), run.value_bytes()) : run.row_bytes();
}

bool PrefixLink::InPlaceable(uint32_t layer) const {
  return file_->header().encoding == RowEncoding::kAsGiven && ItemBytes(layer) <= kPageBytes;
}

Status PrefixLink::CheckReadableInPlace(uint32_t layer) const {
  if (InPlaceable(layer)) return {};
  if (file_->header().encoding != RowEncoding::kAsGiven) {
    return Error{Code::kFailedPrecondition,
                 "rows of this prefix are stored as int8 and cannot be read in place; use "
                 "ReadRows"};
  }
  return Error{Code::kFailedPrecondition,
               "rows of " + std::to_string(ItemBytes(layer)) + " bytes are larger than a page of " +
                   std::to_string(kPageBytes) + " and cannot be read in place; use ReadRows"};
}

bool PrefixLink::IsKept(const RunOrder* order, uint32_t own) const {
  return !layout().compressed() || std::ranges::binary_search(order->kept, own);
}

Status PrefixLink::CheckKept(const SegmentId& prefix, uint32_t layer, uint32_t kv_head,
                             std::span<const uint32_t> ids) const {
  if (!layout().compressed()) return {};
  PREFIXD_ASSIGN(const RunOrder* order, Order(layer, kv_head));
  for (const uint32_t id : ids) {
    if (!IsKept(order, id - first())) return Compressed(prefix);
  }
  return {};
}

Status PrefixLink::CheckKept(const SegmentId& prefix, uint32_t layer, uint32_t kv_head,
                             TokenRange run) const {
  if (!layout().compressed()) return {};
  PREFIXD_ASSIGN(const RunOrder* order, Order(layer, kv_head));
  const auto at = std::ranges::lower_bound(order->kept, run.begin - first());
  const auto left = static_cast<size_t>(order->kept.end() - at);
  if (left >= run.size() && at[run.size() - 1] == run.end - 1 - first()) return {};
  return Compressed(prefix);
}

Result<const RunOrder*> PrefixLink::Order(uint32_t layer, uint32_t kv_head) const {
  auto order = file_->Order(*core_->engine, layer, kv_head);
  if (!order.ok() && order.error().code == Code::kCorrupt) {
    core_->counters.checksum_failures.fetch_add(1, std::memory_order_relaxed);
    core_->segments->Quarantine(file_->record().id, order.error().message);
  }
  return order;
}

Result<GatherPlan> PrefixLink::Plan(uint32_t layer, uint32_t kv_head, RowPart part) const {
  PREFIXD_ASSIGN(const RunOrder* order, Order(layer, kv_head));
  return GatherPlan(layout(), order, layer, kv_head, part, file_->header().encoding);
}

}  // namespace prefixd::storage
