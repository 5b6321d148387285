#include "daemon/limits/tenant_threads.h"

#include <utility>

#include "daemon/limits/with_memory.h"

namespace prefixd::daemon {

TenantThreads::TenantThreads(size_t threads) : free_(threads) {
  threads_.reserve(threads);
  for (size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

void TenantThreads::Post(const std::string& tenant, const Work& work) {
  WithMemory([&] {
    std::list<Work> one{work};
    std::lock_guard lock(mutex_);
    const auto [it, added] = tenants_.try_emplace(tenant);
    if (added) it->second.turn = turn_ - 1;  // before whoever had the last turn
    it->second.waiting.splice(it->second.waiting.end(), one);
    ++waiting_;
    changed_.notify_one();
  });
}

void TenantThreads::PostOwn(const Work& work) {
  WithMemory([&] {
    std::list<Work> one{work};
    std::lock_guard lock(mutex_);
    own_.splice(own_.end(), one);
    ++waiting_;
    changed_.notify_one();
  });
}

TenantThreads::Tenants::iterator TenantThreads::Next() {
  auto next = tenants_.end();
  for (auto it = tenants_.begin(); it != tenants_.end(); ++it) {
    const Tenant& tenant = it->second;
    const bool may = tenant.running == 0 || tenant.running + 1 <= 3 * (free_ - 1);
    if (tenant.waiting.empty() || !may) continue;
    if (next == tenants_.end() || tenant.turn < next->second.turn) next = it;
  }
  return next;
}

void TenantThreads::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    const bool own = !own_.empty();
    const auto tenant = own ? tenants_.end() : Next();
    if (!own && tenant == tenants_.end()) {
      if (joining_ && tenants_.empty()) return;
      changed_.wait(lock);
      continue;
    }
    std::list<Work> mine;
    std::list<Work>& waiting = own ? own_ : tenant->second.waiting;
    mine.splice(mine.end(), waiting, waiting.begin());
    --free_;
    if (!own) {
      ++tenant->second.running;
      tenant->second.turn = turn_ += 2;
    }
    if (--waiting_ > 0) changed_.notify_one();
    lock.unlock();
    mine.front()();
    mine.clear();  // what it holds may take a while to end
    lock.lock();
    ++free_;
    if (!own && --tenant->second.running == 0 && tenant->second.waiting.empty()) {
      tenants_.erase(tenant);
    }
    if (joining_) changed_.notify_all();
  }
}

void TenantThreads::Join() {
  {
    std::lock_guard lock(mutex_);
    joining_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace prefixd::daemon
