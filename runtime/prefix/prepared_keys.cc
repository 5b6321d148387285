// The exact keys that a prepared prefix holds for selection.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "runtime/prefix/prepared_prefix.h"

namespace prefixd {

std::vector<size_t> PreparedPrefix::KeyStrides() const {
  std::vector<size_t> strides(heads());
  for (size_t head = 0; head < strides.size(); ++head) {
    const bool slides = model_->spec.geometry.layers[layer_of(head)].sliding_window > 0;
    strides[head] = slides ? 0 : row(head).key_bytes();
  }
  return strides;
}

uint64_t PreparedPrefix::KeyBytes(uint32_t tokens) const {
  const std::vector<size_t> strides = KeyStrides();
  return std::accumulate(strides.begin(), strides.end(), uint64_t{0}) * tokens;
}

std::shared_ptr<PrefixKeys> PreparedPrefix::MakeKeys(const std::vector<size_t>& strides,
                                                     uint32_t room) const {
  const uint64_t bytes = std::accumulate(strides.begin(), strides.end(), uint64_t{0}) * room;
  if (bytes == 0) return nullptr;
  auto memory = services_.selector_memory.TryTake(account_, bytes);
  if (!memory) return nullptr;
  auto keys = std::make_shared<PrefixKeys>(strides, room, std::move(memory));
  keys->Take(0, candidates());
  return keys;
}

std::shared_ptr<PrefixKeys> PreparedPrefix::MakeSomeKeys(uint32_t room) const {
  const uint64_t capacity = services_.selector_memory.capacity();
  const uint64_t free = capacity - std::min(capacity, services_.selector_memory.used());
  // Idle prefixes give way to the first; the other half is left to prefixes that come later.
  for (const uint64_t most : {capacity / 2, std::min(capacity / 2, free)}) {
    std::vector<size_t> strides = KeyStrides();
    uint64_t bytes = 0;
    for (size_t& stride : strides) {
      const uint64_t more = uint64_t{stride} * room;
      if (bytes + more > most) stride = 0;
      bytes += stride > 0 ? more : 0;
    }
    if (auto keys = MakeKeys(strides, room)) return keys;
  }
  return nullptr;
}

PrefixKeys* PreparedPrefix::Keys() {
  std::lock_guard lock(memory_->keys_mutex);
  if (!memory_->keys) memory_->keys = MakeKeys(KeyStrides(), candidates());
  if (!memory_->keys) memory_->keys = MakeSomeKeys(candidates());
  return memory_->keys.get();
}

void PreparedPrefix::DropSomeKeys() {
  const PrefixKeys* keys = memory_->keys.get();
  if (keys == nullptr) return;
  const std::vector<size_t> strides = KeyStrides();
  bool all = true;
  for (size_t head = 0; head < strides.size(); ++head) all &= strides[head] == 0 || keys->has(head);
  const uint64_t bytes = KeyBytes(candidates());
  if (all || bytes > services_.selector_memory.capacity() ||
      !services_.selector_memory.MakeRoom(bytes - std::min(bytes, keys->bytes()))) {
    return;
  }
  for (PrefixMemory::Head& head : memory_->heads) {
    head.has_keys = false;
    head.keys = nullptr;
  }
  memory_->keys = nullptr;
  memory_->keys_before = 0;
}

void PreparedPrefix::TakeKeysOf(const PreparedPrefix& shorter) {
  if (compressed() || shorter.compressed()) return;  // their keys are of other tokens
  std::shared_ptr<PrefixKeys> before;
  {
    std::lock_guard lock(shorter.memory_->keys_mutex);
    before = shorter.memory_->keys;
  }
  bool loaded = before != nullptr;
  for (size_t head = 0; head < heads() && loaded; ++head) {
    loaded = !before->has(head) || shorter.holds_keys(head);
  }
  const uint32_t had = shorter.partition_.mid.size(), n = partition_.mid.size();
  std::lock_guard lock(memory_->keys_mutex);
  if (memory_->keys) return;
  if (loaded && before->Take(had, n)) {
    memory_->keys = std::move(before);
    memory_->keys_before = had;
    return;
  }
  // A prefix that has grown will grow again: a copy leaves so much room that each key is copied a
  // bounded number of times, where there is room without taking anybody's.
  const uint32_t more = n + n / 4;
  const SelectorMemory& memory = services_.selector_memory;
  const uint64_t used = memory.used(), capacity = memory.capacity();
  if (used < capacity && KeyBytes(more) <= capacity - used) {
    memory_->keys = MakeKeys(KeyStrides(), more);
  }
  if (!memory_->keys) memory_->keys = MakeKeys(KeyStrides(), n);
  if (!memory_->keys) memory_->keys = MakeSomeKeys(more);
}

Result<std::optional<RowsView>> PreparedPrefix::MidKeys(size_t head, Bring bring,
                                                        storage::ReadStats* reads) {
  const RowShape row = this->row(head);
  PrefixMemory::Head& state = memory_->heads[head];
  if (!state.has_keys.load(std::memory_order_acquire)) {
    const PrefixKeys* keys = Keys();
    if (keys == nullptr || !keys->has(head)) return std::optional<RowsView>();
    if (bring == Bring::kLater) {
      services_.key_preloader.Want(*this, index::IndexKind::kExact);
      return std::optional<RowsView>();
    }
    PREFIXD_TRY(LoadKeys(head, nullptr, storage::RangeUse::kOwn, nullptr, reads));
  }
  return std::optional(RowsView{state.keys,
                                compressed() ? state.kept.size() : partition_.mid.size(),
                                row.key_bytes(),
                                {row.key_dim, 0, row.dtype}});
}

Status PreparedPrefix::LoadKeys(size_t head, const PreparedPrefix* shorter, storage::RangeUse use,
                                const std::atomic<bool>* stop, storage::ReadStats* reads) {
  // A load that may be stopped checks `stop` after this many tokens.
  constexpr uint32_t kTokensAtATime = 16384;
  PrefixMemory::Head& state = memory_->heads[head];
  std::span<const uint32_t> kept;
  if (compressed()) {
    PREFIXD_ASSIGN(kept, KeptMid(head));
  }
  PREFIXD_ASSIGN(const CallLock lock, CallLock::Take(state.keys_mutex));
  if (state.has_keys.load(std::memory_order_relaxed)) return {};
  const PrefixKeys* keys = Keys();
  if (keys == nullptr || !keys->has(head)) return {};
  const size_t stride = row(head).key_bytes();
  std::byte* const rows = keys->rows(head);
  if (compressed()) {
    if (kept.size() > keys->room()) {
      return Error{Code::kFailedPrecondition,
                   "prefix " + stored_->info().id.ToString() +
                       " was compressed with other anchors (anchors.sink, anchors.tail), and some "
                       "of the first and last tokens of now have no rows; set them as they were, "
                       "or put the prompt again"};
    }
    for (size_t at = 0; at < kept.size(); at += kTokensAtATime) {
      if (stop && *stop) return Error{Code::kCancelled, "keys are not wanted any more"};
      const auto ids = kept.subspan(at, std::min<size_t>(kTokensAtATime, kept.size() - at));
      PREFIXD_TRY(stored_->ReadRows(layer_of(head), kv_head_of(head), ids, storage::RowPart::kKey,
                                    {{rows + at * stride, ids.size() * stride}, stride}, reads));
    }
    state.keys = rows;
    state.has_keys.store(true, std::memory_order_release);
    return {};
  }
  uint32_t at = partition_.mid.begin + memory_->keys_before;
  if (memory_->keys_before == 0 && shorter && shorter->holds_keys(head)) {
    const uint32_t had = shorter->partition_.mid.size();
    if (had > 0) std::memcpy(rows, shorter->memory_->heads[head].keys, had * stride);
    at += had;
  }
  for (uint32_t end = 0; at < partition_.mid.end; at = end) {
    end = stop ? std::min(partition_.mid.end, RunEnd(stored_->parts(), at, kTokensAtATime))
               : partition_.mid.end;
    if (stop && *stop) return Error{Code::kCancelled, "keys are not wanted any more"};
    const std::span<std::byte> out(rows + (at - partition_.mid.begin) * stride,
                                   (end - at) * stride);
    PREFIXD_TRY(stored_->ReadRange(layer_of(head), kv_head_of(head), {at, end},
                                   storage::RowPart::kKey, {out, stride}, use, reads));
  }
  state.keys = rows;
  state.has_keys.store(true, std::memory_order_release);
  return {};
}

Status PreparedPrefix::PreloadKeys(size_t head, const std::atomic<bool>& stop) {
  if (model_->spec.geometry.layers[layer_of(head)].sliding_window > 0) return {};
  storage::ReadStats reads;
  const Status loaded = LoadKeys(head, nullptr, storage::RangeUse::kOwnLater, &stop, &reads);
  NotePreloaded(memory_->heads[head], reads);
  return loaded;
}

}  // namespace prefixd
