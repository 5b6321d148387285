// Tests how tenants share threads, without a transport.
#include "daemon/limits/tenant_threads.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/ends.h"
#include "tests/support/test.h"

namespace prefixd::daemon {
namespace {

// Work that waits until it is let go, and says that it began.
class Gate {
 public:
  TenantThreads::Work Of(const std::string& tenant) {
    return [this, tenant] {
      std::unique_lock lock(mutex_);
      ++begun_[tenant];
      order_.push_back(tenant);
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_ || let_go_ > 0; });
      if (!open_) --let_go_;
    };
  }
  void Await(const std::string& tenant, int n) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return begun_[tenant] >= n; });
  }
  int begun(const std::string& tenant) {
    std::lock_guard lock(mutex_);
    return begun_[tenant];
  }
  std::vector<std::string> order() {
    std::lock_guard lock(mutex_);
    return order_;
  }
  void LetGo(int n) {
    std::lock_guard lock(mutex_);
    let_go_ += n;
    changed_.notify_all();
  }
  void Open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, int> begun_;
  std::vector<std::string> order_;
  bool open_ = false;
  int let_go_ = 0;
};

TEST(TenantThreads, WhoeverComesFindsAThread) {
  Gate gate;
  TenantThreads threads(16);
  for (int i = 0; i < 100; ++i) threads.Post("greedy", gate.Of("greedy"));
  gate.Await("greedy", 12);
  for (int i = 0; i < 100; ++i) threads.Post("second", gate.Of("second"));
  gate.Await("second", 3);
  threads.Post("third", gate.Of("third"));
  gate.Await("third", 1);
  EXPECT_EQ(gate.begun("greedy"), 12);
  EXPECT_EQ(gate.begun("second"), 3);
  gate.Open();
  threads.Join();
  EXPECT_EQ(gate.begun("greedy") + gate.begun("second") + gate.begun("third"), 201);
}

TEST(TenantThreads, TenantsTakeTurns) {
  Gate gate;
  TenantThreads threads(1);
  for (int i = 0; i < 3; ++i) threads.Post("a", gate.Of("a"));
  gate.Await("a", 1);
  for (int i = 0; i < 3; ++i) threads.Post("b", gate.Of("b"));
  gate.Open();
  threads.Join();
  EXPECT_EQ(gate.order(), (std::vector<std::string>{"a", "b", "a", "b", "a", "b"}));
}

// What ends the calls of a connection does not wait for the share of its tenant.
TEST(TenantThreads, WorkOfTheDaemonGoesFirst) {
  Gate gate;
  TenantThreads threads(4);
  for (int i = 0; i < 10; ++i) threads.Post("a", gate.Of("a"));
  gate.Await("a", 3);
  for (int i = 0; i < 10; ++i) threads.Post("b", gate.Of("b"));
  gate.Await("b", 1);
  threads.PostOwn(gate.Of("own"));
  gate.LetGo(1);
  gate.Await("own", 1);
  EXPECT_EQ(gate.begun("a") + gate.begun("b"), 4);
  gate.Open();
}

}  // namespace
}  // namespace prefixd::daemon
