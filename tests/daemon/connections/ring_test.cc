// Steps through a connection's ring: several at a time, beside other calls, in turn with those of
// other clients, and when either side goes away.
#include <atomic>
#include <future>

#include "client_lib/session_place.h"
#include "tests/daemon/connections/ring_fixture.h"

namespace prefixd::testing {
namespace {

TEST_F(RingTest, OneCallCarriesABatch) {
  constexpr uint32_t kSessions = 5;
  std::vector<std::shared_ptr<Session>> sessions;
  std::vector<Tensors> tensors(kSessions);
  std::vector<StepInfo> infos(kSessions);
  std::vector<StepRequest> batch;
  for (uint32_t i = 0; i < kSessions; ++i) {
    sessions.push_back(Attach(*client_));
    batch.push_back({sessions[i].get(),
                     i % 2,
                     tensors[i].q,
                     tensors[i].y,
                     tensors[i].lse,
                     i == 0 ? nullptr : &infos[i],
                     {}});
  }
  const auto before = client_->Server();
  client_->StepBatch(batch);
  for (uint32_t i = 0; i < kSessions; ++i) {
    ASSERT_OK(batch[i].status);
    EXPECT_TRUE(tensors[i].right(i % 2, sessions[i]->info().id));
    if (i == 0) continue;
    EXPECT_EQ(infos[i].k, sessions[i]->info().id);
    EXPECT_EQ(infos[i].ledger.steps, 7u);
    EXPECT_EQ(infos[i].ledger.compute_ns, 9u);
    EXPECT_EQ(infos[i].ledger.rho_z_sum, 0.5);
    EXPECT_EQ(infos[i].k_per_head, (std::vector<uint32_t>{3, 3}));
    EXPECT_EQ(infos[i].rho_z, std::vector<float>(4, 0.25f));
    ASSERT_EQ(infos[i].missing.size(), 4u);
    EXPECT_EQ(infos[i].missing[3].delta, 0.125);
    EXPECT_TRUE(infos[i].missing[3].certified);
  }
  EXPECT_EQ(control_->largest_batch, kSessions);
  const auto after = client_->Server();
  EXPECT_EQ(after->ring_calls - before->ring_calls, 1u);
  EXPECT_EQ(after->ring_steps - before->ring_steps, kSessions);
  EXPECT_EQ(after->calls - before->calls, 2u);  // that, and Server itself
  EXPECT_EQ(after->calls_failed, before->calls_failed);
}

TEST_F(RingTest, AStepFailsAlone) {
  const auto good = Attach(*client_), bad = Attach(*client_);
  Tensors a, b;
  std::vector<StepRequest> batch = {{good.get(), 0, a.q, a.y, a.lse, nullptr, {}},
                                    {bad.get(), 9, b.q, b.y, b.lse, nullptr, {}}};
  client_->StepBatch(batch);
  EXPECT_OK(batch[0].status);
  EXPECT_TRUE(a.right(0, good->info().id));
  EXPECT_CODE(batch[1].status, Code::kInvalidArgument);
  EXPECT_EQ(b.y, std::vector<float>(b.y.size()));
}

// The call is answered, but an operator sees that it failed: once, with its first error.
TEST_F(RingTest, CallsOfWhichAStepFailedAreCounted) {
  for (const bool ring : {true, false}) {
    const auto client = daemon_->Connect({.shared_memory = ring});
    const auto session = Attach(*client);
    const uint64_t failed = client->Server()->calls_failed;
    const auto listed = [&] { return client->Watch()->at("watch").at("failures").size(); };
    const size_t before = listed();
    std::vector<Tensors> t(3);
    std::vector<StepRequest> batch;
    for (const uint32_t layer : {0, 9, 10}) {
      Tensors& own = t[batch.size()];
      batch.push_back({session.get(), layer, own.q, own.y, own.lse, nullptr, {}});
    }
    client->StepBatch(batch);
    EXPECT_OK(batch[0].status);
    EXPECT_CODE(batch[2].status, Code::kInvalidArgument);
    EXPECT_EQ(client->Server()->calls_failed, failed + 1);
    ASSERT_EQ(listed(), before + 1);
    const auto failure = client->Watch()->at("watch").at("failures").at(0);
    EXPECT_EQ(failure["call"], "step");
    EXPECT_EQ(failure["message"], batch[1].status.error().message);
    EXPECT_EQ(failure["request"].get<std::string>().ends_with("-ring"), ring);
  }
}

// A batch that is larger than a slot, and all steps where there is no ring, go as messages.
TEST_F(RingTest, WhatDoesNotFitGoesAsAMessage) {
  daemon::Config config;
  config.ring_mib = 1;  // slots of 64 KiB
  Start(config);
  const auto session = Attach(*client_);
  std::vector<Tensors> tensors(200);
  std::vector<StepRequest> batch;
  for (Tensors& t : tensors) batch.push_back({session.get(), 0, t.q, t.y, t.lse, nullptr, {}});
  client_->StepBatch(batch);
  for (const Tensors& t : tensors) EXPECT_TRUE(t.right(0, session->info().id));
  EXPECT_EQ(client_->Server()->ring_calls, 0u);
  EXPECT_OK(Step(*session, 0));
  EXPECT_EQ(client_->Server()->ring_calls, 1u);
  const auto without = daemon_->Connect({.shared_memory = false});
  EXPECT_OK(Step(*Attach(*without), 0));
  EXPECT_EQ(client_->Server()->ring_calls, 1u);
  config.ring_mib = 0;
  Start(config);
  EXPECT_OK(Step(*Attach(*client_), 0));
  EXPECT_EQ(client_->Server()->ring_calls, 0u);
}

TEST_F(RingTest, OtherVersionsGetNoRing) {
  EXPECT_TRUE(RingClient(daemon_->path()).has_ring());
  RingClient other(daemon_->path(), wire::kStepFrameVersion + 1);
  EXPECT_FALSE(other.has_ring());
  EXPECT_TRUE(other.alive());
}

// While a step of a connection is held, its other steps and all its calls go on.
TEST_F(RingTest, StepsHoldUpNothing) {
  const auto held = Attach(*client_), other = Attach(*client_);
  control_->Hold();
  Status late;
  std::thread thread = HeldStep(*held, &late);
  control_->AwaitHeld(1);
  EXPECT_TRUE(EndsWhileHeld([&] {
    EXPECT_OK(Step(*other, 0));
    EXPECT_OK(other->SetPolicy({}));
    EXPECT_OK(held->SetPolicy({}));
    EXPECT_OK(Attach(*client_)->Detach());
    EXPECT_OK(held->Detach());  // its step goes on
  }));
  control_->Release();
  thread.join();
  EXPECT_OK(late);
}

// More calls than slots: the last ones go as messages, which wait for the one before them.
TEST_F(RingTest, AllSlotsTaken) {
  constexpr uint32_t kSlots = 16;
  daemon::Config config;
  config.step_threads = 2 * kSlots;  // a tenant never has all of them
  Start(config);
  const auto session = Attach(*client_);
  control_->Hold();
  std::vector<Status> statuses(kSlots + 2);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < kSlots; ++i) threads.push_back(HeldStep(*session, &statuses[i]));
  control_->AwaitHeld(kSlots);
  for (uint32_t i = 0; i < 2; ++i) threads.push_back(HeldStep(*session, &statuses[kSlots + i]));
  control_->AwaitHeld(kSlots + 1);
  control_->Release();
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : statuses) EXPECT_OK(status);
  // Of the two beyond the slots one went as a message for certain: it was held beside all of them.
  // The other may have begun when slots were free again.
  const uint64_t ring_calls = client_->Server()->ring_calls;
  EXPECT_GE(ring_calls, kSlots);
  EXPECT_LE(ring_calls, kSlots + 1);
}

