// Tests the queue of steps: what waits is joined, calls that are to end leave it, and tenants share
// the cores by deficit round robin, here with costs that the test makes up.
#include "runtime/step/step_queue.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/expect_ok.h"

namespace prefixd::testing {
namespace {

// Calls have one task each; calls for one head are related.
class StepQueueTest : public ::testing::Test {
 protected:
  static void EndAll(std::span<GroupTask*> tasks, StepQueue::Service& service) {
    for (GroupTask* task : tasks) task->done = true;
    service.Charge({}, tasks.size());
  }
  StepQueue::Call& NewCall(size_t head) {
    StepQueue::Call& call = calls_.emplace_back();
    call.tasks.resize(1);
    call.tasks[0].plan = plan_;
    call.tasks[0].head = head;
    return call;
  }

  const std::shared_ptr<const SessionPlan> plan_ = std::make_shared<SessionPlan>();
  std::deque<StepQueue::Call> calls_;
};

TEST_F(StepQueueTest, WhatWaitsForOnePrefixIsRunTogetherAndNothingElseWaits) {
  std::mutex mutex;
  std::condition_variable go;
  bool open = false;
  std::vector<std::vector<size_t>> batches;  // heads
  StepQueue queue(2, [&](std::span<GroupTask*> tasks, StepQueue::Service& service) {
    std::unique_lock lock(mutex);
    batches.emplace_back();
    for (const GroupTask* task : tasks) batches.back().push_back(task->head);
    go.notify_all();
    go.wait(lock, [&] { return open; });
    lock.unlock();
    EndAll(tasks, service);
  });
  std::vector<std::thread> threads;
  const auto run = [&](size_t head) {
    threads.emplace_back([&queue, &call = NewCall(head)] { queue.Run(call); });
  };
  const auto begun = [&](size_t n) {
    std::unique_lock lock(mutex);
    go.wait(lock, [&] { return batches.size() == n; });
  };
  run(1);  // two cores: two begin at once, though they are related
  begun(1);
  run(1);
  begun(2);
  for (const size_t head : {7u, 8u, 7u, 9u, 7u}) {
    run(head);
    while (queue.waiting() < threads.size() - 2) std::this_thread::yield();
  }
  EXPECT_EQ(batches.size(), 2u);
  {
    std::lock_guard lock(mutex);
    open = true;
    go.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(batches.size(), 5u);
  std::sort(batches.begin(), batches.end());
  const std::vector<std::vector<size_t>> want = {{1}, {1}, {7, 7, 7}, {8}, {9}};
  EXPECT_EQ(batches, want);
  EXPECT_EQ(queue.joined(), 3u);
  EXPECT_EQ(queue.waiting(), 0u);
  StepQueue::Call nothing;
  queue.Run(nothing);
}

// A step that waited with a long pass would end with the last of its heads.
TEST_F(StepQueueTest, ExactPassesRunByThemselves) {
  std::mutex mutex;
  std::condition_variable go;
  bool open = false;
  std::vector<size_t> batches;  // their sizes
  StepQueue queue(1, [&](std::span<GroupTask*> tasks, StepQueue::Service& service) {
    std::unique_lock lock(mutex);
    batches.push_back(tasks.size());
    go.wait(lock, [&] { return open; });
    lock.unlock();
    EndAll(tasks, service);
  });
  std::vector<std::thread> threads;
  const auto run = [&](uint32_t n_queries) {
    StepQueue::Call& call = NewCall(1);
    call.tasks[0].n_queries = n_queries;
    const auto seen = [&] {
      std::lock_guard lock(mutex);
      return batches.size() + queue.waiting();
    };
    const size_t before = seen();
    threads.emplace_back([&queue, &call] { queue.Run(call); });
    while (seen() == before) std::this_thread::yield();
  };
  for (const uint32_t n_queries : {0u, 5u, 0u, 5u, 0u}) run(n_queries);
  {
    std::lock_guard lock(mutex);
    open = true;
    go.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(batches, (std::vector<size_t>{1, 1, 2, 1}));
  EXPECT_EQ(queue.joined(), 2u);
}

TEST_F(StepQueueTest, ACallThatIsToEndLeavesTheQueueUnlessAnotherTaskWaits) {
  std::mutex mutex;
  std::condition_variable go;
  bool open = false;
  size_t begun = 0;
  StepQueue queue(1, [&](std::span<GroupTask*> tasks, StepQueue::Service& service) {
    std::unique_lock lock(mutex);
    begun += tasks.size();
    go.notify_all();
    go.wait(lock, [&] { return open; });
    lock.unlock();
    EndAll(tasks, service);
  });
  CallCanceller canceller;
  StepQueue::Call &first = NewCall(1), &leaves = NewCall(1), &stays = NewCall(2);
  leaves.tasks[0].limits = stays.tasks[0].limits = CallLimits::Of(0, &canceller);
  stays.tasks.push_back(NewCall(3).tasks[0]);  // a task of another session
  std::thread one([&] { queue.Run(first); });
  {
    std::unique_lock lock(mutex);
    go.wait(lock, [&] { return begun == 1; });
  }
  std::thread two([&] { queue.Run(leaves); }), three([&] { queue.Run(stays); });
  while (queue.waiting() < 2) std::this_thread::yield();
  canceller.Cancel();
  two.join();  // although the core is not free
  EXPECT_CODE(leaves.tasks[0].status, Code::kCancelled);
  EXPECT_EQ(queue.waiting(), 1u);
  {
    std::lock_guard lock(mutex);
    open = true;
    go.notify_all();
  }
  one.join();
  three.join();
  EXPECT_EQ(begun, 3u);
}

// A stint charges by the clock, and only when it ends or others want cores.
TEST_F(StepQueueTest, AStintOwesNothingForTheTimeInWhichNobodyWaited) {
  constexpr auto kAlone = std::chrono::milliseconds(400);
  constexpr int kPieces = 300;  // of 1 ms each, of the tenant that comes
  StepQueue::Call &alone = NewCall(1), &comes = NewCall(2);
  alone.tenant = "alone";
  comes.tenant = "comes";
  std::atomic<int> served{0}, served_before{kPieces};
  std::atomic<bool> alone_long{false}, gave_way{false};
  StepQueue queue(1, [&](std::span<GroupTask*> tasks, StepQueue::Service& service) {
    GroupTask* const task = tasks.front();
    if (task->head == 2) {
      gave_way.wait(false);
      while (served < kPieces && !service.stopped()) {
        task->done = ++served == kPieces;
        service.Charge(std::chrono::milliseconds(1), task->done ? 1 : 0);
      }
      return;
    }
    StepQueue::Stint stint(service);
    if (gave_way) {  // goes on
      served_before = served.load();
      task->done = true;
      return stint.End(1);
    }
    std::this_thread::sleep_for(kAlone);
    alone_long = true;
    alone_long.notify_all();
    while (stint.GoesOn()) std::this_thread::yield();
    stint.End(0);
    gave_way = true;
    gave_way.notify_all();
  });
  std::thread one([&] { queue.Run(alone); });
  alone_long.wait(false);
  std::thread two([&] { queue.Run(comes); });
  one.join();
  two.join();
  EXPECT_EQ(served, kPieces);
  EXPECT_LT(served_before, kPieces);  // it need not wait until the other has no more work
}

// Tenants whose calls consist of pieces that cost what the test says, on one core. Nothing is
// served while the gate is shut, so that the order in which tenants are served is one alone.
class TenantsTest : public StepQueueTest {
 protected:
  using Cost = std::chrono::milliseconds;

  void SetUp() override {
    Ask("plug", 1, Cost(0));  // has the core until all others wait
  }
  void TearDown() override { Served(); }

  // A call of one task, which takes `pieces` pieces of `cost` each. The gate is shut, but for a
  // piece that is being served. Returns when the call waits, or another for it.
  void Ask(const std::string& tenant, int pieces, Cost cost, CallLimits limits = {}) {
    const size_t before = queue_.waiting();
    bool first = false;
    {
      std::lock_guard lock(mutex_);
      first = costs_.empty();
      StepQueue::Call& call = NewCall(costs_.size());
      call.tenant = *tenants_.insert(tenant).first;
      call.tasks[0].limits = limits;
      costs_.push_back({tenant, pieces, cost});
      threads_.emplace_back([this, &call] { queue_.Run(call); });
      if (first) changed_.wait(mutex_, [&] { return at_gate_; });
    }
    while (!first && queue_.waiting() == before) std::this_thread::yield();
  }
  void SetGate(bool open) {
    std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }
  // Opens the gate, and returns whom the pieces served, once all calls are done.
  std::string Served() {
    SetGate(true);
    for (size_t i = 0;; ++i) {
      std::unique_lock lock(mutex_);
      if (i == threads_.size()) return served_;
      std::thread& thread = threads_[i];
      lock.unlock();
      if (thread.joinable()) thread.join();
    }
  }
  // Does `work` with the gate shut while piece number `served` is served.
  void At(size_t served, std::function<void()> work) {
    at_piece_[served] = [this, work = std::move(work)] {
      SetGate(false);
      work();
      SetGate(true);
    };
  }

  struct Pieces {
    std::string tenant;
    int left;
    Cost cost;
  };
  std::map<size_t, std::function<void()>> at_piece_;  // before it is charged
  std::mutex mutex_;
  std::condition_variable_any changed_;
  bool open_ = false, at_gate_ = false;
  std::deque<Pieces> costs_;  // by head of the call's task
  std::string served_;        // the first letters of tenants, piece by piece
  std::set<std::string> tenants_;
  std::deque<std::thread> threads_;
  StepQueue queue_{1, [this](std::span<GroupTask*> tasks, StepQueue::Service& service) {
                     Serve(*tasks.front(), service);
                   }};

 private:
  void Serve(GroupTask& task, StepQueue::Service& service) {
    while (!task.done) {
      std::unique_lock lock(mutex_);
      at_gate_ = true;
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
      Pieces& pieces = costs_[task.head];
      if (pieces.tenant != "plug") served_ += pieces.tenant[0];
      task.done = --pieces.left == 0;
      const Cost cost = pieces.cost;
      const auto hook = at_piece_.find(served_.size());
      lock.unlock();
      if (hook != at_piece_.end() && task.head > 0) hook->second();
      service.Charge(cost, task.done ? 1 : 0);
      if (service.stopped()) return;
    }
  }
};

// The quantum is 4 ms.
TEST_F(TenantsTest, TakeTurnsByTheTimeThatTheyUse) {
  Ask("a", 9, Cost(1));
  Ask("b", 9, Cost(2));
  Ask("c", 9, Cost(4));
  EXPECT_EQ(Served(), "aaaabbcaaaabbcabbcbbcbccccc");
}

TEST_F(TenantsTest, WhoUsesMoreThanATurnOwesIt) {
  Ask("a", 3, Cost(12));
  Ask("b", 30, Cost(1));
  EXPECT_EQ(Served(), "abbbbbbbbbbbbabbbbbbbbbbbbabbbbbb");
}

TEST_F(TenantsTest, ManyCallsGetNoMoreThanOne) {
  for (int i = 0; i < 8; ++i) Ask("b", 1, Cost(2));
  Ask("a", 8, Cost(2));
  EXPECT_EQ(Served(), "bbaabbaabbaabbaa");
}

TEST_F(TenantsTest, WhoComesGoesFirstButHasSavedNothing) {
  Ask("a", 20, Cost(1));
  At(10, [this] { Ask("b", 9, Cost(1)); });
  // While a was alone it owed nobody anything, and b has no more than a turn for the time in which
  // it did not ask.
  EXPECT_EQ(Served(), "aaaaaaaaaabbbbaabbbbaaaabaaaa");
  EXPECT_EQ(queue_.stopped(), 5u);
}

TEST_F(TenantsTest, WhoLeavesInDebtOwesItWhenItComesBack) {
  Ask("b", 1, Cost(12));
  Ask("a", 20, Cost(1));
  At(3, [this] { Ask("b", 1, Cost(1)); });
  EXPECT_EQ(Served(), "baaaaaaaaaaaabaaaaaaaa");
}

// A tenant asks for another short call whenever one begins.
TEST_F(TenantsTest, WhoComesAgainAndAgainStarvesNobody) {
  Ask("a", 12, Cost(1));
  Ask("b", 1, Cost(1));
  for (size_t i = 1; i < 24; ++i) {
    At(i, [this] {
      if (served_.back() == 'b') Ask("b", 1, Cost(1));
    });
  }
  const std::string served = Served();
  EXPECT_EQ(served.substr(0, 24), "aaaabbbbaaaabbbbaaaabbbb");
}

TEST_F(TenantsTest, AStoppedCallEndsByItsLimits) {
  CallCanceller canceller;
  Ask("a", 20, Cost(1), CallLimits::Of(0, &canceller));
  at_piece_[5] = [&] {
    SetGate(false);
    Ask("b", 1, Cost(1));  // goes first: a stops
    canceller.Cancel();
  };
  SetGate(true);
  threads_[1].join();  // although b does not go on
  EXPECT_EQ(served_, "aaaaa");
  EXPECT_CODE(calls_[1].tasks[0].status, Code::kCancelled);
  EXPECT_EQ(queue_.waiting(), 0u);
  EXPECT_EQ(Served(), "aaaaab");
}

}  // namespace
}  // namespace prefixd::testing
