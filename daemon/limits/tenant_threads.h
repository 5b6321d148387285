// Threads that carry out work of several tenants. Whatever one of them asks for, others find a
// thread: a tenant that has threads takes another only while, with it, it holds at most three times
// as many as stay free. Work of one tenant begins in order; tenants take turns.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace prefixd::daemon {

class TenantThreads {
 public:
  // Does not throw.
  using Work = std::function<void()>;

  explicit TenantThreads(size_t threads);
  ~TenantThreads() { Join(); }
  TenantThreads(const TenantThreads&) = delete;
  TenantThreads& operator=(const TenantThreads&) = delete;

  // Waits for the little memory that it takes; nothing is allocated when the work runs.
  void Post(const std::string& tenant, const Work& work);
  // Work of the daemon, which goes first and counts for no tenant: what ends a connection's calls
  // must not wait for them.
  void PostOwn(const Work& work);
  // Returns when all work is done, and ends the threads.
  void Join();

 private:
  struct Tenant {
    std::list<Work> waiting;
    size_t running = 0;
    uint64_t turn = 0;  // when its last work began; the least goes next
  };
  using Tenants = std::map<std::string, Tenant>;

  void Run();
  // The tenant whose turn it is; end(): none may go now.
  Tenants::iterator Next();

  std::mutex mutex_;
  std::condition_variable changed_;
  Tenants tenants_;  // those that have work, waiting or running
  std::list<Work> own_;
  size_t free_, waiting_ = 0;
  uint64_t turn_ = 1;
  bool joining_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace prefixd::daemon