// With one thread for all rings, a client that asks for many steps at once waits after each for the
// other clients.
TEST_F(RingTest, ClientsTakeTurns) {
  daemon::Config config;
  config.step_threads = 1;
  Start(config);
  const RingClient greedy(daemon_->path()), modest(daemon_->path());
  ASSERT_TRUE(greedy.has_ring() && modest.has_ring());
  const auto request = greedy.Request(1, SteppingStore::kHeldLayer);
  control_->Hold();
  greedy.Ask(0, request);
  control_->AwaitHeld(1);
  for (uint32_t i = 1; i < 6; ++i) greedy.Ask(i, request);
  modest.Ask(0, modest.Request(1, SteppingStore::kHeldLayer));
  control_->LetGo(7);
  for (uint32_t i = 0; i < 6; ++i) greedy.Await(i);
  modest.Await(0);
  const uint64_t of_modest = 2;  // the store's second session
  const std::vector<uint64_t> order = control_->Order();
  const auto at = std::ranges::find(order, of_modest);
  ASSERT_NE(at, order.end());
  EXPECT_LE(at - order.begin(), 2);
}

// A tenant that asks for more steps than there are threads leaves some to others.
TEST_F(RingTest, ATenantLeavesThreadsToOthers) {
  daemon::Config config;
  config.step_threads = 4;
  Start(config);
  const auto other = daemon_->Connect({.tenant = "other"});
  const auto others = other->Attach({.model = "m", .prefix = "other/prefix"});
  ASSERT_OK(others);
  const auto session = Attach(*client_);
  control_->Hold();
  std::vector<Status> statuses(8);
  std::vector<std::thread> threads;
  for (Status& status : statuses) threads.push_back(HeldStep(*session, &status));
  control_->AwaitHeld(3);
  EXPECT_TRUE(EndsWhileHeld([&] {
    for (int i = 0; i < 10; ++i) EXPECT_OK(Step(**others, 0));
  }));
  EXPECT_EQ(control_->Held(), 3u);
  // Those that wait are carried out by the tenant's own threads.
  control_->Release();
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : statuses) EXPECT_OK(status);
  EXPECT_EQ(client_->Server()->ring_steps, 18u);
}

