#include "runtime/prefix/prepared_cache.h"

#include <algorithm>

namespace prefixd {
namespace {

// Bounds the idle prefixes, because each has anchors that the selector's memory does not count.
constexpr size_t kMaxIdle = 64;

}  // namespace

PreparedCache::PreparedCache(PreparedPrefix::Services services, storage::PrefixStore& storage)
    : services_(std::move(services)), storage_(storage) {
  services_.selector_memory.OnShortage([this] { return DropOldest(nullptr); });
  if (services_.derived.memory) {
    giver_ = services_.derived.memory->OnShortage(
        [this](uint64_t, const std::string* tenant) { return DropOldest(tenant); });
  }
}

Result<std::shared_ptr<PreparedPrefix>> PreparedCache::Get(
    const std::shared_ptr<const Model>& model, const storage::SegmentId& id, uint32_t n_tokens) {
  std::shared_ptr<PreparedPrefix> shared;  // a last reference is released after the lock
  std::lock_guard lock(mutex_);
  std::erase_if(open_, [](const auto& entry) { return entry.second.memory.expired(); });
  const Key key{id, n_tokens};
  if (const auto it = open_.find(key); it != open_.end()) shared = it->second.prefix.lock();
  if (shared && shared->model() == model && !shared->memory()->stale) {
    storage_.NoteUse(id);
    return shared;
  }
  PREFIXD_ASSIGN(auto opened,
                 PreparedPrefix::Open(services_, model, id, n_tokens, TakeIdle(key, model.get())));
  std::vector<storage::SegmentId> chain;
  for (const SegmentPart& part : opened->parts()) chain.push_back(part.id);
  std::shared_ptr<PreparedPrefix> prepared(
      opened.release(), [this, key, chain](PreparedPrefix* prefix) {
        Idle idle{key, prefix->model(), prefix->memory(), chain, prefix->stored().info().tenant};
        delete prefix;  // closes the prefix's files
        Retire(std::move(idle));
      });
  open_[key] = {prepared, prepared->memory(), std::move(chain)};
  return prepared;
}

std::shared_ptr<PrefixMemory> PreparedCache::TakeIdle(const Key& key, const Model* model) {
  std::lock_guard lock(idle_mutex_);
  const auto it = std::ranges::find(idle_, key, &Idle::key);
  if (it == idle_.end()) return nullptr;
  auto memory = it->model.get() == model ? std::move(it->memory) : nullptr;
  idle_.erase(it);
  return memory;
}

void PreparedCache::Retire(Idle idle) {
  idle.memory->DropCheap();
  AddIdle(std::move(idle));
  services_.selector_memory.Trim();
}

void PreparedCache::AddIdle(Idle idle) {
  std::list<Idle> gone;  // freed after the lock
  std::lock_guard lock(idle_mutex_);
  // `stale` is set under this lock as well, so no stale entry can enter afterwards.
  if (idle.memory->stale) return;
  for (auto it = idle_.begin(); it != idle_.end();) {
    const auto next = std::next(it);
    if (it->key == idle.key) gone.splice(gone.end(), idle_, it);
    it = next;
  }
  idle_.push_front(std::move(idle));
  if (idle_.size() > kMaxIdle) gone.splice(gone.end(), idle_, std::prev(idle_.end()));
}

bool PreparedCache::DropOldest(const std::string* tenant) {
  std::list<Idle> gone;
  std::lock_guard lock(idle_mutex_);
  for (auto it = idle_.end(); it != idle_.begin();) {
    --it;
    if (tenant && it->tenant != *tenant) continue;
    gone.splice(gone.end(), idle_, it);
    return true;
  }
  return false;
}

void PreparedCache::Forget(const storage::SegmentId& segment) {
  std::list<Idle> gone;
  std::lock_guard lock(mutex_);
  std::lock_guard idle_lock(idle_mutex_);
  for (const auto& [key, open] : open_) {
    const auto memory = open.memory.lock();
    if (memory && std::ranges::count(open.chain, segment) > 0) memory->stale = true;
  }
  for (auto it = idle_.begin(); it != idle_.end();) {
    const auto next = std::next(it);
    if (std::ranges::count(it->chain, segment) > 0) gone.splice(gone.end(), idle_, it);
    it = next;
  }
}

void PreparedCache::Prune(const std::function<bool(const storage::SegmentId&)>& exists) {
  std::list<Idle> gone;
  std::lock_guard lock(idle_mutex_);
  for (auto it = idle_.begin(); it != idle_.end();) {
    const auto next = std::next(it);
    if (!std::ranges::all_of(it->chain, exists)) gone.splice(gone.end(), idle_, it);
    it = next;
  }
}

}  // namespace prefixd
