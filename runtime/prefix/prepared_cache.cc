#include "runtime/prefix/prepared_cache.h"

#include <algorithm>

#include "base/call_scope.h"
#include "base/capture_errors.h"

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
  const Key key{id, n_tokens};
  std::shared_ptr<Loading> mine;
  PREFIXD_ASSIGN(std::shared_ptr<PreparedPrefix> prepared, FindOrWait(model, key, mine));
  if (prepared) {
    storage_.NoteUse(id);
    return prepared;
  }
  Status opened = CaptureErrors([&]() -> Status {
    PREFIXD_ASSIGN(prepared, Open(model, key, *mine));
    return {};
  });
  // Nothing allocates before those who wait are told.
  std::lock_guard lock(mutex_);
  mine->done = true;
  mine->status = std::move(opened);
  mine->prepared = prepared;
  loading_.erase(key);
  mine->changed.notify_all();
  if (!mine->status.ok()) return mine->status.error();
  return prepared;
}

Result<std::shared_ptr<PreparedPrefix>> PreparedCache::FindOrWait(
    const std::shared_ptr<const Model>& model, const Key& key, std::shared_ptr<Loading>& mine) {
  std::shared_ptr<PreparedPrefix> shared;  // last references are released after the lock
  std::shared_ptr<Loading> other;
  const auto serves = [&] { return shared->model() == model && !shared->memory()->stale; };
  std::unique_lock lock(mutex_);
  while (true) {
    std::erase_if(open_, [](const auto& entry) { return entry.second.memory.expired(); });
    if (const auto it = open_.find(key); it != open_.end()) shared = it->second.prefix.lock();
    if (shared && serves()) return shared;
    const auto it = loading_.find(key);
    if (it == loading_.end()) break;
    other = it->second;
    PREFIXD_TRY(AwaitInCall(other->changed, lock, [&] { return other->done; }));
    // Those who waited for an attempt share its error, and the next to ask tries again; but a call
    // that ended early says nothing to others, one of whom opens the prefix now.
    if (!other->status.ok() && EndedEarly(other->status.error())) continue;
    if (!other->status.ok()) return other->status.error();
    lock.unlock();
    shared = other->prepared;
    other.reset();
    if (serves()) return shared;
    shared.reset();
    lock.lock();
  }
  mine = std::make_shared<Loading>();
  loading_.emplace(key, mine);
  return std::shared_ptr<PreparedPrefix>();
}

Result<std::shared_ptr<PreparedPrefix>> PreparedCache::Open(
    const std::shared_ptr<const Model>& model, const Key& key, Loading& loading) {
  IdleNode before = TakeIdle(key, model.get());
  auto opened = PreparedPrefix::Open(services_, model, key.first, key.second,
                                     before.empty() ? nullptr : before.front().memory);
  if (!opened.ok()) {
    // What was loaded before serves the next attempt.
    std::lock_guard lock(mutex_);
    const auto gone = [&](const storage::SegmentId& id) {
      return std::ranges::count(before.front().chain, id) > 0;
    };
    if (!before.empty() && !std::ranges::any_of(loading.forgotten, gone))
      AddIdle(std::move(before));
    return opened.error();
  }
  std::vector<storage::SegmentId> chain;
  for (const SegmentPart& part : (*opened)->parts()) chain.push_back(part.id);
  // The end of the last session allocates nothing: it may come when there is no memory.
  IdleNode idle;
  const storage::PrefixInfo& info = (*opened)->stored().info();
  idle.push_back({key, model, (*opened)->memory(), chain, info.tenant, info.live});
  auto retire = [this, node = std::move(idle)](PreparedPrefix* prefix) mutable {
    delete prefix;  // closes the prefix's files
    Retire(std::move(node));
  };
  std::shared_ptr<PreparedPrefix> prepared(opened->release(), std::move(retire));
  std::lock_guard lock(mutex_);
  for (const storage::SegmentId& id : loading.forgotten) {
    if (std::ranges::count(chain, id) > 0) prepared->memory()->stale = true;
  }
  open_[key] = {prepared, prepared->memory(), std::move(chain)};
  return prepared;
}

PreparedCache::IdleNode PreparedCache::TakeIdle(const Key& key, const Model* model) {
  IdleNode taken;
  std::lock_guard lock(idle_mutex_);
  const auto it = std::ranges::find(idle_, key, &Idle::key);
  if (it == idle_.end()) return taken;
  taken.splice(taken.end(), idle_, it);
  if (taken.front().model.get() != model) taken.clear();
  return taken;
}

void PreparedCache::Retire(IdleNode idle) {
  if (idle.front().live) {
    idle.clear();
  } else {
    idle.front().memory->DropCheap();
    AddIdle(std::move(idle));
  }
  services_.selector_memory.Trim();
}

void PreparedCache::AddIdle(IdleNode idle) {
  std::list<Idle> gone;  // freed after the lock
  std::lock_guard lock(idle_mutex_);
  // `stale` is set under this lock as well, so no stale entry can enter afterwards.
  if (idle.front().memory->stale) return;
  for (auto it = idle_.begin(); it != idle_.end();) {
    const auto next = std::next(it);
    if (it->key == idle.front().key) gone.splice(gone.end(), idle_, it);
    it = next;
  }
  idle_.splice(idle_.begin(), idle);
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
  for (const auto& [key, loading] : loading_) loading->forgotten.push_back(segment);
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