// Sessions come and go beside the steps of others.
TEST_F(RingTest, AttachAndDetachBesideSteps) {
  const auto session = Attach(*client_);
  std::atomic<bool> stop{false};
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      while (!stop) failed += Step(*session, 0).ok() ? 0 : 1;
    });
  }
  for (int i = 0; i < 50; ++i) {
    const auto short_lived = Attach(*client_);
    ASSERT_TRUE(short_lived);
    EXPECT_OK(Step(*short_lived, 0));
    EXPECT_OK(session->SetPolicy({}));
    EXPECT_OK(short_lived->Detach());
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(control_->attached, 1);
}

TEST_F(RingTest, SpinningClientsGetTheSameAnswers) {
  for (const uint64_t polling : {0, 1}) {
    daemon::Config config;
    config.polling_threads = polling;
    Start(config);
    std::vector<std::unique_ptr<RemoteStore>> clients;
    std::vector<std::thread> threads;
    std::atomic<int> failed{0};
    for (int t = 0; t < 3; ++t) {
      clients.push_back(daemon_->Connect({.spin_us = t < 2 ? 300u : 0u}));
      threads.emplace_back([&, client = clients.back().get()] {
        const auto session = Attach(*client);
        for (int i = 0; i < 200; ++i) failed += Step(*session, 0).ok() ? 0 : 1;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(failed, 0);
    EXPECT_EQ(client_->Server()->ring_steps, 600u);
  }
}

// ---- ends -------------------------------------------------------------------------------------

// Sessions outlive their connection until their steps end, and no longer.
TEST_F(RingTest, AClientGoesAwayWhileItsStepRuns) {
  const auto before = client_->Server();
  control_->Hold();
  {
    RingClient gone(daemon_->path());
    ASSERT_TRUE(gone.has_ring());
    gone.Ask(3, gone.Request(2, SteppingStore::kHeldLayer));
    control_->AwaitHeld(1);
    gone.Ask(4, gone.Request(1, SteppingStore::kHeldLayer));
    control_->AwaitHeld(2);
    gone.Close();
  }
  EXPECT_EQ(control_->attached, 1);
  control_->Release();
  while (control_->attached > 0) std::this_thread::yield();
  while (client_->Server()->connections > before->connections) std::this_thread::yield();
  EXPECT_EQ(client_->Server()->shared_memory_bytes, before->shared_memory_bytes);
}

TEST_F(RingTest, AStoppingDaemonAnswersRunningSteps) {
  const auto session = Attach(*client_);
  control_->Hold();
  Status late;
  std::thread thread = HeldStep(*session, &late);
  control_->AwaitHeld(1);
  auto stopped = std::async(std::launch::async, [this] { return daemon_->Stop(); });
  // The listener goes first; the step is let go when the daemon has begun to stop.
  while (Socket::Connect(*Address::Parse("unix:" + daemon_->path()),
                         Socket::Clock::now() + std::chrono::seconds(1))
             .ok()) {
    std::this_thread::yield();
  }
  control_->Release();
  thread.join();
  EXPECT_OK(late);
  EXPECT_EQ(stopped.get(), 0);
}

TEST_F(RingTest, AStepEndsByItsDeadline) {
  control_->heeds = true;
  const auto impatient = daemon_->Connect({.call_timeout_ms = 2000});
  const auto session = Attach(*impatient);
  const uint64_t connections = client_->Server()->connections_total;
  control_->Hold();
  EXPECT_CODE(Step(*session, SteppingStore::kHeldLayer), Code::kDeadlineExceeded);
  control_->Release();
  EXPECT_OK(Step(*session, SteppingStore::kHeldLayer));
  EXPECT_EQ(client_->Server()->connections_total, connections);
}

TEST_F(RingTest, ACancelledStepEnds) {
  control_->heeds = true;
  const auto session = Attach(*client_), other = Attach(*client_);
  control_->Hold();
  Status ended, goes_on;
  std::thread thread = HeldStep(*session, &ended), beside = HeldStep(*other, &goes_on);
  control_->AwaitHeld(2);
  session->Cancel();
  thread.join();
  EXPECT_CODE(ended, Code::kCancelled);
  control_->Release();
  beside.join();
  EXPECT_OK(goes_on);
  EXPECT_OK(Step(*session, SteppingStore::kHeldLayer));
}

// One cancellation ends the frame; the others' steps are sent again.
TEST_F(RingTest, ACancellationInABatchEndsOneSessionsStep) {
  control_->heeds = true;
  const auto session = Attach(*client_), other = Attach(*client_);
  control_->Hold();
  Tensors a, b;
  std::vector<StepRequest> batch{
      {session.get(), SteppingStore::kHeldLayer, a.q, a.y, a.lse, nullptr, {}},
      {other.get(), SteppingStore::kHeldLayer, b.q, b.y, b.lse, nullptr, {}}};
  std::thread thread([&] { client_->StepBatch(batch); });
  control_->AwaitHeld(1);
  session->Cancel();
  const auto waits_alone = [&] {
    std::lock_guard lock(control_->mutex);
    return control_->held == 1 && control_->order.back() == other->info().id;
  };
  while (!waits_alone()) std::this_thread::yield();
  control_->Release();
  thread.join();
  EXPECT_CODE(batch[0].status, Code::kCancelled);
  EXPECT_OK(batch[1].status);
  EXPECT_TRUE(b.right(SteppingStore::kHeldLayer, other->info().id));
}

TEST_F(RingTest, StepsEndWithTheirClient) {
  control_->heeds = true;
  control_->Hold();
  {
    RingClient gone(daemon_->path());
    gone.Ask(3, gone.Request(2, SteppingStore::kHeldLayer));
    control_->AwaitHeld(1);
    gone.Close();
  }
  while (control_->attached > 0) std::this_thread::yield();  // nobody releases it
}

TEST_F(RingTest, AStepThatTakesTooLongBreaksTheConnection) {
  const auto impatient = daemon_->Connect({.call_timeout_ms = 2000});
  const auto session = Attach(*impatient);
  control_->Hold();
  EXPECT_CODE(Step(*session, SteppingStore::kHeldLayer), Code::kUnavailable);
  EXPECT_LE(control_->Order().size(), 1u);  // it was not sent again
  control_->Release();
  Tensors t;
  EXPECT_OK(session->Step(0, t.q, t.y, t.lse, nullptr));  // over a new connection
}

TEST_F(RingTest, AnInterruptedStepEnds) {
  auto opened = Connection::Open(*Address::Parse("unix:" + daemon_->path()), {});
  ASSERT_OK(opened);
  Connection& connection = **opened;
  RingCalls* const ring = connection.ring();
  ASSERT_NE(ring, nullptr);
  const RingClient shape(daemon_->path());
  const auto attached = AttachOver(*opened, {"m", "", {}, "prefix"});
  ASSERT_OK(attached);
  control_->Hold();
  const auto slot = ring->Take();
  ASSERT_TRUE(slot);
  std::ranges::copy(shape.Request(1, SteppingStore::kHeldLayer), ring->slot(*slot).begin());
  Status late;
  std::thread thread([&] { late = connection.AwaitStep(*slot, {}, [] { return false; }); });
  control_->AwaitHeld(1);
  connection.Interrupt();
  thread.join();
  EXPECT_CODE(late, Code::kUnavailable);
  EXPECT_FALSE(connection.alive());
}

}  // namespace
}  // namespace prefixd::testing
